"""SIGKILL at random moments while the target answers: what a build that is killed again and again ends with.

In: an engine (--engine), how many kills, a seed for their moments; the target is a tiny random Llama. Out: a table,
its floor beside it: the same stage left alone. `lost`, `doubled`, `changed` (a part that stood before a kill and is
another one after it) must be 0; `other` counts answers that are not those of the run that was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Column, arguments, print_table, write_results
from storage.artifacts import ArtifactStore
from storage.features import FeatureReader
from storage.schemas import ResponseRow, read_rows

KINDS = ("responses", "features")
COLUMNS = [
    Column("engine", "engine"),
    Column("answers", "answers"),
    Column("alone s", "alone", "{:.0f}"),
    Column("kills", "kills"),
    Column("in builds", "builds"),
    Column("files kept", "kept"),
    Column("left running", "left_running"),
    Column("changed", "changed"),
    Column("lost", "lost"),
    Column("doubled", "doubled"),
    Column("other", "other"),
]


@dataclass
class Kills:
    """Over all builds. left_running: children that outlived a kill. moments: seconds from a start to its kill."""

    kills: int = 0
    builds: int = 0
    left_running: int = 0
    moments: list[float] = field(default_factory=list)

    def kill_after(self, process: subprocess.Popen, moment: float) -> str | None:
        """SIGKILL after so many seconds; the command lines of its children then, None where it was done before."""
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            children = psutil.Process(process.pid).children(recursive=True)
            ran = "\n".join(_command_line(child) for child in children)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            self.left_running += len(psutil.wait_procs(children, timeout=20)[1])
            self.kills += 1
            self.moments.append(moment)
            return ran
        return None


def _command_line(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


@dataclass
class Counts(Kills):
    """kept: files that stood at a build's last kill."""

    kept: int = 0
    changed: int = 0
    lost: int = 0
    doubled: int = 0
    other: int = 0


def build(folder: Path, store: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A store with the conversations in it, and what the process that is killed is told."""
    from tests.tasks.tiny_build import tiny_build

    changes = {f"{kind}.engine": options.engine for kind in KINDS} | {"responses.max_num_seqs": 4}
    made = tiny_build(folder, train=options.answers, heldout=4, **changes, **{"store.uri": str(store)})
    recipe = made.recipe.model_dump(mode="json")
    return {"recipe": recipe, "target": made.target.to_dict(), "conversations": made.conversations.fingerprint}


def answer(case: dict[str, Any]) -> None:
    """The stage itself, in the process that is killed."""
    from tasks import make_responses
    from tasks.prepare_target import TargetInfo
    from tasks.recipe import Recipe

    recipe, target = Recipe.model_validate(case["recipe"]), TargetInfo.from_dict(case["target"])
    store = ArtifactStore(recipe.store.uri)
    make_responses.run(recipe, target, store, store.reference("conversations", case["conversations"]))


def start(module: str, case: str, folder: Path) -> subprocess.Popen:
    """`python -m module --case CASE`, to be killed. Its lock on the device lies in `folder`: no build beside it waits."""
    command = [sys.executable, "-m", module, "--case", case]
    own = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=own, start_new_session=True, **quiet)


def finish(process: subprocess.Popen) -> None:
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the stage failed:\n{said[-2000:]}")


def parts(store: Path) -> dict[str, bytes]:
    """Files of parts that count, both kinds there, by kind and name."""
    found = {kind: {path.name: path for path in (store / kind).glob("*/part-*.parquet")} for kind in KINDS}
    whole = found["responses"].keys() & found["features"].keys()
    return {f"{kind}/{name}": found[kind][name].read_bytes() for kind in KINDS for name in whole}


def rows(store: Path) -> list[ResponseRow]:
    artifacts = ArtifactStore(str(store))
    (ref,) = artifacts.list("responses")
    return list(read_rows(ResponseRow, artifacts.local(ref)))


def captured(store: Path) -> list[str]:
    artifacts = ArtifactStore(str(store))
    (ref,) = artifacts.list("features")
    return FeatureReader(artifacts.local(ref)).index["id"].to_pylist()


def compare(store: Path, expected: list[ResponseRow], counts: Counts) -> None:
    """Add what a finished build lost, doubled or answered otherwise."""
    found = rows(store)
    by_id = {row.id: row for row in found}
    counts.builds += 1
    for ids in ([row.id for row in found], captured(store)):
        counts.doubled += len(ids) - len(set(ids))
        counts.lost += len({row.id for row in expected} - set(ids))
    counts.other += sum(row.id in by_id and by_id[row.id].token_ids != row.token_ids for row in expected)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    begin = lambda case: start("benchmarks.kills", json.dumps(case), folder)
    case = build(folder, folder / "alone", options)
    began = time.monotonic()
    finish(begin(case))
    alone = time.monotonic() - began
    expected = rows(folder / "alone")
    counts, draw = Counts(), random.Random(options.seed)
    while counts.kills < options.kills:
        store = folder / f"store-{counts.builds}"
        case = build(folder, store, options)
        standing: dict[str, bytes] = {}
        done = False
        while not done:
            process = begin(case)
            done = counts.kills >= options.kills or counts.kill_after(process, draw.uniform(0, alone)) is None
            if done:
                finish(process)
                counts.kept += len(standing)
            now = parts(store)
            counts.changed += sum(now.get(name) != data for name, data in standing.items())
            standing = now
            print(f"{counts.kills} kills, {len(standing) // 2} parts stand, {counts.changed} changed", file=sys.stderr)
        compare(store, expected, counts)
    figures = {name: value for name, value in vars(counts).items() if name != "moments"}
    moments = [round(moment / alone, 3) for moment in counts.moments]
    return {"engine": options.engine, "answers": len(expected), "alone": alone, **figures, "moments": moments}


def main() -> None:
    parser = arguments("kills", __doc__ or "")
    parser.add_argument("--engine", choices=["huggingface", "vllm"], default="huggingface")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--answers", type=int, default=48, help="training answers; 8 held-out ones come beside them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        return answer(json.loads(options.case))
    if options.quick:
        options.kills = 1
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(Path(folder), options)]
    print_table(COLUMNS, found)
    write_results(f"kills_{options.engine}", found, options)


if __name__ == "__main__":
    main()
