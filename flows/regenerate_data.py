"""The flow `regenerate-data`: the target's own answers to the recipe's prompts, and nothing more.

In: a recipe, and dotted overrides of it. Out: the responses' reference.
`python -m flows regenerate-data RECIPE [--set data.seed=1 ...]` runs it here and now.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows import dag
from flows.shared import run_name, started
from storage.artifacts import ArtifactRef
from tasks.recipe import Recipe


@flow(name="regenerate-data", flow_run_name=run_name)
def regenerate_data(recipe: Recipe, overrides: dict[str, Any] | None = None) -> ArtifactRef:
    """Have the target answer the prompts again: the data that a draft is trained on."""
    with started(recipe, overrides) as build:
        responses = dag.answer(build.do)
        build.show(responses)
    return responses
