"""In which order samples are read: by seed and data alone, whoever reads and however many they are.

In: lengths, a seed, an epoch. Out: sample numbers, shuffled or in buckets of like lengths, shared out over
ranks, from any position on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def reading_order(lengths: Sequence[int], seed: int, epoch: int = 0, bucket: int = 1) -> np.ndarray:
    """A shuffle of all samples, [n] int64, the same for the same lengths, seed and epoch.

    With `bucket` above 1, runs of that many samples have like lengths (a batch then wastes little on
    padding), and the runs come in shuffled order; 1 is a plain shuffle.
    """
    if bucket < 1:
        raise ValueError(f"bucket {bucket}: at least 1 sample")
    # Philox, keyed by both: epochs of one seed are independent, and numpy promises its stream for all
    # versions.
    random = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    shuffled = np.argsort(random.random(len(lengths)), kind="stable")
    if bucket == 1:
        return shuffled
    by_length = shuffled[np.argsort(np.asarray(lengths)[shuffled], kind="stable")]
    starts = np.arange(0, len(lengths), bucket)
    runs = [
        by_length[start : start + bucket]
        for start in starts[np.argsort(random.random(len(starts)), kind="stable")]
    ]
    return np.concatenate(runs) if runs else by_length


def shard(order: np.ndarray, rank: int, ranks: int, position: int = 0) -> np.ndarray:
    """What `rank` of `ranks` reads of an order whose first `position` samples were read by all ranks
    together.

    Ranks take turns, so that any number of them walks through the order in step, and a run may be resumed
    with another number. Every rank gets equally many: up to `ranks` - 1 samples at the end are left out.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}")
    rest = order[position:]
    return rest[: len(rest) // ranks * ranks][rank::ranks]
