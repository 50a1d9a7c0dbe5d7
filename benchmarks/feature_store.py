"""The feature store beside its floors: one sequential write, a memory map of the same bytes, a file for
every sample.

In: random bits in SmolLM2-135M's shape. Out: write and shuffled-read rates with their ratios, bytes per
token, files, peak memory of reading a store, and the catalog's time over many builds. Rates of one row come
from one run, taken in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import (
    Column,
    arguments,
    in_new_process,
    print_table,
    write_results,
)
from storage.artifacts import ArtifactStore
from storage.catalog import Catalog
from storage.feature_spec import wide_columns
from storage.features import FeatureReader, FeatureSample, FeatureSpec, FeatureWriter
from storage.folder import PartFolder
from storage.schemas import AcceptanceRow, to_table

SPEC = FeatureSpec(576, (2, 15, 27), "bfloat16", "topk", 16, "target", "tokenizer")
NAMES = [wide.name for wide in wide_columns(SPEC)]
PER_PART = 256
BARS = {
    "write": 0.7,
    "read warm": 0.85,
    "read warm, first time (verified)": 0.85,
    "read cold (verified)": 0.85,
    "write, against a file a sample": 3.0,
    "write, against a file a sample, both flushed to disk": 3.0,
    "read warm, against a file a sample": 2.0,
    "read cold, against a file a sample": 2.0,
}


@dataclass(frozen=True)
class Layouts:
    """Where one set of samples lies in each layout."""

    ours: Path
    raw: Path
    single: Path


def make_samples(count: int, shortest: int, longest: int) -> list[FeatureSample]:
    """Samples of random bits; they share one pool of bytes, so that many of them cost no memory."""
    random = np.random.default_rng(0)
    pool = random.integers(0, 256, 64 << 20, dtype=np.uint8)

    def cut(dtype: np.dtype, *shape: int) -> np.ndarray:
        size = dtype.itemsize * int(np.prod(shape))
        start = int(random.integers(0, (len(pool) - size) // 64)) * 64
        return pool[start : start + size].view(dtype).reshape(shape)

    samples = []
    for number in range(count):
        tokens = int(random.integers(shortest, longest + 1))
        arrays = {wide.name: cut(wide.dtype, tokens - wide.drop, *wide.shape) for wide in wide_columns(SPEC)}
        words = {"id": f"s{number}", "conversation_id": f"c{number}", "source": "random", "split": "train"}
        samples.append(
            FeatureSample(
                **words, category="", temperature=1.0, spans=[(1, tokens)], finish_reason="stop", **arrays
            )
        )
    return samples


def arrays_of(sample: FeatureSample) -> list[np.ndarray]:
    return [getattr(sample, name) for name in NAMES]


def write_ours(folder: Path, samples: Sequence[FeatureSample]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    writer = FeatureWriter(PartFolder(folder), SPEC)
    for number, start in enumerate(range(0, len(samples), PER_PART)):
        writer.write_part(number, samples[start : start + PER_PART])
    writer.finish()


def write_raw(path: Path, samples: Sequence[FeatureSample]) -> None:
    """The floor: the same bytes into one file, flushed to disk as ours are."""
    path.unlink(missing_ok=True)
    with path.open("wb", buffering=0) as file:
        for sample in samples:
            for array in arrays_of(sample):
                file.write(memoryview(array).cast("B"))
        os.fsync(file.fileno())


def write_single(folder: Path, samples: Sequence[FeatureSample], flush: bool = False) -> None:
    """What other trainers do: one safetensors file a sample, left to the page cache unless `flush`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, sample in enumerate(samples):
        path = folder / f"{number}.safetensors"
        save_file({name: as_tensor(getattr(sample, name)) for name in NAMES}, path)
        if flush:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Without a copy; bfloat16's bits as int16, which costs the same."""
    return torch.frombuffer(array, dtype=_TORCH[array.dtype.str]).view(array.shape)


_TORCH = {"<u2": torch.int16, "<f2": torch.float16, "<i4": torch.int32, "<f4": torch.float32}


class Sink:
    """Where read samples end: one tensor's memory, as a batch being packed. Every byte is copied once."""

    def __init__(self, size: int) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8)

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        start = 0
        for tensor in tensors:
            raw = tensor.reshape(-1).view(torch.uint8)
            self._memory[start : start + len(raw)].copy_(raw)
            start += len(raw)


