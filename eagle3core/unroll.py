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
from eagle3core.fused import fold_norm, norm_linear, rms_norm, swiglu_linear
from eagle3core.packing import PackedBatch
from eagle3core.rotary import rotate


@dataclass(frozen=True)
class LayerWeights:
    """The layer's weights as the unroll multiplies with them, in the compute dtype, made once per batch.

    The attention input is [norm(embedding), norm(hidden)], so W x = W_token norm(embedding) + W_state
    norm(hidden): the first product belongs to a token, not to a step, and is made once per row, not once per
    row and step. The norms before the projections are folded in (`fold_norm`). token, state: [(heads + 2
    kv_heads) d, H], queries then keys then values. out: [H, heads d]. gate_up: [2 I, H]. down: [H, I].
    """

    token: Tensor
    state: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: DraftLayer, dtype: torch.dtype) -> LayerWeights:
        attention, mlp, hidden = layer.self_attn, layer.mlp, layer.hidden_norm.weight.shape[0]
        projections = [module.weight for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
        gate_up = [mlp.gate_proj.weight, mlp.up_proj.weight]
        joined = lambda weights, norm: torch.cat([fold_norm(weight, norm) for weight in weights]).to(dtype)
        return cls(
            token=joined([weight[:, :hidden] for weight in projections], layer.input_layernorm),
            state=joined([weight[:, hidden:] for weight in projections], layer.hidden_norm),
            out=attention.o_proj.weight.to(dtype),
            gate_up=joined(gate_up, layer.post_attention_layernorm),
            down=mlp.down_proj.weight.to(dtype),
        )


def project(
    layer: DraftLayer, weight: Tensor, hidden: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor, turned: int
) -> tuple[Tensor, Tensor]:
    """Attention's projections of hidden states [rows, H] with some of `LayerWeights.state`'s rows; `tokens`
    is their token part.

    Returns the first `turned` heads, which RoPE turns (queries, keys, or both), and the rest, the values:
    [rows, heads, d] each. cos, sin: [rows, 1, d / 2].
    """
    heads = norm_linear(hidden, layer.hidden_norm.eps, weight) + tokens
    heads = heads.unflatten(1, (-1, layer.self_attn.head_dim))
    # A copy, not a view, of the values: a view would keep all of `heads` in memory until backward.
    return rotate(heads[:, :turned], cos, sin), heads[:, turned:].contiguous()


def finish(layer: DraftLayer, weights: LayerWeights, attended: Tensor, hidden: Tensor) -> Tensor:
    """Attention's output [rows, heads, d] and the residual [rows, H] -> the layer's un-normed output
    [rows, H] fp32.
    """
    hidden = hidden + F.linear(attended.flatten(1), weights.out)
    gate_up = norm_linear(hidden, layer.post_attention_layernorm.eps, weights.gate_up)
    return hidden + swiglu_linear(gate_up, weights.down)


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
        hidden = hidden.index_select(0, batch.chains)
        diagonals: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for number, step in enumerate(batch.steps):
            if not step.alive:
                break
            hidden, rows = hidden[: step.alive], batch.input_rows(number)
            own, angles = tokens.index_select(0, rows), (cos[rows], sin[rows])
            if number == 0:  # keys and values are there already, for every row
                queries, _ = self.project(
                    layer, weights.state[:width], hidden, own[:, :width], *angles, heads
                )
            else:
                turned, own_values = self.project(
                    layer, weights.state, hidden, own, *angles, heads + kv_heads
                )
                queries, own_keys = turned.split([heads, kv_heads], dim=1)
                diagonals.append((own_keys, own_values))
            attended = ttt_attention(queries, keys, values, step.windows, diagonals)
            outputs.append(self._finish(layer, weights, attended, hidden))
            # `draft.feedback`, remembering less
            hidden = rms_norm(outputs[-1], draft.norm) if draft.config.norm_output else outputs[-1]
        return outputs

    def _fuse(self, draft: Eagle3Draft, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return draft.fuse(features.to(draft.fc.weight.dtype)).float()

    def _token_part(self, draft: Eagle3Draft, weights: LayerWeights, tokens: Tensor) -> Tensor:
        norm = draft.midlayer.input_layernorm
        return norm_linear(draft.embed_tokens(tokens), norm.eps, weights.token)

    def _finish(self, layer: DraftLayer, weights: LayerWeights, attended: Tensor, hidden: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.finish, layer, weights, attended, hidden, use_reentrant=False)
        return self.finish(layer, weights, attended, hidden)
