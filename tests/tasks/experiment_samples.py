"""Made-up rounds of an experiment's drafts: arms with known acceptance, prompts and seeds with known spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from storage.schemas import ACCEPTANCE
from tasks.experiment.measures import TREE, Cell, Measured

K = 5


def make_rows(
    hits: Sequence[float], rng: np.random.Generator, prompts: int = 30, rounds: int = 20, spread: float = 0.0,
    mode: str = "walk", ease: np.ndarray | None = None,
) -> pa.Table:
    """Position k is right with probability hits[k - 1], moved by every prompt's own `ease` and by `spread` of the draft."""
    ease = np.zeros(prompts) if ease is None else ease
    luck = rng.normal(0, spread)
    chance = np.clip(np.array(hits)[None] + ease[:, None] + luck, 0.01, 0.99)
    owner = np.repeat(np.arange(prompts), rounds)
    right = rng.random((len(owner), len(hits))) < chance[owner]
    accepted = right.cumprod(1).sum(1)
    return pa.table(
        {
            "mode": [mode] * len(owner), "prompt_id": [f"p{i}" for i in owner], "category": ["chat"] * len(owner),
            "temperature": np.zeros(len(owner)), "anchor": np.arange(len(owner), dtype=np.int32),
            "drafted": np.full(len(owner), len(hits), dtype=np.int32), "accepted": accepted.astype(np.int32),
            "turn": np.zeros(len(owner), dtype=np.int32),
        },
        schema=ACCEPTANCE,
    )  # fmt: skip


def make_measured(
    arms: Mapping[Cell, Sequence[float]], seeds: int = 3, seed: int = 0, spread: float = 0.01,
    tree_gain: float | None = None, prompts: int = 30, rounds: int = 20,
) -> Measured:
    """Every cell with `seeds` drafts over the same prompts; trees hit `tree_gain` more often, none where None."""
    rng = np.random.default_rng(seed)
    ease = rng.normal(0, 0.08, prompts)
    how = {"prompts": prompts, "rounds": rounds, "spread": spread, "ease": ease}
    measured = Measured(len(next(iter(arms.values()))))
    for cell, hits in arms.items():
        for number in range(seeds):
            measured.add(cell, number, make_rows(hits, rng, **how))
            if tree_gain is not None:
                rows = make_rows([hit + tree_gain for hit in hits], rng, mode="tree", **how)
                measured.add(cell, number, rows, TREE)
    return measured