def read_ours(reader: FeatureReader, order: Sequence[int], sink: Sink) -> None:
    for number in order:
        sink.take([as_tensor(array) for array in arrays_of(reader.read(number))])


def again(folder: Path, order: Sequence[int], sink: Sink) -> Callable[[], None]:
    """One reader for many passes, as a trainer's epochs; the store may stay mapped whole."""
    reader = FeatureReader(folder, mapped_bytes=1 << 40)
    return lambda: read_ours(reader, order, sink)


def read_raw(
    path: Path, samples: Sequence[FeatureSample], order: Sequence[int], sink: Sink
) -> Callable[[], None]:
    """The floor: a memory map of one file, in which it is known beforehand where each array lies."""
    mapped, places, end = np.memmap(path, np.uint8, "r"), [], 0
    for sample in samples:
        place = []
        for array in arrays_of(sample):
            place.append((end, end + array.nbytes, _TORCH[array.dtype.str], array.shape))
            end += array.nbytes
        places.append(place)

    def read() -> None:
        for number in order:
            sink.take(
                [
                    torch.frombuffer(mapped[start:stop], dtype=dtype).view(shape)
                    for start, stop, dtype, shape in places[number]
                ]
            )

    return read


def read_single(folder: Path, order: Sequence[int], sink: Sink) -> None:
    for number in order:
        sink.take(list(load_file(folder / f"{number}.safetensors").values()))


def drop_cache(*paths: Path) -> None:
    """Put files out of the page cache (they must not be mapped)."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(rounds: int, **works: Callable[[], object]) -> dict[str, float]:
    """Least seconds of each, taken in turns so that a busy machine disturbs all alike."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            os.sync()
            times[name].append(seconds(work))
    return {name: min(each) for name, each in times.items()}


def figure(name: str, size: int, ours: float, floor: float) -> dict[str, Any]:
    return {
        "what": name,
        "ours": size / ours / 1e6,
        "floor": size / floor / 1e6,
        "ratio": floor / ours,
        "bar": BARS.get(name),
    }


def measure_rates(layouts: Layouts, samples: Sequence[FeatureSample], rounds: int) -> list[dict[str, Any]]:
    """Write and read rates against one raw file."""
    sizes = [sum(array.nbytes for array in arrays_of(sample)) for sample in samples]
    size, sink = sum(sizes), Sink(max(sizes))
    order = np.random.default_rng(1).permutation(len(samples)).tolist()
    wrote = in_turns(
        rounds, ours=lambda: write_ours(layouts.ours, samples), raw=lambda: write_raw(layouts.raw, samples)
    )
    rows = [figure("write", size, wrote["ours"], wrote["raw"])]

    def cold(read: Callable[[], None]) -> float:
        drop_cache(layouts.ours, layouts.raw)
        return seconds(read)

    pairs = [
        (
            cold(lambda: read_ours(FeatureReader(layouts.ours), order, sink)),
            cold(lambda: read_raw(layouts.raw, samples, order, sink)()),
        )
        for _ in range(rounds)
    ]
    ours, raw = (min(each) for each in zip(*pairs, strict=True))
    rows.append(figure("read cold (verified)", size, ours, raw))
    first = in_turns(
        rounds,
        ours=lambda: read_ours(FeatureReader(layouts.ours), order, sink),
        raw=lambda: read_raw(layouts.raw, samples, order, sink)(),
    )
    rows.append(figure("read warm, first time (verified)", size, first["ours"], first["raw"]))
    reader, mapped = (
        FeatureReader(layouts.ours, mapped_bytes=2 * size),
        read_raw(layouts.raw, samples, order, sink),
    )
    read_ours(reader, order, sink)
    mapped()
    later = in_turns(rounds, ours=lambda: read_ours(reader, order, sink), raw=mapped)
    rows.append(figure("read warm", size, later["ours"], later["raw"]))
    return rows


