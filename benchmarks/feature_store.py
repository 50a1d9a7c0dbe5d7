"""The feature store beside its floors: one sequential write, a memory map of the same bytes, a file for
every sample.

In: random bits in SmolLM2-135M's shape. Out: write and shuffled-read rates with their ratios (of wall time, and of
CPU time, which neighbours disturb less), bytes per token, files, peak memory of reading a store, what a row group's
size costs, and the catalog's time over many builds and files. Rates of one row come from one run, taken in turns.
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

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from benchmarks.feature_layouts import (
    LONGEST,
    Layouts,
    Sink,
    again,
    arrays_of,
    drop_cache,
    make_samples,
    read_ours,
    read_raw,
    read_single,
    write_ours,
    write_raw,
    write_single,
)
from benchmarks.harness import Column, arguments, in_new_process, print_table, write_results
from storage.artifacts import ArtifactStore
from storage.catalog import Catalog
from storage.feature_spec import INDEX_SCHEMA
from storage.features import FeatureReader, FeatureSample
from storage.folder import FileRecord
from storage.gc import candidates
from storage.manifest import MANIFEST, Manifest
from storage.schemas import AcceptanceRow, to_table

BARS = {
    "write": 0.7,
    "write of all of them, against one raw file": 0.7,
    "read of all of them cold, against one raw file": 0.85,
    "read warm": 0.85,
    "read warm, first time (verified)": 0.85,
    "read cold (verified)": 0.85,
    "write, against a file a sample": 3.0,
    "write, against a file a sample, both flushed to disk": 3.0,
    "read warm, against a file a sample": 2.0,
    "read cold, against a file a sample": 2.0,
}


@dataclass(frozen=True)
class Seconds:
    """wall: what a user waits. cpu: all threads together."""

    wall: float
    cpu: float


def seconds(work: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def least(times: Sequence[Seconds]) -> Seconds:
    return Seconds(min(each.wall for each in times), min(each.cpu for each in times))


def in_turns(rounds: int, prepare: Callable[[], None] = os.sync, **works: Callable[[], object]) -> dict[str, Seconds]:
    """Least seconds of each, taken in turns so that a busy machine disturbs all alike; `prepare` comes before each."""
    times: dict[str, list[Seconds]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            prepare()
            times[name].append(seconds(work))
    return {name: least(each) for name, each in times.items()}


def figure(name: str, size: int, ours: Seconds, floor: Seconds) -> dict[str, Any]:
    return {
        "what": name,
        "ours": size / ours.wall / 1e6,
        "floor": size / floor.wall / 1e6,
        "ratio": floor.wall / ours.wall,
        "cpu_ratio": floor.cpu / ours.cpu,
        "bar": BARS.get(name),
    }


def measure_rates(layouts: Layouts, samples: Sequence[FeatureSample], rounds: int) -> list[dict[str, Any]]:
    """Write and read rates against one raw file."""
    size = sum(array.nbytes for sample in samples for array in arrays_of(sample))
    sink = Sink(LONGEST)
    order = np.random.default_rng(1).permutation(len(samples)).tolist()
    wrote = in_turns(
        rounds, ours=lambda: write_ours(layouts.ours, samples), raw=lambda: write_raw(layouts.raw, samples)
    )
    rows = [figure("write", size, wrote["ours"], wrote["raw"])]
    works = {
        "ours": lambda: read_ours(FeatureReader(layouts.ours), order, sink),
        "raw": lambda: read_raw(layouts.raw, samples, order, sink)(),
    }
    cold = in_turns(rounds, prepare=lambda: drop_cache(layouts.ours, layouts.raw), **works)
    rows.append(figure("read cold (verified)", size, cold["ours"], cold["raw"]))
    first = in_turns(rounds, **works)
    rows.append(figure("read warm, first time (verified)", size, first["ours"], first["raw"]))
    works = {"ours": again(layouts.ours, order, sink), "raw": read_raw(layouts.raw, samples, order, sink)}
    for work in works.values():
        work()
    later = in_turns(rounds, **works)
    rows.append(figure("read warm", size, later["ours"], later["raw"]))
    return rows


def measure_single(layouts: Layouts, samples: Sequence[FeatureSample], warm: int) -> list[dict[str, Any]]:
    """The same against one safetensors file a sample; warm reads of the first `warm` samples, so that both fit in memory."""
    size = sum(array.nbytes for sample in samples for array in arrays_of(sample))
    some = samples[:warm]
    small = sum(array.nbytes for sample in some for array in arrays_of(sample))
    sink = Sink(LONGEST)
    order = np.random.default_rng(1).permutation(len(samples)).tolist()
    wrote = in_turns(
        1,
        flushed=lambda: write_single(layouts.single, some, flush=True),
        some=lambda: write_ours(layouts.ours, some),
        single=lambda: write_single(layouts.single, samples),
        ours=lambda: write_ours(layouts.ours, samples),
        raw=lambda: write_raw(layouts.raw, samples),
    )
    rows = [
        figure("write of all of them, against one raw file", size, wrote["ours"], wrote["raw"]),
        figure("write, against a file a sample", size, wrote["ours"], wrote["single"]),
        figure("write, against a file a sample, both flushed to disk", small, wrote["some"], wrote["flushed"]),
    ]
    works = {
        "ours": lambda: read_ours(FeatureReader(layouts.ours), order, sink),
        "single": lambda: read_single(layouts.single, order, sink),
        "raw": lambda: read_raw(layouts.raw, samples, order, sink)(),
    }
    cold = in_turns(1, prepare=lambda: drop_cache(layouts.ours, layouts.single, layouts.raw), **works)
    rows.append(figure("read of all of them cold, against one raw file", size, cold["ours"], cold["raw"]))
    rows.append(figure("read cold, against a file a sample", size, cold["ours"], cold["single"]))
    few = [number for number in order if number < warm]
    works = {"ours": again(layouts.ours, few, sink), "single": lambda: read_single(layouts.single, few, sink)}
    for work in works.values():
        work()
    again_and_again = in_turns(3, **works)
    rows.append(figure("read warm, against a file a sample", small, again_and_again["ours"], again_and_again["single"]))
    counts = [sum(1 for _ in folder.iterdir()) for folder in (layouts.single, layouts.ours)]
    rows.append(
        {"what": f"files: {counts[0]:,} against {counts[1]:,}", "ratio": counts[0] / counts[1], "bar": 100.0}
    )
    return rows


def measure_groups(layouts: Layouts, samples: Sequence[FeatureSample], rounds: int) -> list[dict[str, Any]]:
    """What the size of a row group costs our reader and the others: the table behind ROW_GROUP_BYTES."""
    size = sum(array.nbytes for sample in samples for array in arrays_of(sample))
    sink, order = Sink(LONGEST), np.random.default_rng(1).permutation(len(samples)).tolist()
    parts = str(layouts.ours / "part-*.parquet")
    rows = []
    for count in (1, 8, 64):
        group = count * size // len(samples)
        times = in_turns(
            rounds,
            write=lambda group=group: write_ours(layouts.ours, samples, group),
            first=lambda: read_ours(FeatureReader(layouts.ours), order, sink),
            arrow=lambda: [pq.read_table(path) for path in sorted(layouts.ours.glob("part-*.parquet"))],
            duckdb=lambda: duckdb.sql(f"select source, sum(n_tokens) from '{parts}' group by all").fetchall(),
        )
        cold = in_turns(
            rounds,
            prepare=lambda: drop_cache(layouts.ours),
            cold=lambda: read_ours(FeatureReader(layouts.ours), order, sink),
        )["cold"]
        metadata = pq.read_metadata(next(layouts.ours.glob("part-*.parquet"))).serialized_size
        rates = {name: size / each.wall / 1e6 for name, each in (times | {"cold": cold}).items()}
        rows.append(
            {"group": f"{count} samples", **rates, "duckdb": times["duckdb"].wall * 1e3, "footer": metadata / 1e3}
        )
    return rows


def repeated(folder: Path, ours: Path, times: int) -> int:
    """A store of every part `times` times, as hard links that a reader maps each by itself; returns its bytes."""
    folder.mkdir()
    index, parts = pq.read_table(ours / "index.parquet"), sorted(ours.glob("part-*.parquet"))
    place, tables = index.schema.get_field_index("part"), []
    for turn in range(times):
        for number, part in enumerate(parts):
            os.link(part, folder / f"part-{turn * len(parts) + number:05}.parquet")
        later = pc.add(index["part"], pa.scalar(turn * len(parts), pa.int32()))
        tables.append(index.set_column(place, index.schema.field(place), later))
    pq.write_table(pa.concat_tables(tables), folder / "index.parquet")
    return times * sum(part.stat().st_size for part in parts)


def measure_memory(case: dict[str, Any]) -> dict[str, float]:
    """Peak memory of one shuffled pass over a store; from VmHWM, since ru_maxrss starts at the parent's."""
    reader = FeatureReader(Path(case["folder"]))
    read_ours(reader, np.random.default_rng(1).permutation(len(reader)).tolist(), Sink(LONGEST))
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
    took = seconds(lambda: catalog.query("from acceptance_by_category")).wall
    return {"what": f"acceptance by category over {builds:,} builds, seconds", "ours": took, "bar": 1.0}


