"""The stage that says how often a draft is accepted, per draft position, on answers it was never trained on.

In: a draft and the features. Out: an acceptance artifact: rows.parquet, summary.json (an `Evaluation`),
examples.json, curves.svg and curves.png. The work is `tasks.evaluate_worker`'s, in a process of its own.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from tasks.evaluation import Evaluation, TemperatureFigures, suspicion, without_nan
from tasks.evaluation_sets import expected_heldout
from tasks.prepare_target import TargetInfo
from tasks.processes import run_worker
from tasks.recipe import Recipe
from tasks.report.plots import curves
from tasks.scratch import scratch
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import stage_task
from tasks.train_draft import DRAFT_FOLDER

log = logging.getLogger(__name__)

STAGE = Stage(name="evaluate-draft", kind="acceptance", version=4)

# Measured on 2 cores with SmolLM2-135M's draft: import and weights, then every anchor's chain of five.
START_SECONDS = 12.0
ANSWERS_PER_SECOND = 8.0
# From CPU seconds on a busy machine: a tree's drafts along one answer, and one prompt decoded in all three ways.
TREE_SECONDS, DECODE_SECONDS = 2.5, 12.0


@dataclass(frozen=True)
class EvaluationSpec:
    """What the worker is told; JSON-able. `threads`: None for one a core."""

    target: dict[str, Any]
    draft: str
    features: str
    folder: str
    chain_length: int
    tree: dict[str, int]
    tree_prompts: int
    decode_prompts: int
    decode_tokens: int
    bootstrap: int
    threads: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(recipe: Recipe, target: TargetInfo, draft: ArtifactRef, features: ArtifactRef) -> Plan:
    parameters = {
        **recipe.evaluation.model_dump(exclude={"sets"}),
        "target": target.identity(),
    }
    return Plan(STAGE, parameters, (draft, features))


def estimate(
    recipe: Recipe, target: TargetInfo, store: ArtifactStore, draft: ArtifactRef, features: ArtifactRef
) -> float:
    """Seconds, from the number of held-out answers and of those that trees and the decoder are measured on."""
    asked, temperatures = expected_heldout(recipe), len(recipe.responses.heldout_temperatures)
    trees = min(asked, recipe.evaluation.tree_prompts) * TREE_SECONDS
    decoded = min(asked, recipe.evaluation.decode.prompts) * DECODE_SECONDS
    return START_SECONDS + temperatures * (asked / ANSWERS_PER_SECOND + trees + decoded)


def run(
    recipe: Recipe, target: TargetInfo, store: ArtifactStore, draft: ArtifactRef, features: ArtifactRef
) -> ArtifactRef:
    spec = EvaluationSpec(
        target=target.to_dict(),
        draft=str(store.local(draft) / DRAFT_FOLDER),
        features=str(store.local(features)),
        folder="",
        chain_length=recipe.evaluation.chain_length,
        tree=recipe.evaluation.tree.model_dump(),
        tree_prompts=recipe.evaluation.tree_prompts,
        decode_prompts=recipe.evaluation.decode.prompts,
        decode_tokens=recipe.evaluation.decode.max_new_tokens,
        bootstrap=recipe.evaluation.bootstrap,
        threads=recipe.training.threads,
    )
    return run_plan(plan(recipe, target, draft, features), store, lambda writer: _evaluate(writer, spec))


def _evaluate(writer: ArtifactWriter, spec: EvaluationSpec) -> dict[str, Any]:
    with scratch(writer.folder) as folder:
        run_worker(
            "tasks.evaluate_worker",
            {**spec.to_dict(), "folder": str(writer.folder)},
            folder=folder,
            on_event=_say,
        )
    evaluation = Evaluation.read(writer.folder)
    for name, image in curves(evaluation).items():
        writer.write_bytes(name, image)
    warning = suspicion(evaluation)
    if warning:
        log.warning("this draft's figures cannot be trusted: %s", warning)
    headlines = {f"{figures.temperature:g}": _headline(figures) for figures in evaluation.figures}
    return without_nan(
        {"chain_length": evaluation.chain_length, "suspicious": warning, "temperatures": headlines}
    )


def _headline(figures: TemperatureFigures) -> dict[str, Any]:
    walk = figures.walk
    return {
        "tau_walk": walk.tau_micro.value,
        "tau_anchor": figures.anchor.tau_micro.value,
        "position_1": walk.survival[0].value,
        "survival": [rate.value for rate in walk.survival],
        "prompts": walk.prompts,
        "rounds": walk.rounds,
        "looping": figures.looping,
    }


def _say(event: dict[str, Any]) -> None:
    log.info(
        "T = %g: tau %.2f walked, %d held-out answers", event["temperature"], event["tau"], event["answers"]
    )


evaluate_draft = stage_task(STAGE, plan, run, estimate)
