"""Drafted tokens as trees, one a sequence, all of one size: what is verified in one pass of the target.

In: nodes as they are drafted. Out: tokens, parents, depths and who descends from whom, as tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

    def depths(self) -> Tensor:
        """[B, n] int64: 0 for node 0."""
        return self.ancestors().sum(-1) - 1
