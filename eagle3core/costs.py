"""What a round costs on this device, and so which draft length or tree pays here.

In: a target and a draft to be timed, and measured acceptance. Out: predicted speed-ups over decoding
without a draft, and the best choice, which may be not to speculate. A round of n verified tokens pays when
the target takes little longer for n tokens than for one: true where memory bandwidth limits it, false where
arithmetic does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from eagle3core.decoding.cached import DraftState
from eagle3core.decoding.propose import Chain, DynamicTree, Nothing, Proposer
from eagle3core.decoding.target import TargetModel, prompt_block, tree_block
from eagle3core.drafters import drafter_of
from eagle3core.drafters.interface import Draft
from eagle3core.verify import GREEDY, Sampling, distribution

TARGET_SIZES = (1, 2, 4, 8, 16, 32, 48, 64)
DRAFT_SIZES = (1, 2, 4, 8, 10)


@dataclass(frozen=True)
class Curve:
    """Seconds of one call by how many tokens it takes, [sizes] each, sizes rising."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def rising(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Curve:
        """Fewer tokens never cost more than many: a time above a larger size's is the machine's noise, which only adds."""
        least = list(accumulate(reversed(seconds), min))
        return cls(tuple(sizes), tuple(reversed(least)))

    def at(self, size: float) -> float:
        """Between the measured sizes by straight lines, beyond them by the nearest two. Raises for one size
        alone.
        """
        if len(self.sizes) < 2:
            raise ValueError("a cost curve needs two sizes or more")
        right = next((i for i, known in enumerate(self.sizes) if known >= size), len(self.sizes) - 1)
        right = max(right, 1)
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


@dataclass(frozen=True)
class Costs:
    """Measured at `context` committed tokens and `batch` sequences.

    target: one pass over n tokens of each sequence. step: the draft behind m nodes. commit: the draft's
    rows of m accepted tokens. choose: making n distributions and taking tokens from them.
    """

    context: int
    batch: int
    target: Curve
    step: Curve
    commit: Curve
    choose: Curve

    def round_seconds(self, proposer: Proposer, tau: float) -> float:
        """One round of `proposer` that adds tau tokens on average."""
        verified = self.target.at(proposer.nodes) + self.choose.at(proposer.nodes)
        if isinstance(proposer, Nothing):
            return verified
        width = proposer.steps / max(1, proposer.depth - 1)
        return verified + self.commit.at(tau) + (proposer.depth - 1) * self.step.at(width)

    def speed_up(self, proposer: Proposer, tau: float) -> float:
        """Tokens per second over those of no draft at all."""
        return tau * self.round_seconds(Nothing(), 1.0) / self.round_seconds(proposer, tau)


@dataclass(frozen=True)
class Choice:
    """One way to draft: expected tokens a round, predicted seconds a round, and speed-up over no draft at
    all.
    """

    proposer: Proposer
    tau: float
    round_seconds: float
    speed_up: float


def chain_choices(costs: Costs, survival: Sequence[float]) -> list[Choice]:
    """Chains of 1..K tokens from the survival at each position (of chains of K): tau is 1 plus its running
    sum.
    """
    choices, tau = [], 1.0
    for length, share in enumerate(survival, 1):
        tau += share
        choices.append(_choice(costs, Chain(length), tau))
    return choices


def tree_choices(costs: Costs, taus: Mapping[DynamicTree, float]) -> list[Choice]:
    """Dynamic trees with their measured tau: no chain's acceptance says what a tree's is."""
    return [_choice(costs, tree, tau) for tree, tau in taus.items()]


def best_choice(costs: Costs, choices: Sequence[Choice]) -> Choice:
    """The fastest of `choices` and of not speculating."""
    return max([_choice(costs, Nothing(), 1.0), *choices], key=lambda choice: choice.speed_up)


def _choice(costs: Costs, proposer: Proposer, tau: float) -> Choice:
    return Choice(proposer, tau, costs.round_seconds(proposer, tau), costs.speed_up(proposer, tau))


@torch.no_grad()
def measure_costs(
    target: TargetModel,
    draft: Draft,
    *,
    context: int,
    batch: int = 1,
    sampling: Sampling = GREEDY,
    target_sizes: Sequence[int] = TARGET_SIZES,
    draft_sizes: Sequence[int] = DRAFT_SIZES,
    repeats: int = 5,
) -> Costs:
    """Time the parts of a round behind `context` tokens of text, the median of `repeats` calls each."""
    bench = _Bench(target, draft, context, batch, sampling, max(*target_sizes, *draft_sizes), repeats)
    curve = lambda sizes, measure: Curve.rising(sizes, [measure(size) for size in sizes])
    return Costs(
        context=context,
        batch=batch,
        target=curve(target_sizes, bench.verify),
        step=curve(draft_sizes, bench.step),
        commit=curve(draft_sizes, bench.commit),
        choose=curve(target_sizes, bench.choose),
    )


class _Bench:
    """A text of random tokens behind which the parts of a round are timed; each method returns seconds."""

    def __init__(
        self,
        target: TargetModel,
        draft: Draft,
        context: int,
        batch: int,
        sampling: Sampling,
        room: int,
        repeats: int,
    ) -> None:
        self._target, self._draft, self._sampling = target, draft, sampling
        self._batch, self._room, self._repeats = batch, context + room, repeats
        self._generator = torch.Generator().manual_seed(0)
        self._cache = target.new_cache(batch, self._room)
        self._counts = torch.full((batch,), context)
        output = target.forward(prompt_block(list(self._tokens(context)), self._cache), self._cache)
        self._cache.keep(torch.arange(context).expand(batch, -1), self._counts)
        self._features, self._logits = output.features, output.logits[:, -1:]

    def verify(self, size: int) -> float:
        line = torch.arange(size).expand(self._batch, -1)
        seen = torch.ones(self._batch, size, size, dtype=torch.bool).tril()
        real = torch.ones_like(line, dtype=torch.bool)
        block = tree_block(self._tokens(size), line, seen, real, self._cache)
        return _seconds(lambda: self._target.forward(block, self._cache), self._repeats)

    def choose(self, size: int) -> float:
        behind = self._logits.expand(-1, size, -1).contiguous()
        return _seconds(lambda: distribution(behind, self._sampling).argmax(-1).cpu(), self._repeats)

    def step(self, size: int) -> float:
        tokens = self._tokens(size)
        states = self._drafters()
        return _seconds(lambda: states.pop().step(tokens, torch.zeros_like(tokens)), self._repeats)

    def commit(self, size: int) -> float:
        tokens, rows = self._tokens(size), self._features[:, :size]
        counts, states = torch.full((self._batch,), size), self._drafters()
        return _seconds(lambda: states.pop().commit(rows, tokens, counts), self._repeats)

    def _tokens(self, size: int) -> Tensor:
        return torch.randint(self._target.vocab_size, (self._batch, size), generator=self._generator)

    def _drafters(self) -> list[DraftState]:
        """One for each call: a call leaves its nodes behind."""
        fresh = [drafter_of(self._draft).decoder(self._draft, self._batch, self._room) for _ in range(self._repeats + 1)]
        tokens = self._tokens(self._features.shape[1])
        for drafter in fresh:
            drafter.commit(self._features, tokens, self._counts)
        return fresh


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """Median wall seconds of a call, after one that warms up; waits for the GPU where there is one."""
    times = []
    for _ in range(repeats + 1):
        wait_for_device()
        start = time.perf_counter()
        work()
        wait_for_device()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def wait_for_device() -> None:
    """A GPU works on behind the call that asked it: a clock is read only when it is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
