"""The flow `build-draft`: from prompts and a target model to a published draft and the proof of its
acceptance.

In: a recipe, and dotted overrides of it. Out: the published draft's reference; where to look is logged last.
`python -m flows build-draft RECIPE [--set training.lr=1e-4 ...]` runs it here and now.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows import dag
from flows.shared import run_name, started
from storage.artifacts import ArtifactRef
from tasks.recipe import Recipe


@flow(name="build-draft", flow_run_name=run_name)
def build_draft(recipe: Recipe, overrides: dict[str, Any] | None = None) -> ArtifactRef:
    """Build, prove and publish a draft. A stage that was done before on the same input is not done again."""
    with started(recipe, overrides) as build:
        trained = dag.train(build.do)
        proof = dag.prove(build.do, trained, serving=build.recipe.serving.enabled)
        published = dag.publish(build.do, trained, proof)
        build.show(published, acceptance=proof.acceptance)
    return published
