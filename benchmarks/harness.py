"""What benchmarks share: arguments, a clock, the floor's GEMM rate, peak memory, tables, and the results
file.

In: a benchmark's rows. Out: a table on the terminal and, on a full run, benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def arguments(name: str, description: str) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes; add your own."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument(
        "--quick", action="store_true", help="a small run of under 45 seconds; writes no results"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser


def cpu_seconds(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of one call, all threads together: the median of `repeats` calls after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return median(times[1:])


@dataclass(frozen=True)
class Timing:
    """seconds: CPU seconds of one call, all threads together. gemm_rate: fp32 FLOP per CPU second of a large
    matrix product, sampled between the calls: a floor divides by it, and a busy machine slows both alike.
    Medians.
    """

    seconds: float
    gemm_rate: float


def time_beside_gemm(work: Callable[[], object], repeats: int, warm_up: int = 1) -> Timing:
    """Time `work`, with samples of the machine's GEMM rate before and after every call."""
    for _ in range(warm_up):
        work()
    seconds, rates = [], [_gemm_rate() for _ in range(2)][1:]
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
        rates += [_gemm_rate() for _ in range(3)]
    return Timing(median(seconds), median(rates))


def _gemm_rate(size: int = 1536) -> float:
    a, b, out = (torch.randn(size, size) for _ in range(3))
    start = time.process_time()
    torch.mm(a, b, out=out)
    return 2 * size**3 / (time.process_time() - start)


def peak_bytes() -> int:
    """The most memory this process has ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """The memory this process has resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def in_new_process(
    module: str, case: Mapping[str, Any], threads: int = 1, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run `python -m module --case JSON` in a process of its own (so that peak memory is the case's) and read
    the JSON it prints last; `env` is laid over this one's. Raises RuntimeError with its error output.
    """
    limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment = {**os.environ, **limits, **(env or {})}
    command = [sys.executable, "-m", module, "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{module} {json.dumps(case)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Column:
    """A table's column: its heading, the row's key, and how a value is written."""

    heading: str
    key: str
    form: str = "{}"


def print_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as an aligned table; a value that is not there is a dash."""
    cells = [[column.heading for column in columns]]
    for row in rows:
        values = [(column, row.get(column.key)) for column in columns]
        cells.append(["-" if value is None else column.form.format(value) for column, value in values])
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for number, line in enumerate(cells):
        print(
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        )
        if number == 0:
            print("  ".join("-" * width for width in widths))


def machine() -> dict[str, Any]:
    """What figures depend on."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "torch": torch.__version__,
    }


def write_results(name: str, figures: Any, options: argparse.Namespace) -> None:
    """To `--json` where given, and to benchmarks/results/NAME.json on a full run."""
    text = json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n"
    if options.json:
        options.json.write_text(text)
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text)
