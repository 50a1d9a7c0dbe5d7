"""The stage that measures a draft's own tree, and what its drafting costs, on held-out greedy answers.

In: a draft and the features. Out: a trees artifact: rows.parquet (storage.schemas.ACCEPTANCE, mode "tree") and, in its
summary, seconds and drafted tokens of chain and tree. No target runs: `eagle3core.decoding.replay` follows the text.
The work is `tasks.experiment.trees_worker`'s, in a process of its own.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from tasks.evaluation_sets import expected_heldout
from tasks.prepare_target import TargetInfo
from tasks.processes import device_lock, run_worker
from tasks.recipe import Recipe
from tasks.scratch import scratch
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import stage_task
from tasks.train_draft import DRAFT_FOLDER

log = logging.getLogger(__name__)

STAGE = Stage(name="measure-trees", kind="trees", version=1)

# Measured on 2 cores with SmolLM2-135M's draft and a tree of 30 nodes, 5 deep.
START_SECONDS = 12.0
ANSWERS_PER_SECOND = 3.0


@dataclass(frozen=True)
class TreesSpec:
    """What the worker is told; JSON-able. drafter: whose kind of tree it is. threads: None for one a core."""

    target: dict[str, Any]
    drafter: str
    draft: str
    features: str
    folder: str
    chain_length: int
    tree: dict[str, int]
    threads: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(recipe: Recipe, target: TargetInfo, draft: ArtifactRef, features: ArtifactRef) -> Plan:
    parameters = {
        "drafter": recipe.draft.drafter,
        "tree": recipe.evaluation.tree.model_dump(mode="json"),
        "chain_length": recipe.evaluation.chain_length,
        "target": target.identity(),
    }
    return Plan(STAGE, parameters, (draft, features))


def estimate(
    recipe: Recipe, target: TargetInfo, store: ArtifactStore, draft: ArtifactRef, features: ArtifactRef
) -> float:
    """Seconds, from the number of held-out answers."""
    return START_SECONDS + expected_heldout(recipe) / ANSWERS_PER_SECOND


def run(
    recipe: Recipe, target: TargetInfo, store: ArtifactStore, draft: ArtifactRef, features: ArtifactRef
) -> ArtifactRef:
    spec = TreesSpec(
        target=target.to_dict(),
        drafter=recipe.draft.drafter,
        draft=str(store.local(draft) / DRAFT_FOLDER),
        features=str(store.local(features)),
        folder="",
        chain_length=recipe.evaluation.chain_length,
        tree=recipe.evaluation.tree.model_dump(mode="json"),
        threads=recipe.training.threads,
    )
    return run_plan(plan(recipe, target, draft, features), store, lambda writer: _measure(writer, spec))


def _measure(writer: ArtifactWriter, spec: TreesSpec) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    # One at a time: the seconds are a figure.
    with device_lock(), scratch(writer.folder) as folder:
        run_worker(
            "tasks.experiment.trees_worker",
            {**spec.to_dict(), "folder": str(writer.folder)},
            folder=folder,
            on_event=results.append,
        )
    summary = results[-1]
    log.info("tree: tau %.2f; a drafted token of a chain costs %.2f ms", summary["tau"], summary["chain_ms_per_token"])
    return summary


measure_trees = stage_task(STAGE, plan, run, estimate)
