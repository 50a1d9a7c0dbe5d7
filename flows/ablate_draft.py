"""The flow `ablate-draft`: what each of the paper's changes to the draft is worth (Table 2).

In: a recipe (its experiments.ablate_draft names the arms), and dotted overrides of it. Out: the report's reference.
`python -m flows ablate-draft RECIPE [--set experiments.ablate_draft.budget.steps=300 ...]` runs it here and now.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows.arms import run_experiment
from flows.shared import run_name
from storage.artifacts import ArtifactRef
from tasks.recipe import Recipe


@flow(name="ablate-draft", flow_run_name=run_name)
def ablate_draft(recipe: Recipe, overrides: dict[str, Any] | None = None) -> ArtifactRef:
    """Train the draft with and without the paper's changes, and say which of its claims are found again."""
    return run_experiment("ablate_draft", recipe, overrides)
