"""How sure a difference between arms is: prompts resampled together for all arms, seeds as replicates.

In: a `Measured` and a weighted sum of its figures. Out: its value with a 95 % interval.

The interval is value +- t * sqrt(P + S). P, from prompts: the variance of the weighted sum over bootstrap draws in
which every arm gets the same prompts (paired), whole prompts at a time (clustered). S, from training seeds: the
variance between seeds of an arm's part in the sum, pooled over all arms that have several, over the number of seeds
of each arm. What a draft's finite text leaves to chance is in both: the interval errs to the wide side. t is
Student's, at the degrees of freedom that Welch and Satterthwaite give P + S. With one seed everywhere S is not
known: the interval is then of the prompts alone, and `replicated` is False.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tasks.experiment.measures import Cell, Measured, Quantity

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Term:
    """`weight` times a figure of a cell."""

    weight: float
    cell: Cell
    quantity: Quantity


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of figures. prompts, seeds: the two standard errors. replicated: whether luck in training is
    in the interval.
    """

    value: float
    low: float
    high: float
    prompts: float
    seeds: float
    replicated: bool


class Contrasts:
    """All contrasts of one experiment, over one set of bootstrap draws of its prompts."""

    def __init__(self, measured: Measured, resamples: int, seed: int = 0) -> None:
        self.measured = measured
        count = len(measured.prompts)
        picks = np.random.default_rng(seed).integers(count, size=(resamples, count))
        self._draws = np.stack([np.bincount(row, minlength=count) for row in picks]).astype(np.float64)

    def of(self, terms: Sequence[Term]) -> Contrast:
        """Raises MeasureError where a figure was not measured."""
        value, drawn = 0.0, np.zeros(len(self._draws))
        for term in terms:
            for sums in (seeds := self.measured.seeds(term.cell, term.quantity)).values():
                part = term.weight / len(seeds)
                value += part * sums.value
                with np.errstate(invalid="ignore", divide="ignore"):
                    drawn += part * (self._draws @ sums.above) / (self._draws @ sums.below)
        count = len(self.measured.prompts)
        enough = count > 1 and np.isfinite(drawn).sum() > 1
        prompts = float(np.nanvar(drawn, ddof=1)) * count / (count - 1) if enough else math.nan
        seeds, degrees = self._between_seeds(terms)
        total = prompts + (0.0 if degrees == 0 else seeds)
        half = math.nan
        if total == total and total > 0:
            parts = prompts**2 / (count - 1) + (seeds**2 / degrees if degrees else 0.0)
            half = student(total**2 / parts) * math.sqrt(total)
        elif total == 0:
            half = 0.0
        return Contrast(value, value - half, value + half, math.sqrt(prompts), math.sqrt(seeds), degrees > 0)

    def _between_seeds(self, terms: Sequence[Term]) -> tuple[float, float]:
        """Variance of the sum from training seeds, and its degrees of freedom; 0, 0 where no arm has several."""
        by_cell: dict[Cell, list[Term]] = defaultdict(list)
        for term in terms:
            by_cell[term.cell].append(term)
        variance, degrees = 0.0, math.inf
        for cell, mine in by_cell.items():
            spread, freedom = self._pooled(tuple((term.weight, term.quantity) for term in mine))
            if freedom == 0:
                return 0.0, 0.0
            variance += spread / len(self.measured.seeds(cell, mine[0].quantity))
            degrees = min(degrees, freedom)
        return variance, degrees if by_cell else 0.0

    @lru_cache(maxsize=256)  # noqa: B019 (lives as long as the page that is made)
    def _pooled(self, pattern: tuple[tuple[float, Quantity], ...]) -> tuple[float, int]:
        """Variance between seeds of a weighted sum of one cell's figures, over all cells that have it measured."""
        squares, freedom = 0.0, 0
        for cell in self.measured.cells:
            if not all(self.measured.has(cell, quantity) for _, quantity in pattern):
                continue
            seeds = [self.measured.seeds(cell, quantity) for _, quantity in pattern]
            values = [
                sum(weight * each[seed].value for (weight, _), each in zip(pattern, seeds, strict=True))
                for seed in seeds[0]
            ]
            if len(values) > 1 and np.isfinite(values).all():
                squares += float(np.var(values) * len(values))
                freedom += len(values) - 1
        return (squares / freedom if freedom else 0.0), freedom


@lru_cache(maxsize=1024)
def student(degrees: float) -> float:
    """Student's t that 97.5 % stay below; integrated, for any degrees of freedom from 1 up."""
    x = np.linspace(0.0, 60.0, 12_001)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    density = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    below = 0.5 + np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * (x[1] - x[0]))])
    return float(np.interp((1 + CONFIDENCE) / 2, below, x))
