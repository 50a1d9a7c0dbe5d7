"""The measuring of trees itself, in a process of its own.

In: `spec.json` (a `TreesSpec`). Out: in the spec's folder `rows.parquet`, and one event with tau and costs.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3core.acceptance import Mode, Rounds
from eagle3core.decoding.propose import Chain, DynamicTree, Proposer
from eagle3core.drafters import drafter, load_draft
from storage.features import FeatureReader
from storage.folder import PartFolder
from tasks.documents import heldout_documents, heldout_temperatures
from tasks.evaluate_worker import replayed, rounds_table
from tasks.evaluation import ROWS
from tasks.experiment.measure_trees import TreesSpec
from tasks.prepare_target import TargetInfo
from tasks.processes import cores, emit
from tasks.target_weights import read_target_weights


@dataclass(frozen=True)
class Timed:
    """Rounds, and the seconds that drafting them took."""

    rounds: Rounds
    seconds: float

    @property
    def ms_per_round(self) -> float:
        return 1e3 * self.seconds / len(self.rounds)


def main(path: str) -> None:
    spec = TreesSpec(**json.loads(Path(path).read_text()))
    torch.set_num_threads(spec.threads or cores())
    measure(spec)


def measure(spec: TreesSpec) -> None:
    """Raises ValueError where there is no greedy held-out answer."""
    target = TargetInfo.from_dict(spec.target)
    draft = load_draft(Path(spec.draft), read_target_weights(Path(target.path)).parts(target.config)).eval()
    reader = FeatureReader(Path(spec.features))
    if 0.0 not in heldout_temperatures(reader):
        raise ValueError("the features hold no greedy held-out answer: add 0 to responses.heldout_temperatures")
    heldout = heldout_documents(reader, 0.0, draft.config.layer_ids)

    def timed(proposer: Proposer, mode: Mode) -> Timed:
        started = time.perf_counter()
        rounds = replayed(draft, heldout, proposer, mode)
        return Timed(rounds, time.perf_counter() - started)

    chain, tree = timed(Chain(spec.chain_length), "chain"), timed(proposer_of(spec), "tree")
    PartFolder(Path(spec.folder)).write_table(ROWS, rounds_table(tree.rounds))
    accepted = float(tree.rounds.accepted.sum())
    emit(
        {
            "tau": 1 + accepted / len(tree.rounds),
            "rounds": len(tree.rounds),
            "nodes": proposer_of(spec).nodes,
            "depth": proposer_of(spec).depth,
            "chain_ms_per_token": chain.ms_per_round / spec.chain_length,
            "tree_ms_per_round": tree.ms_per_round,
        }
    )


def proposer_of(spec: TreesSpec) -> Proposer:
    """The tree of the drafter's paper; of a dynamic one the recipe gives the size."""
    own = drafter(spec.drafter).tree()
    return DynamicTree(**spec.tree) if isinstance(own, DynamicTree) else own


if __name__ == "__main__":
    main(sys.argv[1])
