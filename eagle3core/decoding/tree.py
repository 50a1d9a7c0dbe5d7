"""Drafted tokens as trees, one a sequence, all of one size: what is verified in one pass of the target.

In: nodes as they are drafted. Out: who descends from whom, as a mask, and which nodes are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3core.verify import Chance, Verdict, verify


@dataclass(frozen=True)
class TokenTree:
    """n nodes of each of B sequences; node 0 is the text's last token, and a node comes after its parent.

    tokens: [B, n] int64. parents: [B, n] int64, -1 for node 0. real: [B, n] bool, False for a node that is
    not there. proposals: [B, n, V] float64, what each node's children were drawn from, or None where they
    were chosen.
    """

    tokens: Tensor
    parents: Tensor
    real: Tensor
    proposals: Tensor | None = None

    def ancestors(self) -> Tensor:
        """[B, n, n] bool: node j is node i's ancestor, or i itself."""
        batch, nodes = self.tokens.shape
        seen = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
        rows = torch.arange(batch)
        for node in range(1, nodes):
            seen[:, node] |= seen[rows, self.parents[:, node].clamp_min(0)]
        return seen

    def verify(self, row: int, target: Tensor, chance: Chance) -> Verdict:
        """Which nodes of sequence `row` are kept; target: [n, V] float64, the target behind each node."""
        numbers = self.real[row].nonzero().flatten().tolist()
        place = {number: index for index, number in enumerate(numbers)}
        parents = [place.get(parent, -1) for parent in self.parents[row, numbers].tolist()]
        proposals = None if self.proposals is None else self.proposals[row, numbers]
        tokens = self.tokens[row, numbers].tolist()
        verdict = verify(tokens, parents, target[numbers], proposals, chance)
        return Verdict(tuple(numbers[node] for node in verdict.path), verdict.token)
