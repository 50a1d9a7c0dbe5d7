"""The flow `evaluate-draft`: how often the recipe's finished draft is accepted, and the proof that a server
agrees.

In: a recipe whose draft is in the store, and dotted overrides of it. Out: the acceptance's reference.
`python -m flows.evaluate_draft RECIPE [--set evaluation.chain_length=7 ...]` runs it here and now.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.shared import run_name, show, started
from storage.artifacts import ArtifactRef
from tasks.build_vocabulary import build_vocabulary
from tasks.check_serving import check_serving
from tasks.evaluate_draft import evaluate_draft as evaluate
from tasks.extract_features import extract_features
from tasks.make_responses import make_responses
from tasks.outcome import outcome_of
from tasks.prepare_conversations import prepare_conversations
from tasks.recipe import Recipe
from tasks.train_draft import train_draft


@flow(name="evaluate-draft", flow_run_name=run_name)
def evaluate_draft(recipe: Recipe, overrides: dict[str, Any] | None = None) -> ArtifactRef:
    """Measure the draft that was built; stops where it was not built with these settings."""
    with started(recipe, overrides) as (recipe, target, tracker):
        conversations = prepare_conversations.existing(recipe, target)
        responses = make_responses.existing(recipe, target, conversations)
        features = extract_features.existing(recipe, target, responses)
        vocabulary = build_vocabulary.existing(recipe, target, responses)
        draft = train_draft.existing(recipe, target, features, vocabulary)
        acceptance = evaluate(recipe, target, draft, features, tracker=tracker)
        if recipe.serving.enabled:
            check_serving(recipe, target, draft, acceptance, responses, tracker=tracker)
        page = tracker.finish(acceptance, acceptance=acceptance)
        show(outcome_of(recipe, target, acceptance, acceptance, page))
    return acceptance


if __name__ == "__main__":
    from flows.command import run_command

    run_command("evaluate-draft")
