"""What a CPU minute of training buys: held-out tau of several ways to train, each given the same CPU time.

In: a recipe with a finished build, whose features, vocabulary and target serve every arm.
Out: a table; the floor is the dense, unsampled run: every row computed, every TTT step on every chain. Its
steps are the exact engine's own (the tests hold the two equal), fewer by what a dense step costs more.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Column, arguments, print_table, write_results
from eagle3core.acceptance import Rounds, summarise
from eagle3core.batch import Document
from eagle3core.draft import Eagle3Draft
from eagle3core.estimate import estimate
from eagle3core.packing import draft_id_table, pack
from eagle3core.trainer import Trainer
from eagle3core.training_config import TrainingConfig
from eagle3core.ttt import TrainingTimeTest
from storage.artifacts import ArtifactStore
from storage.features import FeatureReader
from tasks.documents import FeatureDocuments, HeldoutDocument, heldout_documents, split_train, with_responses
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe, load_recipe
from tasks.target_weights import TargetWeights, read_target_weights
from tasks.train_draft import TrainingSpec
from tasks.train_worker import build_draft

CHAIN = 5
BASE = {
    "epochs": 100, "tokens_per_batch": 512, "lr": 1e-3, "warmup_share": 0.05, "threads": 1,
    "checkpoint_every": 10**9, "evaluate_every": 10**9,
}  # fmt: skip
DENSE = "dense, unsampled, 7 steps"
# Ramps are in shares of the CPU time, as a ramp in optimizer steps would mean another thing to every arm.
ARMS: dict[str, Mapping[str, Any]] = {
    DENSE: {"ttt_steps": 7},
    "exact rows, 7 steps": {"ttt_steps": 7},
    "exact rows, 3 steps": {"ttt_steps": 3},
    "1, then 3 steps": {"ttt_steps": 3, "ramp": [(0.0, 1), (0.4, 3)]},
    "1, then 2, then 3 steps": {"ttt_steps": 3, "ramp": [(0.0, 1), (0.4, 2), (0.7, 3)]},
    "1, 2, 3 steps; half the anchors": {"ttt_steps": 3, "ramp": [(0.0, 1), (0.4, 2), (0.7, 3)], "anchor_share": 0.5},
    "1, 2, 3 steps; LK lambda": {"ttt_steps": 3, "ramp": [(0.0, 1), (0.4, 2), (0.7, 3)], "loss": "lk-lambda"},
    "1, 2, 3 steps; batches of 1024": {"ttt_steps": 3, "ramp": [(0.0, 1), (0.4, 2), (0.7, 3)], "tokens_per_batch": 1024},
    "1, 2, 3 steps; lr 5e-4": {"ttt_steps": 3, "ramp": [(0.0, 1), (0.4, 2), (0.7, 3)], "lr": 5e-4},
}  # fmt: skip
QUICK = (DENSE, "1, then 2, then 3 steps")


@dataclass(frozen=True)
class Data:
    """What every arm trains on and is measured on."""

    reader: FeatureReader
    spec: TrainingSpec
    target: TargetInfo
    weights: TargetWeights
    train: FeatureDocuments
    heldout: Sequence[HeldoutDocument]

    def draft(self, seed: int) -> Eagle3Draft:
        """The draft as every arm starts it."""
        torch.manual_seed(seed)
        return build_draft(self.spec, self.target, self.reader, self.weights)


def load(recipe: Recipe) -> Data:
    """What the newest draft in the recipe's store was trained on. Raises SystemExit where there is none."""
    store = ArtifactStore(recipe.store.uri)
    drafts = store.manifests("draft")
    if not drafts:
        raise SystemExit(f"{store.root} holds no draft: run `make build-draft` first")
    inputs = {ref.kind: str(store.local(ref)) for ref in drafts[0].inputs}
    target = prepare_target(recipe)
    spec = TrainingSpec(
        target.to_dict(), inputs["features"], inputs["vocabulary"], "", recipe.draft.model_dump(), {}, CHAIN
    )
    reader = FeatureReader(Path(spec.features))
    train = FeatureDocuments(reader, split_train(reader.index).train)
    weights = read_target_weights(Path(target.path))
    return Data(reader, spec, target, weights, train, heldout_documents(reader, 0.0))


