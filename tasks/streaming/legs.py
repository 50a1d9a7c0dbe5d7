"""Training through a window: fill it, train over it, empty it, until training is at its end.

In: a recipe with a window, its kept features, the draft's folder, a way to train one leg. Out: the last leg's
result, with what extraction took. Any kill is gone on from: the checkpoint says where training is, the window's
folder what is extracted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from eagle3core.checkpoint import Progress, read_progress
from storage.artifacts import ArtifactRef, ArtifactStore, discard
from tasks import extract_features
from tasks.engines.pool import engine_count
from tasks.engines.rates import START_SECONDS, engine_seconds
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe
from tasks.stage_task import spoken
from tasks.streaming.costs import TRAINER_START_SECONDS
from tasks.streaming.plan import Plan, plan_window
from tasks.streaming.rows import ROWS
from tasks.streaming.window import Read, Window

log = logging.getLogger(__name__)

WINDOW_FOLDER, RECORD = ".window", "extraction.jsonl"

# (the fill's folder, the step to stop at) -> what the trainer reports
Leg = Callable[[Path, int], dict[str, Any]]


def train_in_legs(
    recipe: Recipe,
    target: TargetInfo,
    store: ArtifactStore,
    features: ArtifactRef,
    draft: Path,
    training: Path,
    leg: Leg,
    read: Read | None = None,
) -> dict[str, Any]:
    """Train to the end, features coming and going. `draft`: the artifact being written; `training`: in it.

    read: extracts; default: the recipe's engine. Raises WindowError where the window is too small.
    """
    kept = store.manifest(features)
    (responses,) = kept.inputs
    spec, rows = extract_features.feature_spec(recipe, target), pq.read_table(store.local(features) / ROWS)
    window = Window(
        draft / WINDOW_FOLDER,
        training / RECORD,
        store.local(responses),
        rows,
        spec,
        recipe.responses.part_size,
        read or partial(extract_features.read, recipe, target),
    )
    plan = plan_window(recipe, spec, rows, kept.bytes)
    at = read_progress(training / "checkpoint")
    _say(recipe, target, plan, at.step if at else 0)
    while True:
        if at and at.total_steps != plan.schedule.steps:  # max_cpu_minutes: the first leg has found it
            plan = plan_window(recipe, spec, rows, kept.bytes, at.total_steps)
        folder, fill = window.fill(plan, at.step if at else 0)
        result = leg(folder, fill.until)
        at = _progress(training)
        if at.step == at.total_steps:
            discard(draft / WINDOW_FOLDER)
            return {**result, **window.to_summary()}


def _progress(training: Path) -> Progress:
    if (at := read_progress(training / "checkpoint")) is None:
        raise RuntimeError(f"{training} has no checkpoint after a leg of training")
    return at


def _say(recipe: Recipe, target: TargetInfo, plan: Plan, step: int) -> None:
    fills = plan.schedule.fills(step)
    tokens = sum(plan.tokens[i] for fill in fills for i in fill.documents)
    seconds = engine_seconds(recipe, target, engine_count(recipe, target, 64), tokens)
    seconds += max(0, len(fills) - 1) * (START_SECONDS + TRAINER_START_SECONDS)
    log.info(
        "window of %g GB: %d fills, %s tokens to read for training over %s (each %.1f times), %s for that alone",
        recipe.store.window_gb, len(fills), f"{tokens:,}", f"{sum(plan.tokens):,}",
        tokens / max(1, sum(plan.tokens)), spoken(seconds),
    )  # fmt: skip
