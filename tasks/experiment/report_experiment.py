"""The stage that decides an experiment's claims and draws its page.

In: acceptance and (where there are any) trees of every draft. Out: an experiment artifact: report.html, table.md, and
a summary with every claim's outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from tasks.experiment.result import MeasuredDraft, gather
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe
from tasks.report.experiment import markdown, render_experiment
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import StageTask, stage_task

STAGE = Stage(name="report-experiment", kind="experiment", version=3)

REPORT, TABLE = "report.html", "table.md"
SECONDS_A_DRAFT = 0.2


def report_experiment(kind: str, drafts: Sequence[MeasuredDraft]) -> StageTask:
    """The stage for these drafts; it is called with `inputs_of(drafts)`."""
    arms = tuple(dict.fromkeys(each.cell.arm for each in drafts))

    def plan(recipe: Recipe, target: TargetInfo, *inputs: ArtifactRef) -> Plan:
        parameters = {
            "experiment": kind,
            "name": recipe.name,
            "drafts": [{"arm": each.cell.arm, "share": each.cell.share, "seed": each.seed} for each in drafts],
            "bootstrap": _resamples(kind, recipe),
            "target": target.model,
        }
        return Plan(STAGE, parameters, inputs)

    def estimate(recipe: Recipe, target: TargetInfo, store: ArtifactStore, *inputs: ArtifactRef) -> float:
        return 2 + SECONDS_A_DRAFT * len(drafts)

    def run(recipe: Recipe, target: TargetInfo, store: ArtifactStore, *inputs: ArtifactRef) -> ArtifactRef:
        def work(writer: ArtifactWriter) -> dict[str, Any]:
            result = gather(store, kind, recipe.name, arms, drafts, _resamples(kind, recipe))
            writer.write_text(REPORT, render_experiment(result))
            writer.write_text(TABLE, markdown(result))
            return result.to_summary()

        return run_plan(plan(recipe, target, *inputs), store, work)

    return stage_task(STAGE, plan, run, estimate)


def inputs_of(drafts: Sequence[MeasuredDraft]) -> list[ArtifactRef]:
    """What the page is made from."""
    return [ref for each in drafts for ref in (each.acceptance, each.trees) if ref is not None]


def _resamples(kind: str, recipe: Recipe) -> int:
    return getattr(recipe.experiments, kind).bootstrap
