"""The flow `evaluate-draft`: how often the recipe's finished draft is accepted, and the proof that a server
agrees.

In: a recipe whose draft is in the store, and dotted overrides of it. Out: the acceptance's reference. `python
-m flows.evaluate_draft RECIPE [--set evaluation.chain_length=7 ...]` runs it here and now.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows import dag
from flows.shared import run_name, started
from storage.artifacts import ArtifactRef
from tasks.recipe import Recipe


@flow(name="evaluate-draft", flow_run_name=run_name)
def evaluate_draft(recipe: Recipe, overrides: dict[str, Any] | None = None) -> ArtifactRef:
    """Measure the draft that was built; stops where none was built with these settings."""
    with started(recipe, overrides) as build:
        trained = dag.train(build.existing)
        proof = dag.prove(build.do, trained, serving=build.recipe.serving.enabled)
        build.show(proof.acceptance, acceptance=proof.acceptance)
    return proof.acceptance
