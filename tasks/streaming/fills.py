"""Which documents lie in the window for which optimizer steps, decided before any of them is extracted.

In: the order of training, the documents' bytes, the window's room. Out: `Fill`s. The same input gives the same
fills in every process, so what a killed run extracted is what the next one looks for.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property


class WindowError(ValueError):
    """A window that is too small; the message says how large it has to be."""


@dataclass(frozen=True)
class Fill:
    """Optimizer steps first..until-1 and the documents they read, each once, in the order they are needed.

    epoch: the how-manieth time it is that its first document is needed (0 where there is none). name: of its
    folder; tells it from every other choice of steps or documents.
    """

    first: int
    until: int
    documents: tuple[int, ...]
    bytes: int
    epoch: int

    @property
    def name(self) -> str:
        digest = hashlib.sha256(" ".join(map(str, self.documents)).encode()).hexdigest()[:8]
        return f"steps-{self.first:06d}-{self.until:06d}-{digest}"


@dataclass(frozen=True)
class Schedule:
    """needs: step -> the documents it reads. sizes: bytes of each document. room: bytes that a fill may take.

    steps: of the whole run. least: steps that are read before the first is done (a dry run measures some).
    """

    needs: Callable[[int], Sequence[int]]
    sizes: Sequence[int]
    room: int
    steps: int
    least: int = 1

    def fill(self, first: int) -> Fill:
        """As many steps from `first` on as fit. Raises WindowError where not even one does."""
        held: dict[int, None] = {}
        taken, until = 0, first
        while until < self.steps:
            new = [i for i in self._read_at(until) if i not in held]
            more = sum(self.sizes[i] for i in new)
            if taken + more > self.room:
                break
            held.update(dict.fromkeys(new))
            taken, until = taken + more, until + 1
        if until == first < self.steps:
            raise WindowError(f"step {first} reads {more:,} bytes of features, there is room for {self.room:,}")
        return self._fill(first, until, tuple(held), taken)

    def between(self, first: int, until: int) -> Fill:
        """The documents of these steps, whether they fit or not."""
        held = tuple(dict.fromkeys(i for step in range(first, until) for i in self._read_at(step)))
        return self._fill(first, until, held, sum(self.sizes[i] for i in held))

    def fills(self, first: int = 0) -> list[Fill]:
        """Every fill of the run from step `first` on. Raises WindowError."""
        found = []
        while first < self.steps:
            found.append(self.fill(first))
            first = found[-1].until
        return found

    @cached_property
    def largest(self) -> int:
        """Bytes of what one step reads, at most."""
        return max(sum(self.sizes[i] for i in self._read_at(step)) for step in range(self.steps))

    def _read_at(self, step: int) -> dict[int, None]:
        steps = range(self.least) if step == 0 else (step,)
        return dict.fromkeys(i for each in steps for i in self.needs(each))

    def _fill(self, first: int, until: int, documents: tuple[int, ...], size: int) -> Fill:
        epoch = 1 + bisect_left(self._steps_of[documents[0]], first) if documents else 0
        return Fill(first, until, documents, size, epoch)

    @cached_property
    def _steps_of(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for step in range(self.steps):
            for i in self.needs(step):
                found.setdefault(i, []).append(step)
        return found
