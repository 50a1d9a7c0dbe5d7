"""Training through a window of features beside training over all of them: peak disk, time, and the same losses.

In: answers of random tokens on a tiny random Llama whose captured states make 14 KB a token. Out: a table. "made up"
extracts at the disk's speed (random numbers by the sample's id) and trains in this process, so that 10 GB pass in
minutes; "hugging face" and "vllm" are the real engines and the real trainer, processes of their own for every fill. The
floor is the run without a window.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.harness import Column, arguments, print_table, write_results
from storage.artifacts import ArtifactRef, ArtifactStore
from storage.features import FeatureWriter
from storage.schemas import Message, ResponseRow, Span, to_table
from tasks import build_vocabulary, extract_features, train_draft, train_worker
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe, build_recipe
from tasks.samples import feature_sample

HIDDEN, LAYERS, VOCABULARY, TOP_K = 128, 28, 300, 8
CAPTURED = list(range(1, LAYERS))  # many, so that a token is heavy and its training light: the draft reads three
LOOK_SECONDS = 0.02
ENGINES = {"made up": "huggingface", "hugging face": "huggingface", "vllm": "vllm"}
COLUMNS = [
    Column("extraction", "what"),
    Column("data GB", "data", "{:.3f}"),
    Column("window GB", "window", "{:.3f}"),
    Column("peak features", "features", "{:.3f}"),
    Column("peak store", "store", "{:.3f}"),
    Column("bar", "bar", "{:.3f}"),
    Column("fills", "fills"),
    Column("read", "read", "{:.2f}x"),
    Column("steps", "steps"),
    Column("same losses", "same_losses"),
    Column("same draft", "same_draft"),
    Column("seconds", "seconds", "{:.0f}"),
    Column("floor", "floor", "{:.0f}"),
    Column("ratio", "ratio", "{:.2f}"),
]


@dataclass(frozen=True)
class Case:
    """data, window: GB. engine: "made up", "hugging face" or "vllm"."""

    engine: str
    data: float
    window: float
    epochs: int


@dataclass(frozen=True)
class Outcome:
    """features, store: peak bytes on disk, all of the store but its answers. course: each step's losses."""

    features: int
    store: int
    seconds: float
    course: list[list[float]]
    draft: bytes
    summary: Mapping[str, Any]
    tokens: int
    bytes: int


