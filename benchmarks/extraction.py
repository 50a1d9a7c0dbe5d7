"""What storing features costs beside reading the text alone: the same vLLM engine, with and without the capture.

In: a recipe with a finished build, whose stored texts are read again. Out: tokens per second of the engine alone (the floor)
and of the whole extraction (capture, teacher, written parts), each in a process of its own, and where the difference goes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Column, arguments, in_new_process, print_table, write_results
from storage.artifacts import ArtifactStore
from storage.features import FeatureReader, FeatureWriter
from storage.folder import PartFolder
from tasks.engines.pool import engine_options, environment, target_files
from tasks.engines.requests import CaptureOptions, Request, Sample
from tasks.extract_features import capture_options, feature_spec
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe, load_recipe

PART = 32


def read_texts(case: dict[str, Any]) -> dict[str, float]:
    """Read stored texts, a few to warm up, then all; least seconds of CPU, and of that the teacher's and the writing's."""
    recipe = load_recipe(case["recipe"], {"store.uri": case["store"]} if case["store"] else {})
    os.environ.update(environment(recipe, 2, 0))  # as a build's engine has it, before anything of vLLM's is imported
    from tasks.engines.vllm_engine import VllmEngine
    from tasks.engines.worker import Packer

    target, store = prepare_target(recipe), ArtifactStore(recipe.store.uri)
    reader = FeatureReader(store.local(store.list("features")[0]))
    capture = capture_options(recipe, target)
    wanted = CaptureOptions((*capture.layer_ids, target.num_layers), capture.dtype, capture.teacher, capture.teacher_k)
    packer = Packer(capture, Path(target.path))
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(recipe, "vllm", case["samples"])
        engine = VllmEngine(target_files(target), options, wanted if case["capture"] else None, Path(folder))
        run = Extraction(engine, reader, packer if case["capture"] else None, recipe, target, Path(folder))
        run(range(4))
        return min((run(range(case["samples"])) for _ in range(case["passes"])), key=lambda each: each["cpu"])


class Extraction:
    """Reads samples with an engine; where there is a packer, makes and writes their features."""

    def __init__(
        self, engine: Any, reader: FeatureReader, packer: Any, recipe: Recipe, target: TargetInfo, folder: Path
    ) -> None:
        self._engine, self._reader, self._packer = engine, reader, packer
        self._writer = FeatureWriter(PartFolder(folder), feature_spec(recipe, target))
        self._part = self._passes = 0

    def __call__(self, rows: range) -> dict[str, float]:
        stored = {f"{self._part}-{row}": self._reader.read(row) for row in rows}
        packing = writing = 0.0
        pending: list[Any] = []
        wall, began = time.perf_counter(), time.process_time()
        self._passes += 1
        for name, sample in stored.items():
            # Another first token: the engine alone would find an earlier pass in its prefix cache.
            self._engine.add(Request(name, [self._passes, *sample.token_ids[1:].tolist()]))
        left = len(stored)
        while left:
            for finished in self._engine.step():
                left -= 1
                if self._packer is None:
                    continue
                start = time.process_time()
                pending.append(self._features(stored[finished.id], finished.states))
                if len(pending) == PART or not left:
                    self._packer.complete()
                packed = time.process_time()
                if len(pending) == PART or not left:
                    self._writer.write_part(self._part, pending)
                    self._part, pending = self._part + 1, []
                packing, writing = packing + packed - start, writing + time.process_time() - packed
        return {
            "tokens": sum(len(sample.token_ids) for sample in stored.values()),
            "wall": time.perf_counter() - wall,
            "cpu": time.process_time() - began,
            "packing": packing,
            "writing": writing,
        }

    def _features(self, stored: Any, states: torch.Tensor) -> Any:
        sample = Sample(stored.id, stored.token_ids.tolist(), stored.spans, [], "given", False)
        arrays = {name: _numpy(array) for name, array in self._packer.pack(sample, states).items()}
        return type(stored)(**{**vars(stored), **arrays})


def _numpy(array: torch.Tensor) -> Any:
    return (array.view(torch.uint16) if array.dtype == torch.bfloat16 else array).contiguous().numpy()


def in_turns(case: dict[str, Any], turns: int) -> list[dict[str, float]]:
    """The engine alone and the whole extraction, the least of `turns` each, so that a busy machine disturbs both alike."""
    runs = [
        [in_new_process("benchmarks.extraction", case | {"capture": capture}) for capture in (False, True)]
        for _ in range(turns)
    ]
    return [min(each, key=lambda run: run["cpu"]) for each in zip(*runs, strict=True)]


def main(options: argparse.Namespace) -> None:
    if options.case:
        print(json.dumps(read_texts(json.loads(options.case))))
        return
    samples, passes, turns = (8, 1, 1) if options.quick else (48, 2, 2)
    case = {"recipe": options.recipe, "store": options.store, "samples": samples, "passes": passes}
    alone, whole = in_turns(case, turns)
    rows = [
        {"what": what, "rate": each["tokens"] / each["cpu"], "wall": each["tokens"] / each["wall"]}
        for what, each in (("the engine alone", alone), ("features written", whole))
    ]
    rows[1] |= {"ratio": alone["cpu"] / whole["cpu"], "bar": 0.9}
    rows += [{"what": f"of that, {name}", "share": whole[name] / whole["cpu"]} for name in ("packing", "writing")]
    print_table(COLUMNS, rows)
    write_results("extraction", {"alone": alone, "whole": whole, "ratio": rows[1]["ratio"]}, options)


COLUMNS = [
    Column("reading stored texts", "what"), Column("tokens / CPU s", "rate", "{:,.0f}"),
    Column("tokens / s", "wall", "{:,.0f}"), Column("ratio", "ratio", "{:.2f}"), Column("bar", "bar", "{:g}"),
    Column("share", "share", "{:.1%}"),
]  # fmt: skip

if __name__ == "__main__":
    parser = arguments("extraction", __doc__.splitlines()[0])
    parser.add_argument("--recipe", default="smollm2-135m", help="a recipe that was built")
    parser.add_argument("--store", help="its store, where it is not the recipe's own")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    sys.exit(main(parser.parse_args()))
