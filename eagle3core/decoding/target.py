"""What the decoders ask of a target model, and the cache they share with it.

A block of tokens goes through the target in one forward pass; each token says which cache slots it may see,
so a tree of drafts needs nothing special. An adapter for a real library lives outside this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class SlotCache:
    """Keys and values of B sequences in numbered slots; the last slot takes what padding writes and nobody
    reads.

    Per layer [B, kv_heads, slots + 1, head_dim], made when the layer first writes. lengths: [B] int64 on the
    CPU, the committed tokens, which fill the slots from 0 on.
    """

    def __init__(self, batch: int, slots: int, layers: int) -> None:
        self.slots = slots
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    @property
    def padding(self) -> int:
        """The slot for tokens that are not there."""
        return self.slots

    def write(
        self, layer: int, slots: Tensor, keys: Tensor, values: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """Put keys and values [B, kv_heads, n, head_dim] into `slots` [B, n]; returns slots 0..width-1 of
        both.
        """
        if self._keys[layer] is None:
            shape = (keys.shape[0], keys.shape[1], self.slots + 1, keys.shape[3])
            self._keys[layer], self._values[layer] = keys.new_zeros(shape), values.new_zeros(shape)
        index = slots[:, None, :, None].expand_as(keys)
        written = (
            self._keys[layer].scatter_(2, index, keys),
            self._values[layer].scatter_(2, index, values),
        )
        return written[0][:, :, :width], written[1][:, :, :width]

    def keep(self, slots: Tensor, counts: Tensor) -> None:
        """Commit the tokens in `slots` [B, m], the first counts[b] of each row, by moving them behind the
        committed.

        What else was written since is forgotten: no rejected token stays readable.
        """
        order = torch.arange(slots.shape[1])
        real = order < counts[:, None]
        goal = torch.where(real, self.lengths[:, None] + order, self.padding)
        for tensors in (self._keys, self._values):
            for tensor in tensors:
                if tensor is not None:
                    source = slots.to(tensor.device)[:, None, :, None]
                    source = source.expand(-1, tensor.shape[1], -1, tensor.shape[3])
                    moved = tensor.gather(2, source)
                    tensor.scatter_(2, goal.to(tensor.device)[:, None, :, None].expand_as(moved), moved)
        self.lengths = self.lengths + counts

    def select(self, rows: Tensor) -> None:
        """Go on with these sequences [n] int64 alone."""
        self.lengths = self.lengths[rows]
        for tensors in (self._keys, self._values):
            tensors[:] = [None if tensor is None else tensor[rows.to(tensor.device)] for tensor in tensors]


@dataclass(frozen=True)
class Block:
    """n tokens of each of B sequences.

    token_ids, positions, slots: [B, n] int64. mask: [B, n, width] bool, which of the first `width` slots each
    token may see, its own included. A token that is not there is written to the cache's padding slot; what
    it sees does not matter, as long as it is something.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor


@dataclass(frozen=True)
class TargetOutput:
    """logits: [B, n, V]. features: [B, n, 3H], the three captured states side by side."""

    logits: Tensor
    features: Tensor


class TargetModel(Protocol):
    """A target model with its three layers captured."""

    @property
    def vocab_size(self) -> int: ...

    def new_cache(self, batch: int, slots: int) -> SlotCache: ...

    def forward(self, block: Block, cache: SlotCache) -> TargetOutput:
        """Write the block's keys and values into its slots and answer for every token. Commits nothing."""
        ...


def prompt_block(prompts: list[Tensor], cache: SlotCache) -> Block:
    """All prompts as one block, padded on the right: each token sees those before it and itself."""
    longest = max(len(prompt) for prompt in prompts)
    order = torch.arange(longest)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    real = order < lengths[:, None]
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    slots = torch.where(real, order, cache.padding)
    mask = (order <= order[:, None]).expand(len(prompts), longest, longest)
    return Block(tokens, order.expand_as(tokens), slots, mask)


def tree_block(
    token_ids: Tensor, depths: Tensor, ancestors: Tensor, real: Tensor, cache: SlotCache
) -> Block:
    """Nodes behind each sequence's committed tokens: every node sees those, its ancestors and itself.

    token_ids, depths, real: [B, n]; ancestors: [B, n, n] bool, a node's own place included.
    """
    nodes = token_ids.shape[1]
    start = cache.lengths[:, None]
    slots = start + torch.arange(nodes)
    width = int(start.max()) + nodes
    mask = (torch.arange(width) < start[:, :, None]).expand(-1, nodes, -1).clone()
    mask.scatter_(2, slots[:, None, :].expand_as(ancestors), ancestors)
    return Block(token_ids, start + depths, torch.where(real, slots, cache.padding), mask)