def measure_many_parts(folder: Path, artifacts: int, parts: int) -> list[dict[str, Any]]:
    """A store of `artifacts` with `parts` feature files each: opening its catalog, and finding what nobody needs."""
    store = ArtifactStore(str(folder))
    names = [f"part-{number:05}.parquet" for number in range(parts)]
    files = {name: FileRecord(0, "0" * 32, 0) for name in (*names, "index.parquet")}
    folder.mkdir()
    pq.write_table(INDEX_SCHEMA.empty_table(), folder / "index.parquet")
    for number in range(artifacts):
        ref = store.reference("features", f"{number:05}")
        home = store.root / ref.kind / ref.fingerprint
        home.mkdir(parents=True)
        os.link(folder / "index.parquet", home / "index.parquet")
        for name in names:
            (home / name).touch()
        facts = {"stage": "extract", "stage_version": 1, "parameters": {"n": number}, "inputs": (), "summary": {}}
        (home / MANIFEST).write_bytes(Manifest.now(ref, files=files, **facts).to_bytes())
    total = f"{artifacts * parts:,} parts in {artifacts:,} artifacts"
    sql = "select count(*), sum(bytes), (select count(*) from features) from files"
    asked = seconds(lambda: Catalog(store).query(sql)).wall
    return [
        {"what": f"SQL over {total}, seconds", "ours": asked},
        {"what": f"garbage among {total}, seconds", "ours": seconds(lambda: candidates(store, days=0)).wall},
    ]


