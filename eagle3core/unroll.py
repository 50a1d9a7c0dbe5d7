"""Training-time test: the draft unrolled over N steps, each fed with its own output, for every chain of a
packed batch at once.

In: a draft and a `PackedBatch`. Out: the layer's un-normed output of every chain alive at every step.
Algorithms, sections 3 and 4. Equals drafting chain by chain with a cache (the tests do that), and computes
only the rows that can reach the loss: step 0 gives every row its key and value, everything else is done for
chains alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from eagle3core.attention import ttt_attention
from eagle3core.draft import DraftLayer, Eagle3Draft
from eagle3core.fused import norm_linear, swiglu_linear
from eagle3core.packing import PackedBatch
from eagle3core.rotary import rotate


@dataclass(frozen=True)
class LayerWeights:
    """The layer's weights as the unroll multiplies with them, in the compute dtype, made once per batch.

    The attention input is [norm(embedding), norm(hidden)], so W x = W_token norm(embedding) + W_state
    norm(hidden): the first product belongs to a token, not to a step, and is made once per row instead of
    once per row and step. token, state: [(heads + 2 kv_heads) d, H], queries then keys then values. out: [H,
    heads d]. gate_up: [2 I, H]. down: [H, I].
    """

    token: Tensor
    state: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: DraftLayer, dtype: torch.dtype) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        projections = torch.cat(
            [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        ).to(dtype)
        token, state = projections.chunk(2, dim=1)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype)
        return cls(
            token.contiguous(),
            state.contiguous(),
            attention.o_proj.weight.to(dtype),
            gate_up,
            mlp.down_proj.weight.to(dtype),
        )


def project(
    layer: DraftLayer, weight: Tensor, hidden: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor, turned: int
) -> tuple[Tensor, Tensor]:
    """Attention's projections of hidden states [rows, H] with some of `LayerWeights.state`'s rows; `tokens`
    is their token part.

    Returns the first `turned` heads, which RoPE turns (queries, keys, or both), and the rest, the values:
    [rows, heads, d] each. cos, sin: [rows, 1, d / 2].
    """
    norm = layer.hidden_norm
    heads = (norm_linear(hidden, norm.weight, norm.eps, weight) + tokens).unflatten(
        1, (-1, layer.self_attn.head_dim)
    )
    # A copy, not a view, of the values: a view would keep all of `heads` in memory until backward.
    return rotate(heads[:, :turned], cos, sin), heads[:, turned:].contiguous()


def finish(layer: DraftLayer, weights: LayerWeights, attended: Tensor, hidden: Tensor) -> Tensor:
    """Attention's output [rows, heads, d] and the residual [rows, H] -> the layer's un-normed output [rows,
    H] fp32.
    """
    norm = layer.post_attention_layernorm
    hidden = hidden + F.linear(attended.flatten(1), weights.out)
    return hidden + swiglu_linear(norm_linear(hidden, norm.weight, norm.eps, weights.gate_up), weights.down)


@dataclass(frozen=True)
class Unroll:
    """How to run it. dtype: of the GEMMs and of attention; the residual stream stays fp32. project, finish:
    or compiled forms of them.

    recompute: keep no activation of the layer's second half but make it again in backward (activation
    checkpointing).
    """

    dtype: torch.dtype = torch.float32
    project: Callable[..., tuple[Tensor, Tensor]] = project
    finish: Callable[..., Tensor] = finish
    recompute: bool = False

    @classmethod
    def compiled(cls, dtype: torch.dtype = torch.float32, recompute: bool = False) -> Unroll:
        """The dense parts through `torch.compile`, sizes dynamic: packed batches differ in every length."""
        return cls(
            dtype, torch.compile(project, dynamic=True), torch.compile(finish, dynamic=True), recompute
        )

    def __call__(self, draft: Eagle3Draft, batch: PackedBatch) -> list[Tensor]:
        """Outputs [alive, H] fp32 of each step with chains alive, in the order of `batch.chains`."""
        layer, weights = draft.midlayer, LayerWeights.of(draft.midlayer, self.dtype)
        heads, kv_heads = draft.config.num_attention_heads, draft.config.num_key_value_heads
        width = heads * draft.config.head_dim
        tokens = self._token_part(draft, weights, batch.tokens)
        cos, sin = draft.rope(batch.positions, self.dtype)
        hidden = self._fuse(draft, batch.features)
        keys, values = self.project(
            layer, weights.state[width:], hidden, tokens[:, width:], cos, sin, kv_heads
        )
        hidden = hidden[batch.chains]
        diagonals: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for number, step in enumerate(batch.steps):
            if not step.alive:
                break
            hidden, rows = hidden[: step.alive], batch.input_rows(number)
            if number == 0:
                queries, _ = self.project(
                    layer, weights.state[:width], hidden, tokens[rows, :width], cos[rows], sin[rows], heads
                )
            else:
                turned, own_values = self.project(
                    layer, weights.state, hidden, tokens[rows], cos[rows], sin[rows], heads + kv_heads
                )
                queries, own_keys = turned.split([heads, kv_heads], dim=1)
                diagonals.append((own_keys, own_values))
            attended = ttt_attention(queries, keys, values, step.windows, diagonals)
            outputs.append(self._finish(layer, weights, attended, hidden))
            hidden = draft.feedback(outputs[-1])
        return outputs

    def _fuse(self, draft: Eagle3Draft, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return draft.fuse(features.to(draft.fc.weight.dtype)).float()

    def _token_part(self, draft: Eagle3Draft, weights: LayerWeights, tokens: Tensor) -> Tensor:
        norm = draft.midlayer.input_layernorm
        return norm_linear(draft.embed_tokens(tokens), norm.weight, norm.eps, weights.token)

    def _finish(self, layer: DraftLayer, weights: LayerWeights, attended: Tensor, hidden: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.finish, layer, weights, attended, hidden, use_reentrant=False)
        return self.finish(layer, weights, attended, hidden)
