"""A draft with a KV cache: rows of the text are committed, drafted nodes come and go.

In: the target's features of accepted tokens, and the tokens. Out: logits over the draft vocabulary behind the text
and behind every drafted node. A node at depth i stands i positions behind the last committed row and sees the
committed rows, its ancestors and itself (algorithms, sections 2 and 3). What a row is, a subclass says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3core.decoding.target import Block, SlotCache, tree_block


class DraftState(Protocol):
    """What decoding asks of a draft behind B texts: see `DraftCache`, which says it for drafts that feed themselves.

    logits: [B, D], behind the text.
    """

    logits: Tensor

    @property
    def target_ids(self) -> Tensor: ...

    def begin(self, token_ids: Tensor) -> None: ...

    def commit(self, features: Tensor, token_ids: Tensor, counts: Tensor) -> None: ...

    def step(self, token_ids: Tensor, parents: Tensor) -> Tensor: ...

    def select(self, rows: Tensor) -> None: ...


class DraftCache(ABC):
    """Drafts for B sequences at once. Node 0 of a round is the last committed row; `step` adds nodes 1, 2,
    ...
    """

    def __init__(self, draft: Any, batch: int, slots: int, layers: int = 1) -> None:
        self._draft = draft
        self._cache = SlotCache(batch, slots, layers)
        self._ancestors = torch.zeros(batch, 0, 0, dtype=torch.bool)
        self._outputs = torch.zeros(0)
        self.logits = torch.zeros(0)  # [B, D], behind the text

    @abstractmethod
    def _start(self, features: Tensor) -> Tensor:
        """Hidden states of rows of the text [B, m, H] from the target's features [B, m, layers * H]."""

    @abstractmethod
    def _next(self, outputs: Tensor) -> Tensor:
        """Hidden states [B, m, H] of nodes drafted behind `outputs` [B, m, H]."""

    @abstractmethod
    def _run(self, hidden: Tensor, block: Block) -> Tensor:
        """The outputs [B, n, H] of a block's rows, whose keys and values are written to the cache."""

    @property
    def target_ids(self) -> Tensor:
        """Target id of every draft id, [D] int64."""
        return self._draft.target_ids

    def begin(self, token_ids: Tensor) -> None:  # noqa: B027 (most rows have no use for it)
        """Take the texts' first tokens [B], which stand in no row: a row holds features t and token t+1."""

    def commit(self, features: Tensor, token_ids: Tensor, counts: Tensor) -> None:
        """Take the text's next rows: features [B, m, layers * H] and the tokens behind them [B, m], counts[b] of
        each.

        Drafted nodes are forgotten: what the cache keeps of the text comes from the target's features alone.
        """
        batch, rows = token_ids.shape
        causal = torch.ones(rows, rows, dtype=torch.bool).tril().expand(batch, -1, -1)
        order = torch.arange(rows).expand(batch, -1)
        real = order < counts[:, None]
        block = tree_block(token_ids, order, causal, real, self._cache)
        weight = self._draft.lm_head.weight
        outputs = self._run(self._start(features.to(weight.device, weight.dtype)), block)
        self._cache.lengths = self._cache.lengths + counts
        self._outputs = outputs[torch.arange(batch), counts - 1][:, None]
        self._ancestors = torch.ones(batch, 1, 1, dtype=torch.bool)
        self.logits = self._draft.logits(self._outputs[:, 0])

    def step(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Draft behind `token_ids` [B, m], children of the nodes `parents` [B, m]; returns logits [B, m, D].
        """
        batch, added = token_ids.shape
        nodes = self._ancestors.shape[1]
        rows = torch.arange(batch)[:, None]
        old = self._ancestors[rows, parents]
        seen = torch.cat([old, torch.eye(added, dtype=torch.bool).expand(batch, -1, -1)], dim=2)
        above = F.pad(self._ancestors, (0, added))
        self._ancestors = torch.cat([above, seen], dim=1)
        outputs = self._run(self._next(self._outputs[rows, parents]), self._nodes_block(token_ids, seen, nodes))
        self._outputs = torch.cat([self._outputs, outputs], dim=1)
        return self._draft.logits(outputs)

    def select(self, rows: Tensor) -> None:
        """Go on with these sequences [n] int64 alone."""
        self._cache.select(rows)
        self._ancestors, self._outputs = self._ancestors[rows], self._outputs[rows]
        self.logits = self.logits[rows]

    def _nodes_block(self, token_ids: Tensor, seen: Tensor, nodes: int) -> Block:
        """The last nodes as a block. Node 0 is committed already, so node j lies j - 1 slots behind the
        text.
        """
        added = token_ids.shape[1]
        start = self._cache.lengths[:, None]
        width = int(start.max()) + nodes - 1 + added
        mask = (torch.arange(width) < start[:, :, None]).expand(-1, added, -1).clone()
        places = start + torch.arange(nodes - 1 + added)
        mask.scatter_(2, places[:, None, :].expand(-1, added, -1), seen[:, :, 1:])
        # Depth 1 is the first drafted token, one position behind the last committed row.
        positions = start - 1 + seen.sum(-1) - 1
        return Block(token_ids, positions, places[:, nodes - 1 :], mask)


def attend(cache: SlotCache, layer: int, block: Block, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Write a block's keys and values [B n, kv_heads, d] and attend with its queries [B n, heads, d] -> the same
    shape."""
    batch, rows = block.token_ids.shape
    apart = lambda tensor: tensor.unflatten(0, (batch, rows)).transpose(1, 2)
    keys, values = cache.write(layer, block.slots.to(keys.device), apart(keys), apart(values), block.mask.shape[-1])
    mask = block.mask[:, None].to(keys.device)
    attended = F.scaled_dot_product_attention(apart(queries), keys, values, attn_mask=mask, enable_gqa=True)
    return attended.transpose(1, 2).flatten(0, 1)
