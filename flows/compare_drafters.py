"""The flow `compare-drafters`: several drafters on one data set, at one budget, measured alike.

In: a recipe (its experiments.compare_drafters names the arms), and dotted overrides of it. Out: the report's reference.
`python -m flows compare-drafters RECIPE [--set experiments.compare_drafters.budget.steps=300 ...]` runs it here and now.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.arms import run_experiment
from flows.shared import run_name
from storage.artifacts import ArtifactRef
from tasks.recipe import Recipe


@flow(name="compare-drafters", flow_run_name=run_name)
def compare_drafters(recipe: Recipe, overrides: dict[str, Any] | None = None) -> ArtifactRef:
    """Compare the recipe's drafters: one data set, one budget, one way of measuring; a page with intervals and claims."""
    return run_experiment("compare_drafters", recipe, overrides)
