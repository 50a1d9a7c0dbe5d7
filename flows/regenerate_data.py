"""The flow `regenerate-data`: the target's own answers to the recipe's prompts, and nothing more.

In: a recipe, and dotted overrides of it. Out: the responses' reference.
`python -m flows.regenerate_data RECIPE [--set data.seed=1 ...]` runs it here and now.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.shared import run_name, show, started
from storage.artifacts import ArtifactRef
from tasks.make_responses import make_responses
from tasks.outcome import outcome_of
from tasks.prepare_conversations import prepare_conversations
from tasks.recipe import Recipe


@flow(name="regenerate-data", flow_run_name=run_name)
def regenerate_data(recipe: Recipe, overrides: dict[str, Any] | None = None) -> ArtifactRef:
    """Have the target answer the prompts again: the data a draft is trained on."""
    with started(recipe, overrides) as (recipe, target, tracker):
        conversations = prepare_conversations(recipe, target, tracker=tracker)
        responses = make_responses(recipe, target, conversations, tracker=tracker)
        show(outcome_of(recipe, target, responses, None, tracker.finish(responses)))
    return responses


if __name__ == "__main__":
    from flows.command import run_command

    run_command("regenerate-data")
