"""Which drafted tokens are kept, so that the text is distributed exactly as the target's own.

In: drafted tokens as a tree (a chain is a tree with one branch), the target's distribution behind every
node, and the distributions the tokens were drawn from. Out: the accepted path and the token that follows it.
Algorithms, section 6. Every decision is asked of a `Chance`, so a test can follow all of them and add up
exact probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution. temperature 0: the argmax. top_k 0 and top_p 1: off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"{self}: temperature and top_k must be 0 or more, top_p in (0, 1]")


GREEDY = Sampling()


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """[..., V] logits -> probabilities in float64: temperature, then top-k, then top-p, as servers order
    them.
    """
    logits = logits.double()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1:
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays while those before it hold less than top_p, so the likeliest always stays.
        ranked = torch.where(ranked.cumsum(-1) - ranked < sampling.top_p, ranked, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ranked)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


class Chance(Protocol):
    """Where randomness comes from."""

    def keep(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def draw(self, probabilities: Tensor) -> int:
        """An index of `probabilities` [V], drawn by them."""
        ...


class Seeded:
    """A `Chance` of its own for each sequence: what is drawn does not depend on who else is in the batch."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def keep(self, probability: float) -> bool:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64)) < probability

    def draw(self, probabilities: Tensor) -> int:
        return int(torch.multinomial(probabilities.cpu(), 1, generator=self._generator))


@dataclass(frozen=True)
class Verdict:
    """path: nodes accepted, from the root's child down. token: what the target adds behind them."""

    path: tuple[int, ...]
    token: int


def verify(
    tokens: Sequence[int],
    parents: Sequence[int],
    target: Tensor,
    proposals: Tensor | None,
    chance: Chance,
) -> Verdict:
    """Walk down the tree: try a node's children in order, go into the first that is accepted.

    tokens, parents: one entry a node; node 0 is the last token of the text so far (its parent is -1), and a
    node comes after its parent. target: [nodes, V], the target's distribution behind each node. proposals:
    [nodes, V], what each node's children were drawn from, without replacement and in order; None where they
    were chosen without chance (a greedy chain, a dynamic tree), which is the case of one-hot proposals.
    """
    children: list[list[int]] = [[] for _ in tokens]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    node, path = 0, []
    while True:
        p = target[node]
        q = None if proposals is None else proposals[node]
        for child in children[node]:
            token = tokens[child]
            ratio = float(p[token]) if q is None else float(p[token] / q[token])
            if chance.keep(min(1.0, ratio)):
                break
            p, q = _without(token, p, q)
        else:
            return Verdict(tuple(path), chance.draw(p))
        path.append(child)
        node = child


def _without(token: int, p: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What is left of target and proposal [V] once `token` was tried and rejected."""
    if q is None:
        return _normalised(p.index_fill(0, torch.tensor(token, device=p.device), 0.0), p), None
    rest = q.index_fill(0, torch.tensor(token, device=q.device), 0.0)
    return _normalised((p - q).clamp_min(0), p), _normalised(rest, rest)


def _normalised(weights: Tensor, instead: Tensor) -> Tensor:
    """weights / their sum; `instead` where nothing is left, which only rounding can bring about."""
    total = weights.sum()
    return weights / total if total > 0 else instead
