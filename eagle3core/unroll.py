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
from typing import Any, Protocol

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


class Unrolling(Protocol):
    """How a draft's chains run over packed rows with the text as input. dtype: of the GEMMs; outputs are fp32."""

    dtype: torch.dtype

    def __call__(self, draft: Any, batch: PackedBatch) -> list[Tensor]:
        """Outputs [alive, H] fp32 of each step with chains alive, in the order of `batch.chains`."""
        ...


class Cell(Protocol):
    """One step of a recurrent draft, with its weights as one batch needs them.

    tokens: what a row's input token gives to every step, [R, *]. start: a row's first hidden state, [R, H] fp32.
    enter: hidden states and their rows' token parts -> the layer's input and residual, `state` [rows, H]. The
    projections take `state`, its token parts, and cos and sin [rows, 1, d / 2]; what they return is [rows, heads, d].
    finish: attention's output and residual -> output [rows, H] fp32. feedback: output -> the next hidden state.
    """

    def tokens(self, token_ids: Tensor) -> Tensor: ...

    def start(self, features: Tensor) -> Tensor: ...

    def enter(self, hidden: Tensor, tokens: Tensor) -> Tensor: ...

    def queries(self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def keys_values(self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]: ...

    def all_three(self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def finish(self, attended: Tensor, state: Tensor) -> Tensor: ...

    def feedback(self, output: Tensor) -> Tensor: ...


class Eagle3Cell:
    """EAGLE-3's layer: the hidden state is the residual as it is, and is normed beside the token's embedding."""

    def __init__(self, draft: Eagle3Draft, run: Unroll) -> None:
        self._draft, self._run = draft, run
        self._layer, self._weights = draft.midlayer, LayerWeights.of(draft.midlayer, run.dtype)
        self._heads, self._kv_heads = draft.config.num_attention_heads, draft.config.num_key_value_heads
        self._width = self._heads * draft.config.head_dim

    def tokens(self, token_ids: Tensor) -> Tensor:
        norm = self._layer.input_layernorm
        return norm_linear(self._draft.embed_tokens(token_ids), norm.eps, self._weights.token)

    def start(self, features: Tensor) -> Tensor:
        dtype = self._run.dtype
        with torch.autocast(features.device.type, dtype, enabled=dtype != torch.float32):
            return self._draft.fuse(features.to(self._draft.lm_head.weight.dtype)).float()

    def enter(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden

    def queries(self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        queries, _ = self._project(slice(0, self._width), self._heads, state, tokens, cos, sin)
        return queries

    def keys_values(self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._project(slice(self._width, None), self._kv_heads, state, tokens, cos, sin)

    def all_three(self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turned, values = self._project(slice(None), self._heads + self._kv_heads, state, tokens, cos, sin)
        queries, keys = turned.split([self._heads, self._kv_heads], dim=1)
        return queries, keys, values

    def finish(self, attended: Tensor, state: Tensor) -> Tensor:
        if self._run.recompute and torch.is_grad_enabled():
            return checkpoint(self._run.finish, self._layer, self._weights, attended, state, use_reentrant=False)
        return self._run.finish(self._layer, self._weights, attended, state)

    def feedback(self, output: Tensor) -> Tensor:
        # `draft.feedback`, remembering less
        return rms_norm(output, self._draft.norm) if self._draft.config.norm_output else output

    def _project(
        self, part: slice, turned: int, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._run.project(self._layer, self._weights.state[part], state, tokens[:, part], cos, sin, turned)


@dataclass(frozen=True)
class Unroll:
    """How to run it. dtype: of the GEMMs and of attention; the residual stream stays fp32. project, finish:
    or compiled forms of them.

    recompute: keep no activation of the layer's second half but make it again in backward (activation
    checkpointing). cell: makes the draft's `Cell` for a batch.
    """

    dtype: torch.dtype = torch.float32
    project: Callable[..., tuple[Tensor, Tensor]] = project
    finish: Callable[..., Tensor] = finish
    recompute: bool = False
    cell: Callable[[Any, Unroll], Cell] = Eagle3Cell

    @classmethod
    def compiled(cls, dtype: torch.dtype = torch.float32, recompute: bool = False) -> Unroll:
        """The dense parts through `torch.compile`, sizes dynamic: packed batches differ in every length."""
        return cls(
            dtype, torch.compile(project, dynamic=True), torch.compile(finish, dynamic=True), recompute
        )

    def __call__(self, draft: Any, batch: PackedBatch) -> list[Tensor]:
        """Outputs [alive, H] fp32 of each step with chains alive, in the order of `batch.chains`."""
        cell = self.cell(draft, self)
        tokens = cell.tokens(batch.tokens)
        cos, sin = draft.rope(batch.positions, self.dtype)
        state = cell.enter(cell.start(batch.features), tokens)
        keys, values = cell.keys_values(state, tokens, cos, sin)
        state = state.index_select(0, batch.chains)
        diagonals: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for number, step in enumerate(batch.steps):
            if not step.alive:
                break
            rows = batch.input_rows(number)
            own, angles = tokens.index_select(0, rows), (cos[rows], sin[rows])
            if number == 0:  # keys and values are there already, for every row
                state = state[: step.alive]
                queries = cell.queries(state, own, *angles)
            else:
                state = cell.enter(cell.feedback(outputs[-1])[: step.alive], own)
                queries, *own_keys_values = cell.all_three(state, own, *angles)
                diagonals.append(tuple(own_keys_values))
            attended = ttt_attention(queries, keys, values, step.windows, diagonals)
            outputs.append(cell.finish(attended, state))
        return outputs
