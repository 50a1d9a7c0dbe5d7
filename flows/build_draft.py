"""The flow `build-draft`: from prompts and a target model to a published draft and the proof of its
acceptance.

In: a recipe, and dotted overrides of it. Out: the published draft's reference; where to look is logged last.
`python -m flows.build_draft RECIPE [--set training.lr=1e-4 ...]` runs it here and now.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.shared import run_name, show, started
from storage.artifacts import ArtifactRef
from tasks.build_vocabulary import build_vocabulary
from tasks.check_serving import check_serving
from tasks.evaluate_draft import evaluate_draft
from tasks.extract_features import extract_features
from tasks.make_responses import make_responses
from tasks.outcome import outcome_of
from tasks.prepare_conversations import prepare_conversations
from tasks.publish_draft import publish_draft
from tasks.recipe import Recipe
from tasks.train_draft import train_draft


@flow(name="build-draft", flow_run_name=run_name)
def build_draft(recipe: Recipe, overrides: dict[str, Any] | None = None) -> ArtifactRef:
    """Build, prove and publish a draft. A stage that was done before on the same input is not done again."""
    with started(recipe, overrides) as (recipe, target, tracker):
        conversations = prepare_conversations(recipe, target, tracker=tracker)
        responses = make_responses(recipe, target, conversations, tracker=tracker)
        features = extract_features(recipe, target, responses, tracker=tracker)
        vocabulary = build_vocabulary(recipe, target, responses, tracker=tracker)
        draft = train_draft(recipe, target, features, vocabulary, tracker=tracker)
        acceptance = evaluate_draft(recipe, target, draft, features, tracker=tracker)
        proof = []
        if recipe.serving.enabled:
            proof = [check_serving(recipe, target, draft, acceptance, responses, tracker=tracker)]
        published = publish_draft(recipe, target, draft, acceptance, *proof, tracker=tracker)
        show(
            outcome_of(
                recipe, target, published, acceptance, tracker.finish(published, acceptance=acceptance)
            )
        )
    return published


if __name__ == "__main__":
    from flows.command import run_command

    run_command("build-draft")
