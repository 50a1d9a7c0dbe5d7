"""EAGLE-3's draft with a KV cache: row t holds the fused features t and token t+1, at position t.

In: the target's features of accepted tokens. Out: see `DraftCache`.
"""

from __future__ import annotations

from torch import Tensor

from eagle3core.decoding.cached import DraftCache, attend
from eagle3core.decoding.target import Block


class Drafter(DraftCache):
    """`fuse` makes the first hidden states, `feedback` the later ones."""

    def _start(self, features: Tensor) -> Tensor:
        return self._draft.fuse(features)

    def _next(self, outputs: Tensor) -> Tensor:
        return self._draft.feedback(outputs.flatten(0, 1)).unflatten(0, outputs.shape[:2])

    def _run(self, hidden: Tensor, block: Block) -> Tensor:
        """The layer's un-normed output [B, n, H] for hidden states [B, n, H]."""
        layer, device = self._draft.midlayer, hidden.device
        flat = hidden.flatten(0, 1)
        x = layer.attention_input(self._draft.embed_tokens(block.token_ids.flatten().to(device)), flat)
        cos, sin = self._draft.rope(block.positions.flatten().to(device), flat.dtype)
        queries = layer.self_attn.queries(x, cos, sin)
        attended = attend(self._cache, 0, block, queries, *layer.self_attn.keys_values(x, cos, sin))
        return layer.finish(attended, flat).unflatten(0, hidden.shape[:2])
