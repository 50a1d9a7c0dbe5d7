"""SIGKILL at random moments while features pass through a window and a draft is trained on them: is the draft the one of
the run that was left alone?

In: how many kills, a seed for their moments; the target is a tiny random Llama, engine and trainer are the real ones. Out: a
table. `left running`, `other losses` and `other drafts` must be 0.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Column, arguments, print_table, write_results
from benchmarks.kills import Kills, finish, start
from benchmarks.window import Case, Watch, make_target, recipe_for, watched, write_answers
from storage.artifacts import ArtifactStore
from tasks import build_vocabulary, extract_features, train_draft
from tasks.prepare_target import prepare_target

CASE = Case("hugging face", 0.06, 0.04, 1)
COLUMNS = [
    Column("data GB", "data", "{:.2f}"), Column("window GB", "window", "{:.2f}"), Column("peak features", "peak", "{:.3f}"),
    Column("alone s", "alone", "{:.0f}"), Column("kills", "kills"), Column("in training", "training"),
    Column("in extraction", "extraction"), Column("in builds", "builds"), Column("left running", "left_running"),
    Column("other losses", "other_losses"), Column("other drafts", "other_drafts"),
]  # fmt: skip


@dataclass
class Counts(Kills):
    """training, extraction: kills while such a worker ran. peak: GB."""

    training: int = 0
    extraction: int = 0
    other_losses: int = 0
    other_drafts: int = 0
    peak: float = 0.0

    def killed(self, process: subprocess.Popen, moment: float) -> bool:
        """Kill it after so many seconds; False where it was done before."""
        ran = self.kill_after(process, moment)
        self.training += "train_worker" in (ran or "")
        self.extraction += "engines.worker" in (ran or "")
        return ran is not None


@dataclass(frozen=True)
class Learnt:
    """What a finished build leaves: each step's losses, the draft's bytes."""

    losses: list[list[float]]
    draft: bytes


def build(folder: Path) -> Path:
    """Answers and vocabulary in a new store under `folder`, whose target stands beside it."""
    recipe = recipe_for(folder, CASE, CASE.window)
    target, store = prepare_target(recipe), ArtifactStore(recipe.store.uri)
    responses = write_answers(recipe, target, store, CASE.data * 1e9)
    build_vocabulary.run(recipe, target, store, responses)
    return store.root


def train(folder: Path) -> None:
    """The two stages themselves, in the process that is killed."""
    recipe = recipe_for(folder, CASE, CASE.window)
    target, store = prepare_target(recipe), ArtifactStore(recipe.store.uri)
    (responses,), (vocabulary,) = store.list("responses"), store.list("vocabulary")
    features = extract_features.run(recipe, target, store, responses)
    train_draft.run(recipe, target, store, features, vocabulary)


def learnt(store: Path) -> Learnt:
    artifacts = ArtifactStore(str(store))
    folder = artifacts.local(artifacts.list("draft")[0])
    lines = [json.loads(line) for line in (folder / "training/metrics.jsonl").read_text().splitlines()]
    losses = [line["step_loss"] for line in lines if line["kind"] == "step"]
    return Learnt(losses, (folder / "draft/model.safetensors").read_bytes())


def begin(folder: Path) -> subprocess.Popen:
    return start("benchmarks.window_kills", str(folder), folder)


def killed_again_and_again(folder: Path, alone: float, most: int, draw: random.Random, counts: Counts) -> None:
    """One build, killed at random moments until it is done, or `most` kills were made in all."""
    done = False
    while not done:
        process = begin(folder)
        done = counts.kills >= most or not counts.killed(process, draw.uniform(0, alone))
        if done:
            finish(process)
        print(f"{counts.kills} kills, {counts.training} in training", file=sys.stderr)


def place(base: Path, name: str) -> Path:
    """A folder with a target of its own: a process's lock on the device lies beside it."""
    make_target(base / name)
    return base / name


def watched_build(folder: Path, work: Any) -> Watch:
    with watched(build(folder)) as watch:
        work()
    return watch


def measure(base: Path, options: argparse.Namespace) -> dict[str, Any]:
    folder, began = place(base, "alone"), time.monotonic()
    watched_build(folder, lambda: finish(begin(folder)))
    alone = time.monotonic() - began
    store = "windowed"
    expected, counts, draw = learnt(folder / store), Counts(), random.Random(options.seed)
    while counts.kills < options.kills:
        folder = place(base, f"build-{counts.builds}")
        work = lambda folder=folder: killed_again_and_again(folder, alone, options.kills, draw, counts)
        counts.peak = max(counts.peak, watched_build(folder, work).features / 1e9)
        found = learnt(folder / store)
        counts.builds += 1
        counts.other_losses += found.losses != expected.losses
        counts.other_drafts += found.draft != expected.draft
    moments = [round(moment / alone, 3) for moment in counts.moments]
    return {"data": CASE.data, "window": CASE.window, "alone": alone, **vars(counts), "moments": moments}


def main() -> None:
    parser = arguments("window_kills", __doc__ or "")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        return train(Path(options.case))
    if options.quick:
        options.kills = 1
    with tempfile.TemporaryDirectory() as base:
        found = [measure(Path(base), options)]
    print_table(COLUMNS, found)
    write_results("window_kills", found, options)


if __name__ == "__main__":
    main()
