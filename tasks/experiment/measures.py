"""What an experiment's drafts were measured at, as sums over prompts that can be resampled.

In: acceptance rows of trained drafts (storage.schemas.ACCEPTANCE). Out: a `Measured`, which knows for every arm,
share, seed, shape of draft and temperature what each held-out prompt contributed. All drafts of an experiment
answer for the same prompts, or there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

CHAIN, TREE = "chain", "tree"
_SHAPES = {"walk": CHAIN, TREE: TREE}  # rows' modes that are served rounds; "anchor" rows are not


class MeasureError(ValueError):
    """Drafts whose figures do not compare; one line says why."""


@dataclass(frozen=True, order=True)
class Cell:
    """One condition of the experiment: an arm on a share of the data."""

    arm: str
    share: float = 1.0


@dataclass(frozen=True, order=True)
class Quantity:
    """What is read off the rounds of one shape and temperature.

    name: "tau", or "conditional" at `position`: how often position k is kept where k - 1 were (chains only).
    """

    name: str = "tau"
    position: int = 0
    shape: str = CHAIN
    temperature: float = 0.0


@dataclass(frozen=True)
class Sums:
    """A ratio's numerator and denominator by prompt, [P] float64 each, in the order of `Measured.prompts`."""

    above: np.ndarray
    below: np.ndarray

    @property
    def value(self) -> float:
        return float(self.above.sum() / self.below.sum()) if self.below.sum() else float("nan")


@dataclass
class Measured:
    """Sums by cell, seed and quantity. `add` fills it; prompts are those of the first draft that was added."""

    chain_length: int
    prompts: tuple[str, ...] = ()
    sums: dict[Quantity, dict[Cell, dict[int, Sums]]] = field(default_factory=dict)
    rounds: dict[tuple[Cell, int, str, float], int] = field(default_factory=dict)

    def add(self, cell: Cell, seed: int, rows: pa.Table) -> None:
        """Take in one draft's rows. Raises MeasureError where its prompts are not those of the others."""
        modes = np.array(rows["mode"].to_pylist())
        temperatures = np.array(rows["temperature"].to_pylist(), dtype=np.float64)
        for mode, shape in _SHAPES.items():
            for temperature in sorted(set(temperatures[modes == mode])):
                chosen = rows.filter(pa.array((modes == mode) & (temperatures == temperature)))
                self._add(cell, seed, shape, float(temperature), chosen)

    def seeds(self, cell: Cell, quantity: Quantity) -> Mapping[int, Sums]:
        """One `Sums` a training seed. Raises MeasureError where this was not measured."""
        found = self.sums.get(quantity, {}).get(cell)
        if not found:
            raise MeasureError(f"{cell.arm}: no {quantity.shape} was measured at temperature {quantity.temperature:g}")
        return found

    def has(self, cell: Cell, quantity: Quantity) -> bool:
        return bool(self.sums.get(quantity, {}).get(cell))

    @property
    def cells(self) -> list[Cell]:
        """In the order in which they were added."""
        return list(dict.fromkeys(cell for cells in self.sums.values() for cell in cells))

    def temperatures(self, shape: str) -> list[float]:
        return sorted({quantity.temperature for quantity in self.sums if quantity.shape == shape})

    def _add(self, cell: Cell, seed: int, shape: str, temperature: float, rows: pa.Table) -> None:
        names = rows["prompt_id"].to_pylist()
        prompts = tuple(sorted(set(names)))
        self.prompts = self.prompts or prompts
        if prompts != self.prompts:
            raise MeasureError(
                f"{cell.arm}, seed {seed}: measured on {len(prompts)} prompts that are not the {len(self.prompts)} of the "
                "other arms: only drafts that answer for the same prompts compare"
            )
        place = {name: index for index, name in enumerate(prompts)}
        owner = np.array([place[name] for name in names])
        drafted, accepted = (np.array(rows[name].to_pylist(), dtype=np.float64) for name in ("drafted", "accepted"))
        total = lambda values: np.bincount(owner, weights=values, minlength=len(prompts))
        self.rounds[cell, seed, shape, temperature] = len(names)
        self._put(Quantity("tau", 0, shape, temperature), cell, seed, total(accepted + 1), total(np.ones_like(accepted)))
        if shape == CHAIN:
            for k in range(1, self.chain_length + 1):
                reached = (drafted >= k) & (accepted >= k - 1)
                kept = reached & (accepted >= k)
                quantity = Quantity("conditional", k, shape, temperature)
                self._put(quantity, cell, seed, total(kept.astype(float)), total(reached.astype(float)))

    def _put(self, quantity: Quantity, cell: Cell, seed: int, above: np.ndarray, below: np.ndarray) -> None:
        self.sums.setdefault(quantity, {}).setdefault(cell, {})[seed] = Sums(above, below)


def measured(chain_length: int, drafts: Iterable[tuple[Cell, int, pa.Table]]) -> Measured:
    """All drafts of an experiment."""
    made = Measured(chain_length)
    for cell, seed, rows in drafts:
        made.add(cell, seed, rows)
    return made
