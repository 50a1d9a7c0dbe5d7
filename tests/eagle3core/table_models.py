"""A target and a draft that are tables over tiny vocabularies, and a way to follow every random decision.

With these the exact distribution of a decoder's output is a finite sum, and nothing has to be sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from eagle3core.verify import Sampling, distribution

Outcome = TypeVar("Outcome")


def table_logits(name: str, context: tuple[int, ...], size: int, spread: float = 1.5) -> Tensor:
    """Logits [size] float64 that depend on the whole context, the same for the same name."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {context}".encode()).digest()[:7], "big")
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


class TableTarget:
    def __init__(self, vocab: int, sampling: Sampling) -> None:
        self.vocab, self.sampling = vocab, sampling

    def behind(self, context: tuple[int, ...]) -> Tensor:
        """The distribution that the text is to have, [V]."""
        return distribution(table_logits("target", context, self.vocab), self.sampling)


class TableDraft:
    """One sequence. Nodes are remembered by their whole context."""

    def __init__(self, context: tuple[int, ...], target_ids: Tensor) -> None:
        self.target_ids = target_ids
        self._nodes = [context]

    @property
    def logits(self) -> Tensor:
        return table_logits("draft", self._nodes[0], len(self.target_ids))[None]

    def step(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        added = [
            (*self._nodes[parent], token)
            for token, parent in zip(token_ids[0].tolist(), parents[0].tolist(), strict=True)
        ]
        self._nodes += added
        return torch.stack([table_logits("draft", context, len(self.target_ids)) for context in added])[None]


class TableBlock(TableDraft):
    """A block drafter: what it says at a place depends on the text alone, whatever was taken before that place."""

    def __init__(self, context: tuple[int, ...], target_ids: Tensor) -> None:
        super().__init__(context, target_ids)
        self._text = len(context)

    def step(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        super().step(token_ids, parents)
        depths = [len(node) - self._text for node in self._nodes[-token_ids.shape[1] :]]
        text = self._nodes[0]
        return torch.stack([table_logits(f"place {depth}", text, len(self.target_ids)) for depth in depths])[None]


class _Path:
    """A `Chance` that takes the decisions of `prefix`, then the first possible one each time."""

    def __init__(self, prefix: list[int]) -> None:
        self.taken: list[tuple[int, list[float]]] = []
        self._prefix = prefix
        self.probability = 1.0

    def _decide(self, options: list[float]) -> int:
        place = len(self.taken)
        choice = self._prefix[place] if place < len(self._prefix) else _next(options, -1)
        assert choice is not None
        self.taken.append((choice, options))
        self.probability *= options[choice]
        return choice

    def keep(self, probability: float) -> bool:
        return self._decide([probability, 1 - probability]) == 0

    def draw(self, probabilities: Tensor) -> int:
        return self._decide(probabilities.tolist())


def _next(options: list[float], after: int) -> int | None:
    return next((index for index in range(after + 1, len(options)) if options[index] > 0), None)


def every_outcome(run: Callable[[_Path], Outcome]) -> Iterator[tuple[float, Outcome]]:
    """(probability, outcome) of `run` for every way its random decisions can fall."""
    prefix: list[int] | None = []
    while prefix is not None:
        path = _Path(prefix)
        outcome = run(path)
        yield path.probability, outcome
        prefix = None
        for place in range(len(path.taken) - 1, -1, -1):
            choice, options = path.taken[place]
            following = _next(options, choice)
            if following is not None:
                prefix = [earlier for earlier, _ in path.taken[:place]] + [following]
                break