def main() -> None:
    options = parse()
    if options.case:
        print(json.dumps(measure_memory(json.loads(options.case))))
        return
    torch.set_num_threads(1)
    small = options.quick
    rounds, count, many, warm, builds, artifacts = (2, 150, 300, 150, 50, 20) if small else (3, 600, 10_000, 1000, 1000, 1000)
    rows: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []

    def add(*more: dict[str, Any]) -> None:
        # As they come: a full run takes minutes, and one that is cut has what it measured.
        rows.extend(more)
        print_table(COLUMNS, more)
        write_results("feature_store", {"rows": rows, "row_groups": groups}, options)

    with tempfile.TemporaryDirectory(dir=options.folder, prefix="feature-store-") as temporary:
        base = Path(temporary)
        layouts = Layouts(base / "ours", base / "raw", base / "single")
        samples = make_samples(count, 64, LONGEST)
        add(*measure_rates(layouts, samples, rounds))
        add(*measure_single(layouts, make_samples(many, 64, LONGEST), warm))
        layouts.raw.unlink()
        shutil.rmtree(layouts.single)
        add({"what": "bytes per token, bf16 and top-16", "ours": bytes_per_token(layouts.ours), "bar": 3600.0})
        size = repeated(base / "repeated", layouts.ours, 2)
        memory = in_new_process("benchmarks.feature_store", {"folder": str(base / "repeated")})
        add({"what": f"peak GB of reading {size / 1e9:.1f} GB", "ours": memory["peak_gb"], "bar": 1.0})
        for folder in (layouts.ours, base / "repeated"):
            shutil.rmtree(folder)
        add(measure_catalog(base / "builds", builds))
        groups += measure_groups(layouts, samples, 1 if small else 2)
        print_table(GROUP_COLUMNS, groups)
        add(*measure_many_parts(base / "parts", artifacts, 100))
    print()
    print_table(COLUMNS, rows)


def bytes_per_token(folder: Path) -> float:
    """Of everything in the folder, metadata and index included."""
    tokens = pc.sum(pq.read_table(folder / "index.parquet", columns=["n_tokens"])["n_tokens"]).as_py()
    return sum(path.stat().st_size for path in folder.iterdir()) / tokens


COLUMNS = [
    Column("what", "what"),
    Column("ours (MB/s)", "ours", "{:,.2f}"),
    Column("floor (MB/s)", "floor", "{:,.0f}"),
    Column("ratio", "ratio", "{:.2f}"),
    Column("CPU ratio", "cpu_ratio", "{:.2f}"),
    Column("bar", "bar", "{:g}"),
]
GROUP_COLUMNS = [
    Column("a row group (MB/s)", "group"),
    Column("write", "write", "{:,.0f}"),
    Column("first read", "first", "{:,.0f}"),
    Column("cold", "cold", "{:,.0f}"),
    Column("pyarrow, whole", "arrow", "{:,.0f}"),
    Column("DuckDB, narrow (ms)", "duckdb", "{:,.1f}"),
    Column("footer (KB)", "footer", "{:,.1f}"),
]


def parse() -> argparse.Namespace:
    parser = arguments("feature_store", __doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        help="where to write (a disk with 35 GB free for a full run); default: the temporary folder",
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