def cost(data: Data, documents: Sequence[Document], steps: int, repeats: int = 3) -> float:
    """CPU seconds of one forward and backward over `documents`."""
    draft = data.draft(0)
    module = TrainingTimeTest(draft)
    batch = pack(documents, draft_id_table(draft.t2d), steps)
    seconds = []
    for _ in range(repeats + 1):
        start = time.process_time()
        module(batch).loss.backward()
        seconds.append(time.process_time() - start)
    return sorted(seconds[1:])[repeats // 2]


def dense_over_exact(data: Data) -> float:
    """How much more a step costs that computes every row, over bins of the run's own documents."""
    ratios = []
    for first in range(0, 12, 4):
        documents = [data.train[i] for i in range(first, first + 4)]
        every_row = [replace(d, supervised=torch.ones_like(d.supervised)) for d in documents]
        ratios.append(cost(data, every_row, 7) / cost(data, documents, 7))
    return sorted(ratios)[1]


def train(data: Data, arm: Mapping[str, Any], minutes: float, seed: int) -> dict[str, Any]:
    """One arm, `minutes` of CPU time of training steps; returns its held-out figures."""
    ramp = arm.get("ramp", ())
    values = {**BASE, **{key: value for key, value in arm.items() if key != "ramp"}, "seed": seed}
    draft = data.draft(seed)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig.from_mapping(values)
        trainer = Trainer(draft, config, data.train, [], Path(folder), draft_length=CHAIN)
        spent, step = train_for(trainer, ramp, 60 * minutes)
    walk = summarise(heldout_rounds(draft, data.heldout), resamples=1000)
    tau, first = walk.tau_micro, walk.survival[0]
    return {
        "steps": step, "cpu_seconds": spent, "tau": tau.value, "low": tau.low, "high": tau.high, "first": first.value,
        "rounds": walk.rounds,
    }  # fmt: skip


def train_for(trainer: Trainer, ramp: Sequence[tuple[float, int]], seconds: float) -> tuple[float, int]:
    """Steps until `seconds` of CPU time are spent, the schedule run by time; returns (CPU seconds, steps)."""
    spent, step, total = 0.0, 0, 1000
    while spent < seconds:
        share = spent / seconds
        ttt_steps = [steps for start, steps in ramp if share >= start][-1] if ramp else None
        batches = trainer.feed.step(step, ttt_steps)
        start = time.process_time()
        # The learning rate follows the share of time spent, in thousandths, whatever a step costs.
        trainer.train_step(batches, min(total - 1, int(share * total)), total)
        spent += time.process_time() - start
        step += 1
    return spent, step


def heldout_rounds(draft: Eagle3Draft, heldout: Sequence[HeldoutDocument]) -> Rounds:
    """Greedy walked rounds over the held-out answers."""
    return estimate(draft, *with_responses(heldout), CHAIN).walk


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    data = load(load_recipe(options.recipe))
    ratio = dense_over_exact(data)
    minutes = 0.15 if options.quick else options.minutes
    rows = []
    for name in QUICK if options.quick else ARMS:
        budget = minutes / ratio if name == DENSE else minutes
        figures = [train(data, ARMS[name], budget, seed) for seed in range(1 if options.quick else options.seeds)]
        middle = sorted(figures, key=lambda f: f["tau"])[len(figures) // 2]
        rows.append({"arm": name, **middle, "taus": [f["tau"] for f in figures], "cpu_minutes": minutes})
        rows[-1]["ratio"] = (middle["tau"] - 1) / (rows[0]["tau"] - 1)
        print_table(COLUMNS, rows)
    print(f"a dense step costs {ratio:.2f} times an exact one on this data; its arm takes that many fewer steps")
    write_results("quality_per_second", {"dense_over_exact": ratio, "rows": rows}, options)


COLUMNS = [
    Column("at equal CPU minutes", "arm"), Column("steps", "steps"), Column("tau", "tau", "{:.3f}"),
    Column("low", "low", "{:.3f}"), Column("high", "high", "{:.3f}"), Column("position 1", "first", "{:.3f}"),
    Column("(tau - 1) / dense", "ratio", "{:.2f}"),
]  # fmt: skip

if __name__ == "__main__":
    parser = arguments("quality_per_second", __doc__.splitlines()[0])
    parser.add_argument("--recipe", default="smollm2-135m", help="a recipe that was built")
    parser.add_argument("--minutes", type=float, default=3.0, help="CPU minutes of training steps for every arm")
    parser.add_argument("--seeds", type=int, default=1, help="training seeds; the median is shown")
    main(parser.parse_args())
