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

import torch

from eagle3core.decoding.drafter import Drafter
from eagle3core.decoding.propose import Chain, DynamicTree, Nothing, Proposer
from eagle3core.decoding.target import TargetModel, prompt_block, tree_block
from eagle3core.draft import Eagle3Draft
from eagle3core.verify import GREEDY, Sampling, distribution

TARGET_SIZES = (1, 2, 4, 8, 16, 32, 48, 64)
DRAFT_SIZES = (1, 2, 4, 8, 10)


@dataclass(frozen=True)
class Curve:
    """Seconds of one call by how many tokens it takes, [sizes] each, sizes rising."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

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
    seconds = costs.round_seconds(proposer, tau)
    return Choice(proposer, tau, seconds, tau * costs.round_seconds(Nothing(), 1.0) / seconds)


@torch.no_grad()
def measure_costs(
    target: TargetModel,
    draft: Eagle3Draft,
    *,
    context: int,
    batch: int = 1,
    sampling: Sampling = GREEDY,
    target_sizes: Sequence[int] = TARGET_SIZES,
    draft_sizes: Sequence[int] = DRAFT_SIZES,
    repeats: int = 5,
) -> Costs:
    """Time the parts of a round behind `context` tokens of text, the median of `repeats` calls each."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(target.vocab_size, shape, generator=generator)
    prompts = list(draw(batch, context))
    cache = target.new_cache(batch, context + max(target_sizes))
    counts = torch.full((batch,), context)
    output = target.forward(prompt_block(prompts, cache), cache)
    cache.keep(torch.arange(context).expand(batch, -1), counts)
    features, logits = output.features, output.logits[:, -1:]

    def verify(size: int) -> Callable[[], object]:
        line = torch.arange(size).expand(batch, -1)
        seen = torch.ones(batch, size, size, dtype=torch.bool).tril()
        block = tree_block(draw(batch, size), line, seen, torch.ones(batch, size, dtype=torch.bool), cache)
        return lambda: target.forward(block, cache)

    def choose(size: int) -> Callable[[], object]:
        behind = logits.expand(-1, size, -1).contiguous()
        return lambda: distribution(behind, sampling).argmax(-1).cpu()

    def drafter() -> Drafter:
        fresh = Drafter(draft, batch, context + max(draft_sizes))
        fresh.commit(features, draw(batch, context), counts)
        return fresh

    def step(size: int) -> Callable[[], object]:
        tokens, parents = draw(batch, size), torch.zeros(batch, size, dtype=torch.int64)
        states = [drafter() for _ in range(repeats + 1)]  # a step leaves its nodes behind
        return lambda: states.pop().step(tokens, parents)

    def commit(size: int) -> Callable[[], object]:
        tokens, rows = draw(batch, size), features[:, :size]
        states = [drafter() for _ in range(repeats + 1)]
        return lambda: states.pop().commit(rows, tokens, torch.full((batch,), size))

    def curve(sizes: Sequence[int], work: Callable[[int], Callable[[], object]]) -> Curve:
        return Curve(tuple(sizes), tuple(_seconds(work(size), repeats) for size in sizes))

    return Costs(
        context=context,
        batch=batch,
        target=curve(target_sizes, verify),
        step=curve(draft_sizes, step),
        commit=curve(draft_sizes, commit),
        choose=curve(target_sizes, choose),
    )


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """Median wall seconds of a call, after one that warms up; waits for the GPU where there is one."""
    times = []
    for _ in range(repeats + 1):
        _wait()
        start = time.perf_counter()
        work()
        _wait()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
