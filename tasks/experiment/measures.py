"""What an experiment's drafts were measured at, as sums over prompts that can be resampled.

In: acceptance rows of trained drafts (storage.schemas.ACCEPTANCE). Out: a `Measured`, which knows for every arm,
share, seed, shape of draft and temperature what each held-out prompt contributed. All drafts of an experiment
answer for the same prompts, or there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

CHAIN, TREE = "chain", "tree"
_MODES = {CHAIN: "walk", TREE: TREE}  # which rows are a shape's served rounds


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

    name: "tau"; of chains also, at `position` k, "survival": how often k drafted tokens are kept, and "conditional":
    how often where k - 1 were.
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

    def add(self, cell: Cell, seed: int, rows: pa.Table, shape: str = CHAIN) -> None:
        """Take in one draft's served rounds of a shape; other rows are passed over.

        Raises MeasureError where the prompts are not those of the others.
        """
        served = rows.filter(pc.equal(rows["mode"], _MODES[shape]))
        for temperature in sorted(set(served["temperature"].to_pylist())):
            chosen = served.filter(pc.equal(served["temperature"], temperature))
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
                far, kept = drafted >= k, accepted >= k
                for name, reached in (("survival", far), ("conditional", far & (accepted >= k - 1))):
                    quantity = Quantity(name, k, shape, temperature)
                    self._put(quantity, cell, seed, total((reached & kept).astype(float)), total(reached.astype(float)))

    def _put(self, quantity: Quantity, cell: Cell, seed: int, above: np.ndarray, below: np.ndarray) -> None:
        self.sums.setdefault(quantity, {}).setdefault(cell, {})[seed] = Sums(above, below)