def measure_single(layouts: Layouts, samples: Sequence[FeatureSample], rounds: int) -> list[dict[str, Any]]:
    """The same against one safetensors file a sample."""
    size = sum(array.nbytes for sample in samples for array in arrays_of(sample))
    sink = Sink(max(sum(array.nbytes for array in arrays_of(sample)) for sample in samples))
    order = np.random.default_rng(1).permutation(len(samples)).tolist()
    wrote = in_turns(
        rounds,
        flushed=lambda: write_single(layouts.single, samples, flush=True),
        single=lambda: write_single(layouts.single, samples),
        ours=lambda: write_ours(layouts.ours, samples),
    )
    rows = [
        figure("write, against a file a sample", size, wrote["ours"], wrote["single"]),
        figure("write, against a file a sample, both flushed to disk", size, wrote["ours"], wrote["flushed"]),
    ]
    works = {
        "ours": again(layouts.ours, order, sink),
        "single": lambda: read_single(layouts.single, order, sink),
    }
    for work in works.values():
        work()
    warm = in_turns(rounds, **works)
    rows.append(figure("read warm, against a file a sample", size, warm["ours"], warm["single"]))
    works["ours"] = lambda: read_ours(FeatureReader(layouts.ours), order, sink)
    cold = {}
    for name, work in works.items():
        drop_cache(layouts.ours, layouts.single)
        cold[name] = seconds(work)
    rows.append(figure("read cold, against a file a sample", size, cold["ours"], cold["single"]))
    counts = [sum(1 for _ in folder.iterdir()) for folder in (layouts.single, layouts.ours)]
    rows.append(
        {"what": f"files: {counts[0]:,} against {counts[1]:,}", "ratio": counts[0] / counts[1], "bar": 100.0}
    )
    return rows


def measure_memory(case: dict[str, Any]) -> dict[str, float]:
    """Peak memory of one shuffled pass over a store; from VmHWM, since ru_maxrss starts at the parent's."""
    reader = FeatureReader(Path(case["folder"]))
    read_ours(reader, np.random.default_rng(1).permutation(len(reader)).tolist(), Sink(16 << 20))
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {"peak_gb": int(status["VmHWM"].split()[0]) * 1024 / 1e9}


def measure_catalog(folder: Path, builds: int) -> dict[str, Any]:
    """Acceptance by category over many builds of 500 rounds each."""
    store = ArtifactStore(str(folder))
    categories = ("writing", "math", "coding", "stem")
    rows = [AcceptanceRow("walk", f"p{i % 64}", categories[i % 4], 0.0, i, 5, i % 6) for i in range(500)]
    table = to_table(AcceptanceRow, rows)
    for number in range(builds):
        name = f"{number:05}"
        with store.writer(
            "acceptance", name, stage="evaluate", stage_version=1, parameters={"n": number}
        ) as writer:
            writer.write_table("rows.parquet", table)
            writer.commit({})
    catalog = Catalog(store)
    took = seconds(lambda: catalog.query("from acceptance_by_category"))
    return {"what": f"acceptance by category over {builds:,} builds, seconds", "ours": took, "bar": 1.0}


def main() -> None:
    options = parse()
    if options.case:
        print(json.dumps(measure_memory(json.loads(options.case))))
        return
    torch.set_num_threads(1)
    rounds, count, many, builds = (3, 200, 600, 50) if options.quick else (5, 800, 4000, 1000)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="feature-store-") as temporary:
        base = Path(temporary)
        layouts = Layouts(base / "ours", base / "raw", base / "single")
        samples = make_samples(count, 64, 512)
        rows = measure_rates(layouts, samples, rounds)
        tokens = sum(len(sample.token_ids) for sample in samples)
        size = sum(path.stat().st_size for path in layouts.ours.iterdir())
        rows.append({"what": "bytes per token, bf16 and top-16", "ours": size / tokens, "bar": 3600.0})
        samples = make_samples(many, 64, 512)
        rows += measure_single(layouts, samples, 1)
        size = sum(path.stat().st_size for path in layouts.ours.iterdir()) / 1e9
        memory = in_new_process("benchmarks.feature_store", {"folder": str(layouts.ours)})
        rows.append({"what": f"peak GB of reading {size:.1f} GB", "ours": memory["peak_gb"], "bar": 1.0})
        rows.append(measure_catalog(base / "store", builds))
    columns = [
        Column("what", "what"),
        Column("ours (MB/s)", "ours", "{:,.2f}"),
        Column("floor (MB/s)", "floor", "{:,.0f}"),
        Column("ratio", "ratio", "{:.2f}"),
        Column("bar", "bar", "{:g}"),
    ]
    print_table(columns, rows)
    write_results("feature_store", rows, options)


def parse() -> argparse.Namespace:
    parser = arguments("feature_store", __doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        help="where to write (a disk with 25 GB free for a full run); default: the temporary folder",
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
