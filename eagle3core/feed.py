"""From a source of documents to the packed batches of every optimizer step, in an order that the seed alone
decides.

In: a `DocumentSource`. Out: for step s, this rank's `PackedBatch`es. Nothing is carried from step to step: a
run that resumes at s, on the same number of ranks, sees what it would have seen. A thread packs the next step
while this one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from eagle3core.batch import Document
from eagle3core.packing import PackedBatch, pack
from eagle3core.teacher import TargetHead
from eagle3core.training_config import TrainingConfig


class DocumentSource(Protocol):
    """Documents by number. lengths: tokens of each; supervised_counts: supervised tokens of each; both
    without reading a document.
    """

    lengths: Sequence[int]
    supervised_counts: Sequence[int]

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Document: ...


@dataclass(frozen=True)
class StepBatches:
    """One rank's part of an optimizer step. batches: `accumulate` of them, None where a bin held nothing to
    learn from.
    """

    ttt_steps: int
    batches: tuple[PackedBatch | None, ...]

    @property
    def counts(self) -> Tensor:
        """[N] float64, labels per TTT step over the rank's batches."""
        parts = [batch.counts for batch in self.batches if batch is not None]
        return torch.stack(parts).sum(0) if parts else torch.zeros(self.ttt_steps, dtype=torch.float64)


def fill_bins(lengths: Sequence[int], order: Sequence[int], budget: int) -> list[list[int]]:
    """Documents in `order`, cut into bins of at most `budget` tokens; a longer document has a bin of its own.
    """
    bins: list[list[int]] = []
    room = 0
    for document in order:
        if not bins or lengths[document] > room:
            bins.append([])
            room = budget
        bins[-1].append(document)
        room -= lengths[document]
    return bins


class Feed:
    """The bins of a whole run. Steps take them in order, `accumulate` for each rank; the last step may reuse
    the first bins.
    """

    def __init__(
        self,
        documents: DocumentSource,
        config: TrainingConfig,
        draft_ids: Tensor,
        target_head: TargetHead | None = None,
        rank: int = 0,
        ranks: int = 1,
        view: Callable[[Document], Document] = lambda document: document,
    ) -> None:
        """view: a document as the draft's rows hold it (`Drafter.view`)."""
        self._documents, self._config, self._head, self._view = documents, config, target_head, view
        self._draft_ids, self._rank, self._ranks = draft_ids, rank, ranks
        useful = torch.tensor(
            [i for i in range(len(documents)) if documents.supervised_counts[i] and documents.lengths[i] > 2]
        )
        if not len(useful):
            raise ValueError("no document has a supervised token to learn from; look at the responses' spans")
        self._bins: list[list[int]] = []
        for epoch in range(config.epochs):
            generator = torch.Generator().manual_seed(_seed(config.seed, epoch))
            order = useful[torch.randperm(len(useful), generator=generator)].tolist()
            self._bins += fill_bins(documents.lengths, order, config.tokens_per_batch)

    @property
    def steps(self) -> int:
        """Optimizer steps in all epochs."""
        return -(-len(self._bins) // (self._config.accumulate * self._ranks))

    def documents_of(self, number: int) -> list[int]:
        """Numbers of the documents that optimizer step `number` reads, on every rank, in their order."""
        width = self._config.accumulate * self._ranks
        places = range(number * width, (number + 1) * width)
        return [i for place in places for i in self._bins[place % len(self._bins)]]

    def step(self, number: int, ttt_steps: int | None = None) -> StepBatches:
        """Read and pack this rank's batches of optimizer step `number`."""
        config = self._config
        steps = ttt_steps or config.ttt_steps_at(number)
        first = (number * self._ranks + self._rank) * config.accumulate
        batches = []
        for place in range(first, first + config.accumulate):
            seed = _seed(config.seed, place, salt=1)
            batch = pack(
                [self._view(self._documents[i]) for i in self._bins[place % len(self._bins)]],
                self._draft_ids,
                steps,
                anchor_share=config.anchor_share,
                generator=torch.Generator().manual_seed(seed),
                target_head=self._head,
            )
            batches.append(batch and replace(batch, seed=seed))
        return StepBatches(steps, tuple(batches))

    def stream(self, first: int, stop: int) -> Iterator[StepBatches]:
        """Steps first..stop-1, the next one being packed by a thread while the caller works."""
        with ThreadPoolExecutor(1, thread_name_prefix="feed") as pool:
            upcoming = pool.submit(self.step, first) if first < stop else None
            for number in range(first, stop):
                batches = upcoming.result()
                if number + 1 < stop:
                    upcoming = pool.submit(self.step, number + 1)
                yield batches


def _seed(seed: int, number: int, salt: int = 0) -> int:
    """A seed of its own for every epoch or bin of every run; a large odd factor keeps neighbours apart."""
    return (seed * 0x9E3779B97F4A7C15 + number * 2 + salt) % (1 << 63)
