"""Ratios with 95 % intervals: a bootstrap over clusters of sums, and Wilson's interval where only totals
are known.

In: per-cluster numerators and denominators. Out: `Rate`s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

_Z95 = NormalDist().inv_cdf(0.975)
_CHUNK = 4_000_000  # entries of one block of resampling counts, 32 MB


@dataclass(frozen=True)
class Rate:
    """numerator / denominator with its 95 % interval; nan where nothing was counted or no interval can be
    had.
    """

    value: float
    low: float
    high: float
    numerator: float
    denominator: float


def bootstrap_rates(above: Tensor, below: Tensor, *, shares: int, resamples: int, seed: int) -> list[Rate]:
    """One rate a column of `above` over `below`, both [clusters, columns] float64, resampling whole clusters.

    The first `shares` columns are shares of a count and lie in 0..1. One cluster alone gives no interval
    (nan).
    """
    above, below = above.cpu(), below.cpu()
    clusters, columns = above.shape
    totals, counts = above.sum(0), below.sum(0)
    low = high = torch.full((columns,), math.nan, dtype=torch.float64)
    if clusters > 1:
        sums = _resampled_sums(torch.cat([above, below], dim=1), resamples, seed)
        drawn = sums[:, :columns] / sums[:, columns:]  # 0 / 0 is nan, and leaves the quantile
        tail = tail_share(clusters)
        low, high = drawn.nanquantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
    rates = []
    for column in range(columns):
        number, count = float(totals[column]), float(counts[column])
        ends = float(low[column]), float(high[column])
        if column < shares and count and ends[0] == ends[1] and number in (0.0, count):
            ends = wilson(number, count)  # all or nothing: every resample says the same, which proves nothing
        rates.append(Rate(number / count if count else math.nan, *ends, number, count))
    return rates


def _resampled_sums(values: Tensor, resamples: int, seed: int) -> Tensor:
    """Column sums of `resamples` draws of the rows of `values` with replacement, [resamples, columns]."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(values)
    chunk = max(1, _CHUNK // rows)
    sums = []
    for start in range(0, resamples, chunk):
        picks = torch.randint(rows, (min(chunk, resamples - start), rows), generator=generator)
        times = torch.zeros(picks.shape, dtype=torch.float64)
        times.scatter_add_(1, picks, torch.ones(picks.shape, dtype=torch.float64))
        sums.append(times @ values)
    return torch.cat(sums)


def tail_share(clusters: int) -> float:
    """Share of resamples outside each end of the interval: 2.5 %, and less where clusters are few.

    The plain percentile interval is too narrow by sqrt(n / (n - 1)) and by Student's t over the normal
    (Hesterberg 2015, "expanded percentile"); the t quantile is two terms of Cornish and Fisher's expansion.
    """
    degrees = clusters - 1
    first = (_Z95**3 + _Z95) / 4
    second = (5 * _Z95**5 + 16 * _Z95**3 + 3 * _Z95) / 96
    student = _Z95 + first / degrees + second / degrees**2
    return NormalDist().cdf(-student * math.sqrt(clusters / degrees))


def wilson(hits: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % interval of hits / count, which stays inside 0..1 and has a width at 0 and at 1."""
    share, square = hits / count, _Z95**2 / count
    centre = share + square / 2
    half = _Z95 * math.sqrt(share * (1 - share) / count + square / count / 4)
    # At 0 and at 1 the ends are exact; computed, they miss them by a rounding and would leave the share
    # outside.
    low = (centre - half) / (1 + square) if hits > 0 else 0.0
    high = (centre + half) / (1 + square) if hits < count else 1.0
    return low, high


def proportion(hits: float, count: float) -> Rate:
    """hits / count with Wilson's interval."""
    if not count:
        return Rate(math.nan, math.nan, math.nan, float(hits), float(count))
    return Rate(hits / count, *wilson(hits, count), float(hits), float(count))
