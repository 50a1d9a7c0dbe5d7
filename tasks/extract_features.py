"""The stage that stores the target's states on every response: three layers and the teacher, per token.

In: responses. Out: a features artifact (storage/features.py), parts numbered like the responses'. Where the
engine that answers captures in the same pass, `make_responses` writes this artifact as well and there is
nothing left to do here.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from eagle3core.drafters import DRAFTERS
from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from storage.features import FeatureSpec, FeatureWriter
from storage.schemas import ResponseRow, from_table
from tasks.engines.pool import Part, engine_count, run_engines
from tasks.engines.rates import engine_seconds
from tasks.engines.requests import CaptureOptions, Job
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe
from tasks.samples import feature_sample, reading_job
from tasks.scratch import scratch
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import stage_task

logger = logging.getLogger(__name__)

STAGE = Stage(name="extract-features", kind="features", version=1)


class RoomError(RuntimeError):
    """The features would not fit on the disk; the message has both figures and what to change."""


def layer_ids(recipe: Recipe, target: TargetInfo) -> tuple[int, ...]:
    """The captured states, as indices into HF hidden_states."""
    return recipe.features.layer_ids or draft_layer_ids(recipe, target)


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
    """Whether the pass that answers captures as well."""
    return recipe.responses.engine == recipe.features.engine


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
    return Plan(STAGE, parameters, (responses,))


def estimate(recipe: Recipe, target: TargetInfo, store: ArtifactStore, responses: ArtifactRef) -> float:
    """Seconds: nothing where the pass that answered has captured, else reading every token once."""
    if plan(recipe, target, responses).find(store):
        return 0.0
    tokens = store.manifest(responses).summary["tokens"]
    return engine_seconds(recipe, target, engine_count(recipe, target, 64), tokens)


def run(recipe: Recipe, target: TargetInfo, store: ArtifactStore, responses: ArtifactRef) -> ArtifactRef:
    def work(writer: ArtifactWriter) -> Mapping[str, Any]:
        folder = store.local(responses)
        features = FeatureWriter(writer, feature_spec(recipe, target))
        done = features.finished()
        parts = {_number(path): path for path in sorted(folder.glob("part-*.parquet"))}
        missing = {number: path for number, path in parts.items() if number not in done}
        if done:
            logger.info("%d of %d parts are there from an earlier run", len(done), len(parts))
        rows = {number: _rows(path) for number, path in missing.items()}
        jobs = [reading_job(row, number) for number, part in rows.items() for row in part]
        check_room(recipe, target, store, sum(len(job.token_ids) for job in jobs))

        def on_part(part: Part) -> None:
            known = {row.id: row for row in rows[part.number]}
            pairs = zip(part.samples, part.arrays, strict=True)
            samples = [feature_sample(known[sample.id], arrays) for sample, arrays in pairs]
            features.write_part(part.number, samples)

        return {**read(recipe, target, writer, jobs, on_part), **features.finish()}

    return run_plan(plan(recipe, target, responses), store, work)


def read(
    recipe: Recipe, target: TargetInfo, writer: ArtifactWriter, jobs: list[Job], on_part: Any
) -> Mapping[str, Any]:
    """Have the engine read every job's text; returns what that took."""
    if not jobs:
        return {}
    with scratch(writer.folder) as folder:
        return run_engines(
            recipe,
            target,
            jobs,
            engine=recipe.features.engine,
            capture=capture_options(recipe, target),
            folder=folder,
            on_part=on_part,
        ).to_summary()


def check_room(recipe: Recipe, target: TargetInfo, store: ArtifactStore, tokens: int) -> None:
    """Say how much the features will take. Raises RoomError where the disk has not as much."""
    each = feature_spec(recipe, target).bytes_per_token
    store.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(store.root).free
    size = tokens * each / 1e9
    logger.info("features: at most %d tokens x %d bytes, %.2f GB; %.0f GB free", tokens, each, size, free / 1e9)
    if tokens * each > free:
        raise RoomError(
            f"features of up to {tokens:,} tokens take {size:.1f} GB, {store.root} has {free / 1e9:.1f} GB: lower "
            "data.sources[].limit, set features.dtype to bfloat16, or name another store.uri"
        )


def _rows(path: Path) -> list[ResponseRow]:
    return list(from_table(ResponseRow, pq.read_table(path)))


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))


extract_features = stage_task(STAGE, plan, run, estimate)
