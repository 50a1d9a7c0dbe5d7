"""The stage that stores the target's states on every response: three layers and the teacher, per token.

In: responses. Out: a features artifact (storage/features.py), parts numbered like the responses'. Where the
engine that answers captures in the same pass, `make_responses` writes this artifact as well and there is
nothing left to do here. With `store.window_gb` the artifact is of what is kept, and training has the rest
extracted as it goes (tasks/streaming).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from eagle3core.config import default_layer_ids
from eagle3core.drafters import DRAFTERS
from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from storage.features import FeatureSpec, FeatureWriter
from storage.schemas import ResponseRow, from_table
from tasks.engines.pool import Part, engine_count, run_engines
from tasks.engines.rates import engine_seconds
from tasks.engines.requests import CaptureOptions
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe
from tasks.samples import HELDOUT, feature_sample, reading_job
from tasks.scratch import scratch
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import stage_task

logger = logging.getLogger(__name__)

STAGE = Stage(name="extract-features", kind="features", version=1)


class RoomError(RuntimeError):
    """The features would not fit on the disk; the message has both figures and what to change."""


def layer_ids(recipe: Recipe, target: TargetInfo) -> tuple[int, ...]:
    """The captured states, as indices into HF hidden_states."""
    # A draft that reads tokens alone leaves a capture that the other drafters can use.
    return recipe.features.layer_ids or draft_layer_ids(recipe, target) or default_layer_ids(target.num_layers)


def draft_layer_ids(recipe: Recipe, target: TargetInfo) -> tuple[int, ...]:
    """The states that the draft reads: those that the recipe names, or its drafter's own."""
    named = recipe.draft.layer_ids or recipe.features.layer_ids
    return DRAFTERS[recipe.draft.drafter].layer_ids(target.num_layers, named)


def feature_spec(recipe: Recipe, target: TargetInfo) -> FeatureSpec:
    return FeatureSpec(
        hidden_size=target.hidden_size,
        layer_ids=layer_ids(recipe, target),
        dtype=recipe.features.dtype,
        teacher=recipe.features.teacher,
        teacher_k=recipe.features.teacher_k if recipe.features.teacher == "topk" else 0,
        target_fingerprint=target.fingerprint,
        tokenizer_fingerprint=target.tokenizer_fingerprint,
    )


def capture_options(recipe: Recipe, target: TargetInfo) -> CaptureOptions:
    features = recipe.features
    return CaptureOptions(layer_ids(recipe, target), features.dtype, features.teacher, features.teacher_k)


def made_by_responses(recipe: Recipe) -> bool:
    """Whether the pass that answers captures as well. Not for a window: its order is not that of training."""
    return recipe.responses.engine == recipe.features.engine and recipe.store.window_gb is None


def plan(recipe: Recipe, target: TargetInfo, responses: ArtifactRef) -> Plan:
    spec = feature_spec(recipe, target)
    parameters = {
        "target": target.identity(),
        "engine": recipe.features.engine,
        "layer_ids": list(spec.layer_ids),
        "dtype": spec.dtype,
        "teacher": spec.teacher,
        "teacher_k": spec.teacher_k,
    }
    if recipe.store.window_gb is not None:
        parameters["streamed"] = True  # what is kept alone, whatever the window's size
    return Plan(STAGE, parameters, (responses,))


def estimate(recipe: Recipe, target: TargetInfo, store: ArtifactStore, responses: ArtifactRef) -> float:
    """Seconds: nothing where the pass that answered has captured, else reading every token once."""
    if plan(recipe, target, responses).find(store):
        return 0.0
    summary = store.manifest(responses).summary
    share = 1.0
    if recipe.store.window_gb is not None:
        share = summary["splits"].get(HELDOUT, 0) / max(1, summary["samples"])
    return engine_seconds(recipe, target, engine_count(recipe, target, 64), share * summary["tokens"])


def run(recipe: Recipe, target: TargetInfo, store: ArtifactStore, responses: ArtifactRef) -> ArtifactRef:
    def work(writer: ArtifactWriter) -> Mapping[str, Any]:
        folder = store.local(responses)
        features = FeatureWriter(writer, feature_spec(recipe, target))
        kept = None
        if recipe.store.window_gb is not None:
            from tasks.streaming.plan import keep

            kept = keep(recipe, feature_spec(recipe, target), writer, folder)
        done = features.finished()
        parts = {_number(path): path for path in sorted(folder.glob("part-*.parquet"))}
        if done:
            logger.info("%d of %d parts are there from an earlier run", len(done), len(parts))
        missing = {number: _rows(path) for number, path in parts.items() if number not in done}
        if kept:
            missing = {number: [row for row in rows if row.id in kept.ids] for number, rows in missing.items()}
        tokens = sum(len(row.token_ids) for rows in missing.values() for row in rows)
        check_room(recipe, target, store, kept.tokens if kept else tokens)
        took = read(recipe, target, writer.folder, features, missing)
        return {**took, **features.finish(), **(kept.to_summary() if kept else {})}

    return run_plan(plan(recipe, target, responses), store, work)


def read(
    recipe: Recipe,
    target: TargetInfo,
    folder: Path,
    features: FeatureWriter,
    parts: Mapping[int, Sequence[ResponseRow]],
) -> Mapping[str, Any]:
    """Have the engine read every response of `parts` and write each part's features; returns what that took.

    `folder`: for what is on its way.
    """
    jobs = [reading_job(row, number) for number, rows in parts.items() for row in rows]
    if not jobs:
        return {}

    def on_part(part: Part) -> None:
        known = {row.id: row for row in parts[part.number]}
        pairs = zip(part.samples, part.arrays, strict=True)
        features.write_part(part.number, [feature_sample(known[sample.id], arrays) for sample, arrays in pairs])

    with scratch(folder) as place:
        return run_engines(
            recipe,
            target,
            jobs,
            engine=recipe.features.engine,
            capture=capture_options(recipe, target),
            folder=place,
            on_part=on_part,
        ).to_summary()


def check_room(recipe: Recipe, target: TargetInfo, store: ArtifactStore, tokens: int) -> None:
    """Say how much the features will take. Raises RoomError where the disk has not as much."""
    each, window = feature_spec(recipe, target).bytes_per_token, recipe.store.window_gb
    store.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(store.root).free / 1e9
    size = tokens * each / 1e9
    logger.info("features: at most %d tokens x %d bytes, %.2f GB; %.0f GB free", tokens, each, size, free)
    if window is not None and window < size:
        logger.info("they pass through a window of %g GB while training reads them", window)
    if min(size, window or size) > free:
        raise RoomError(
            f"features of up to {tokens:,} tokens take {min(size, window or size):.1f} GB, {store.root} has "
            f"{free:.1f} GB: set store.window_gb below that, features.dtype to bfloat16, or name another store.uri"
        )


def _rows(path: Path) -> list[ResponseRow]:
    return list(from_table(ResponseRow, pq.read_table(path)))


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))


extract_features = stage_task(STAGE, plan, run, estimate)