def recipe_for(folder: Path, case: Case, window: float | None) -> Recipe:
    raw = {
        "name": "window",
        "target": {"model": str(folder / "target"), "dtype": "float32", "max_model_len": 1024},
        "data": {"sources": [{"kind": "messages", "uri": "-"}], "max_prompt_tokens": 512, "max_tokens": 1024},
        # Answers that were there before: nothing is captured on the way.
        "responses": {"engine": "http", "servers": ["http://127.0.0.1:1"], "part_size": 8},
        "features": {"engine": ENGINES[case.engine], "layer_ids": CAPTURED, "dtype": "float32", "teacher_k": TOP_K},
        "draft": {"layer_ids": [2, LAYERS // 2, LAYERS - 3]},
        "vocabulary": {"size": 128},
        "training": {
            "ttt_steps": 1, "epochs": case.epochs, "tokens_per_batch": 512 if case.data < 1 else 4096, "lr": 1e-3,
            "checkpoint_every": 1000, "evaluate_every": 1000, "threads": 1,
        },
        "vllm": {"engines": 1, "threads": 1, "kv_cache_gb": 1, "enforce_eager": True},
        "store": {"uri": str(folder / ("unbounded" if window is None else "windowed")), "window_gb": window},
    }  # fmt: skip
    return build_recipe(raw)


def write_answers(recipe: Recipe, target: TargetInfo, store: ArtifactStore, size: float) -> ArtifactRef:
    """Random answers whose features take about `size` bytes, and eight held-out ones."""
    random = np.random.default_rng(0)
    each = extract_features.feature_spec(recipe, target).bytes_per_token
    count = max(20, round(size / each / 128))
    rows = []
    for number in range(count + 8):
        tokens = int(random.integers(64, 192))
        split = "train" if number < count else "heldout"
        words = (f"s{number}", f"c{number}", "random", split, "", (Message("user", "?"),))
        ids = tuple(random.integers(3, VOCABULARY, tokens).tolist())
        rows.append(ResponseRow(*words, ids, (Span(tokens // 2, tokens),), "stop", 1.0, 0, False))
    named = {"stage": "make-responses", "stage_version": 1, "parameters": {}}
    with store.writer("responses", "r" * 20, **named) as writer:
        for part, start in enumerate(range(0, len(rows), 64)):
            writer.write_table(f"part-{part:05d}.parquet", to_table(ResponseRow, rows[start : start + 64]))
        summary = {"samples": len(rows), "tokens": sum(len(row.token_ids) for row in rows)}
        return writer.commit({**summary, "splits": {"train": count, "heldout": 8}})


class MadeUp:
    """In the place of `extract_features.read`: numbers by the sample's id, at the price of writing them."""

    def __init__(self) -> None:
        self._pool = np.random.default_rng(0).standard_normal(64 << 20, dtype=np.float32)

    def __call__(
        self,
        recipe: Recipe,
        target: TargetInfo,
        folder: Path,
        features: FeatureWriter,
        parts: Mapping[int, Sequence[ResponseRow]],
    ) -> Mapping[str, Any]:
        for number, rows in parts.items():
            features.write_part(number, [feature_sample(row, self._arrays(row)) for row in rows])
        return {"engine_start_seconds": 0.0}

    def _arrays(self, row: ResponseRow) -> dict[str, np.ndarray]:
        rows, width = len(row.token_ids) - 1, len(CAPTURED) * HIDDEN
        start = 64 * (int(row.id[1:]) * 7919 % ((len(self._pool) - rows * width) // 64))
        ids = (np.array(row.token_ids[1:])[:, None] + np.arange(TOP_K)) % VOCABULARY
        return {
            "features": self._pool[start : start + rows * width].reshape(rows, width),
            "teacher_ids": ids.astype(np.int32),
            "teacher_log_probs": np.full((rows, TOP_K), np.log(0.1), np.float16),
            "teacher_rest": np.full(rows, np.log(0.2), np.float32),
        }


def train_here(
    module: str, spec: Mapping[str, Any], *, folder: Path, env: Mapping[str, str], on_event: Callable[[dict[str, Any]], None]
) -> None:
    """In the place of `train_draft.run_worker`."""
    with patch.object(train_worker, "emit", on_event):
        train_worker.train(train_draft.TrainingSpec(**spec), torch.device("cpu"))


class Watch(threading.Thread):
    """Peak bytes on disk of a store: its features wherever they lie, and everything but its answers."""

    def __init__(self, store: Path) -> None:
        super().__init__(daemon=True)
        self._store, self._over = store, threading.Event()
        self.features = self.store = 0

    def run(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        features, window = used(self._store / "features"), sum(map(used, self._store.glob("draft/.*/.window")))
        rest = used(self._store) - used(self._store / "responses")
        self.features, self.store = max(self.features, features + window), max(self.store, rest)

    def stop(self) -> None:
        self._over.set()
        self.join()


def used(folder: Path) -> int:
    """Bytes that a folder's files occupy; what goes while it is looked at counts nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


@contextmanager
def watched(store: Path) -> Iterator[Watch]:
    watch = Watch(store)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


def run(folder: Path, case: Case, window: float | None) -> Outcome:
    recipe = recipe_for(folder, case, window)
    target, store = prepare_target(recipe), ArtifactStore(recipe.store.uri)
    responses = write_answers(recipe, target, store, case.data * 1e9)
    vocabulary = build_vocabulary.run(recipe, target, store, responses)
    began = time.monotonic()
    with watched(store.root) as watch:
        features = extract_features.run(recipe, target, store, responses)
        draft = train_draft.run(recipe, target, store, features, vocabulary)
    seconds = time.monotonic() - began
    lines = [json.loads(line) for line in (store.local(draft) / "training/metrics.jsonl").read_text().splitlines()]
    tokens = store.manifest(features).summary["tokens"]
    return Outcome(
        watch.features,
        watch.store,
        seconds,
        [line["step_loss"] for line in lines if line["kind"] == "step"],
        (store.local(draft) / "draft/model.safetensors").read_bytes(),
        store.manifest(draft).summary,
        tokens,
        tokens * extract_features.feature_spec(recipe, target).bytes_per_token,
    )


def make_target(folder: Path) -> None:
    """The target that `recipe_for` names."""
    # A target is a test's, as the tests of this folder's other parts have it.
    from tests.tiny_target import make_tiny_target

    sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": 4, "kv_heads": 2, "vocab": VOCABULARY}
    make_tiny_target(folder / "target", **sizes, max_position_embeddings=1024)


def measure(base: Path, case: Case) -> dict[str, Any]:
    """Both runs of a case, the one without a window first; its features are gone before the other begins."""
    with tempfile.TemporaryDirectory(dir=base, prefix="window-") as temporary:
        folder = Path(temporary)
        make_target(folder)
        with ExitStack() as stack:
            if case.engine == "made up":
                stack.enter_context(patch.object(extract_features, "read", MadeUp()))
                stack.enter_context(patch.object(train_draft, "run_worker", train_here))
            whole = run(folder, case, None)
            store = ArtifactStore(str(folder / "unbounded"))
            store.delete(store.list("features")[0])
            windowed = run(folder, case, case.window)
    return {
        "what": f"{case.engine}, {case.epochs} epoch{'s' * (case.epochs > 1)}",
        "data": whole.bytes / 1e9,
        "window": case.window,
        "features": windowed.features / 1e9,
        "store": windowed.store / 1e9,
        "bar": 1.15 * case.window,
        "fills": windowed.summary["fills"],
        "read": windowed.summary["extracted_tokens"] / whole.tokens,
        "steps": len(windowed.course),
        "same_losses": windowed.course == whole.course,
        "same_draft": windowed.draft == whole.draft,
        "seconds": windowed.seconds,
        "floor": whole.seconds,
        "ratio": windowed.seconds / whole.seconds,
    }


def main() -> None:
    parser = arguments("window", __doc__.splitlines()[0])
    parser.add_argument("--folder", help="where to write (13 GB for a full run); default: the temporary folder")
    options = parser.parse_args()
    cases = [Case("made up", 0.12, 0.05, 1)]
    if not options.quick:
        cases = [Case("made up", 10.0, 2.0, 1), Case("hugging face", 0.5, 0.1, 1), Case("hugging face", 0.2, 0.1, 2)]
        cases += [Case("vllm", 0.1, 0.05, 1)]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="windows-") as base:
        rows = [measure(Path(base), case) for case in cases]
    print_table(COLUMNS, rows)
    write_results("window", rows, options)


if __name__ == "__main__":
    sys.exit(main())
