"""The flow `scale-data`: what more data buys, for one drafter and for another (Figures 1 and 4).

In: a recipe (its experiments.scale_data names the arms), and dotted overrides of it. Out: the report's reference.
`python -m flows scale-data RECIPE [--set experiments.scale_data.budget.steps=300 ...]` runs it here and now.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.arms import run_experiment
from flows.shared import run_name
from storage.artifacts import ArtifactRef
from tasks.recipe import Recipe


@flow(name="scale-data", flow_run_name=run_name)
def scale_data(recipe: Recipe, overrides: dict[str, Any] | None = None) -> ArtifactRef:
    """Train two drafters on rising shares of the same answers, and say which gains more."""
    return run_experiment("scale_data", recipe, overrides)
