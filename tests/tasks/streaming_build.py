"""Answers of different lengths on a tiny target, and two ways to have them extracted without an engine process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.artifacts import ArtifactRef, ArtifactStore
from storage.features import FeatureSpec, FeatureWriter
from storage.schemas import Message, ResponseRow, Span, to_table
from tasks import extract_features
from tasks.build_vocabulary import run as build_vocabulary
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe
from tasks.samples import feature_sample
from tasks.streaming.legs import train_in_legs
from tasks.train_draft import TrainingSpec
from tasks.train_worker import train
from tests.tasks.feature_samples import K, make_recipe, make_target, make_tokens

TRAIN, HELDOUT = 28, 3


@dataclass(frozen=True)
class Answered:
    """Everything that is there before features are."""

    recipe: Recipe
    target: TargetInfo
    store: ArtifactStore
    responses: ArtifactRef
    vocabulary: ArtifactRef

    def windowed(self, bytes_: float, **changes: Any) -> Recipe:
        values = self.recipe.model_dump(mode="json")
        values["store"]["window_gb"] = bytes_ / 1e9
        values["training"] |= changes
        return Recipe.model_validate(values)


def answered(folder: Path, **overrides: Any) -> Answered:
    """28 conversations to train on and 3 held-out ones, in parts of 7."""
    recipe = make_recipe(
        folder,
        **{
            "responses.part_size": 7, "responses.engine": "http", "responses.servers": ["http://127.0.0.1:1"],
            "features.engine": "huggingface", "features.dtype": "float32", "features.teacher_k": K,
            "vllm.engines": 1, "vllm.threads": 1,
            "training.epochs": 2, "training.ttt_steps": 2, "training.checkpoint_every": 3,
            "training.evaluate_every": 6, **overrides,
        },
    )  # fmt: skip
    target, store = make_target(recipe), ArtifactStore(recipe.store.uri)
    rng = np.random.default_rng(0)
    rows = [_row(rng, f"t{i}", "train") for i in range(TRAIN)] + [_row(rng, f"h{i}", "heldout") for i in range(HELDOUT)]
    rng.shuffle(rows)
    with store.writer("responses", "r" * 20, stage="make-responses", stage_version=1, parameters={}) as writer:
        for number, start in enumerate(range(0, len(rows), 7)):
            writer.write_table(f"part-{number:05d}.parquet", to_table(ResponseRow, rows[start : start + 7]))
        tokens = sum(len(row.token_ids) for row in rows)
        splits = {"train": TRAIN, "heldout": HELDOUT}
        responses = writer.commit({"samples": len(rows), "tokens": tokens, "splits": splits})
    return Answered(recipe, target, store, responses, build_vocabulary(recipe, target, store, responses))


def _row(rng: np.random.Generator, name: str, split: str) -> ResponseRow:
    tokens, spans = make_tokens(rng, prompt=int(rng.integers(2, 9)), answer=int(rng.integers(8, 40)))
    return ResponseRow(
        name, name, "made-up", split, "", (Message("user", "?"),), tuple(tokens), tuple(Span(*span) for span in spans),
        "stop", 1.0 if split == "train" else 0.0, 0, False,
    )  # fmt: skip


class MadeUp:
    """Extraction in this process: what it makes of a text depends on its id alone. `read`: ids, as they came."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.read: list[str] = []
        self._fail_after = fail_after

    def __call__(
        self, folder: Path, features: FeatureWriter, parts: Mapping[int, Sequence[ResponseRow]]
    ) -> Mapping[str, Any]:
        for number, rows in parts.items():
            if self._fail_after == 0:
                raise KeyboardInterrupt
            self._part(features, number, rows)
            self.read += [row.id for row in rows]
            self._fail_after = None if self._fail_after is None else self._fail_after - 1
        return {"engine_start_seconds": 0.0}

    def _part(self, features: FeatureWriter, number: int, rows: Sequence[ResponseRow]) -> None:
        features.write_part(number, [feature_sample(row, _arrays(row)) for row in rows])


def _arrays(row: ResponseRow) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(int.from_bytes(row.id.encode()))
    rows = len(row.token_ids) - 1
    log_probs = np.log(np.full((rows, K), 0.02))
    log_probs[:, 0] = np.log(0.8)
    return {
        "features": rng.normal(size=(rows, 3 * 32)).astype(np.float32),
        "teacher_ids": ((np.array(row.token_ids[1:])[:, None] + np.arange(K)) % 300).astype(np.int32),
        "teacher_log_probs": log_probs.astype(np.float16),
        "teacher_rest": np.full(rows, np.log(0.06), np.float32),
    }


def extracted(build: Answered, recipe: Recipe, read: MadeUp, monkeypatch: Any) -> ArtifactRef:
    """The features artifact of this recipe, by `read`."""
    monkeypatch.setattr(extract_features, "read", lambda recipe, target, *rest: read(*rest))
    return extract_features.run(recipe, build.target, build.store, build.responses)


def training_spec(build: Answered, recipe: Recipe, features: ArtifactRef, folder: Path, **leg: Any) -> TrainingSpec:
    return TrainingSpec(
        target=build.target.to_dict(),
        features=str(build.store.local(features)),
        vocabulary=str(build.store.local(build.vocabulary)),
        folder=str(folder),
        draft=recipe.draft.identity(),
        training=recipe.training.model_dump(mode="json"),
        chain_length=recipe.evaluation.chain_length,
        **leg,
    )


def spec_of(build: Answered) -> FeatureSpec:
    return extract_features.feature_spec(build.recipe, build.target)


def train_here(spec: TrainingSpec) -> None:
    """The worker's work in this process."""
    train(spec, torch.device("cpu"))


def stream(
    build: Answered,
    recipe: Recipe,
    kept: ArtifactRef,
    folder: Path,
    read: MadeUp | None,
    watch: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train through the window in `folder`, in this process; `watch` is called before every leg."""

    def leg(window: Path, until: int) -> dict[str, Any]:
        watch()
        train_here(training_spec(build, recipe, kept, folder / "training", window=str(window), until=until))
        return {"until": until}

    return train_in_legs(recipe, build.target, build.store, kept, folder, folder / "training", leg, read)
