"""TTT attention, exactly: causal flash attention over the step-0 keys, merged with the chains' own later
keys.

In: a step's queries, the step-0 keys and values of every row, and each later step's keys and values, one per
chain (the diagonals of the TTT mask). Out: what each query attended to, and every gradient. No T x T tensor
exists: the diagonals are products of row with row.

The merge is ring attention's (algorithms, section 4): parts with outputs o_p and log-sum-exps l_p have l =
log sum exp(l_p) and o = sum exp(l_p - l) o_p. Backward, a flash kernel that is handed the merged o and l
gives the exact gradients of its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3core.windows import Window, Windows

aten = torch.ops.aten


def ttt_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    windows: Windows,
    diagonals: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """queries [alive, heads, d], rotated; keys, values [R, kv_heads, d] of step 0 -> [alive, heads, d].

    `diagonals` holds steps 1..i's (keys, values), each [alive then >= alive, kv_heads, d]: chain c of now is
    chain c of then. fp32 on a CPU; bfloat16 or float16 on CUDA.
    """
    flat = [tensor for pair in diagonals for tensor in pair]
    return _Attention.apply(queries, keys, values, windows, *flat)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, windows: Windows, *diagonals: Tensor) -> Tensor:
        out, lse = _flash_forward(_to_slots(q, windows), k, v, windows)
        out, lse = _from_slots(out, windows), _from_slots(lse, windows)  # [alive, heads, d], [alive, heads]
        if diagonals:
            scores = [_row_dot(q, own) for own in diagonals[0::2]]
            merged = torch.stack([lse, *scores]).logsumexp(0)
            out = out.float() * (lse - merged).exp()[..., None]
            for score, own in zip(scores, diagonals[1::2], strict=True):
                _grouped(out, own).addcmul_(
                    _grouped((score - merged).exp()[..., None], own), _own(own, len(q))
                )
            out, lse = out.to(q.dtype), merged
        ctx.windows = windows
        ctx.save_for_backward(q, k, v, out, lse, *diagonals)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *diagonals = ctx.saved_tensors
        windows = ctx.windows
        slotted = [_to_slots(tensor, windows) for tensor in (grad, q, out, lse)]
        grad_q, grad_k, grad_v = _flash_backward(*slotted, k, v, windows)
        grad_q = _from_slots(grad_q, windows)
        grads: list[Tensor] = []
        if diagonals:
            delta = (grad.float() * out).sum(-1)
            scale = q.shape[-1] ** -0.5
            for own_k, own_v in zip(diagonals[0::2], diagonals[1::2], strict=True):
                weight = (_row_dot(q, own_k) - lse).exp()  # [alive, heads]
                slope = weight * (_row_dot(grad, own_v, 1.0) - delta) * scale
                _grouped(grad_q, own_k).addcmul_(
                    _grouped(slope.to(q.dtype)[..., None], own_k), _own(own_k, len(q))
                )
                grads += [_group_sum(slope, q, own_k), _group_sum(weight, grad, own_v)]
        return grad_q, grad_k, grad_v, None, *grads


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[alive, heads, *] -> [alive, kv_heads, group, *], a view: the heads that share a key head side by side.
    """
    return x.unflatten(1, (like.shape[1], -1))


def _own(own: Tensor, alive: int) -> Tensor:
    """A diagonal's keys or values [then, kv_heads, d] for the chains alive now, [alive, kv_heads, 1, d]."""
    return own[:alive].unsqueeze(2)


def _row_dot(x: Tensor, own: Tensor, scale: float | None = None) -> Tensor:
    """Product of each chain's heads [alive, heads, d] with its own key: [alive, heads] fp32, times d ** -0.5
    by default.
    """
    scale = x.shape[-1] ** -0.5 if scale is None else scale
    return (_grouped(x, own) * _own(own, len(x))).sum(-1, dtype=torch.float32).flatten(1) * scale


def _group_sum(weight: Tensor, x: Tensor, own: Tensor) -> Tensor:
    """sum over a group's heads of weight [alive, heads] * x [alive, heads, d], as the gradient of `own` (zero
    for dead chains).
    """
    grad = torch.zeros_like(own)
    weighted = _grouped(weight.to(x.dtype)[..., None], own) * _grouped(x, own)
    torch.sum(weighted, 2, out=grad[: len(x)])
    return grad


def _to_slots(x: Tensor, windows: Windows) -> Tensor:
    """Chains' rows [alive, ...] -> their windows' slots [size, ...]. A hole's zeros pull nothing: its output
    has no gradient.
    """
    if windows.slots is None:
        return x
    whole = len(x) == windows.size
    slots = x.new_empty(x.shape) if whole else x.new_zeros(windows.size, *x.shape[1:])
    return slots.index_copy_(0, windows.slots, x)


def _from_slots(x: Tensor, windows: Windows) -> Tensor:
    return x if windows.slots is None else x.index_select(0, windows.slots)


def _heads_first(x: Tensor) -> Tensor:
    """[rows, heads, *] -> [1, heads, rows, *], a view, as the CPU kernel wants it."""
    return x.transpose(0, 1).unsqueeze(0)


def _parts(window: Window) -> list[tuple[slice, bool]]:
    """A window's keys as (rows, causal): those before its first query are seen whole, then its own rows
    causally.

    Two parts, because the CPU kernel's causal mask starts at the first key, not at the last query's key.
    """
    parts = [(slice(window.first, window.stop), True)]
    if window.first > window.document:
        parts.append((slice(window.document, window.first), False))
    return parts


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    """Slots' queries [size, heads, d] -> outputs [size, heads, d] and log-sum-exps [size, heads] fp32 over
    step-0 keys.
    """
    if q.is_cuda:
        return _cuda_forward(q, k, v, windows)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    for window in windows.spans:
        place = slice(window.slot, window.slot + window.stop - window.first)
        results = []
        for rows, causal in _parts(window):
            o, log = aten._scaled_dot_product_flash_attention_for_cpu(
                *(_heads_first(x) for x in (q[place], k[rows], v[rows])), 0.0, causal
            )
            results.append((o[0].transpose(0, 1), log[0].T))
        (o, log), *before = results
        if before:
            o_before, log_before = before[0]
            log, log_own = torch.logaddexp(log, log_before), log
            o = o * (log_own - log).exp()[..., None] + o_before * (log_before - log).exp()[..., None]
        out[place], lse[place] = o, log
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, windows: Windows
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the slots' queries and of every step-0 key and value, from the *merged* out and lse."""
    if q.is_cuda:
        return _cuda_backward(grad, q, out, lse, k, v, windows)
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for window in windows.spans:
        place = slice(window.slot, window.slot + window.stop - window.first)
        for rows, causal in _parts(window):
            heads = [
                _heads_first(x) for x in (grad[place], q[place], k[rows], v[rows], out[place], lse[place])
            ]
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads, 0.0, causal)
            grad_q[place] += dq[0].transpose(0, 1)
            grad_k[rows] += dk[0].transpose(0, 1)
            grad_v[rows] += dv[0].transpose(0, 1)
    return grad_q, grad_k, grad_v


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
    spans = windows.varlen
    out, lse, *_ = aten._flash_attention_forward(
        q,
        k[spans.key_rows],
        v[spans.key_rows],
        spans.queries,
        spans.keys,
        spans.longest_queries,
        spans.longest_keys,
        0.0,
        True,
        False,
    )
    return out, lse.T


def _cuda_backward(
    grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, windows: Windows
) -> tuple[Tensor, Tensor, Tensor]:
    spans = windows.varlen
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
    grad_q, dk, dv = aten._flash_attention_backward(
        grad,
        q,
        k[spans.key_rows],
        v[spans.key_rows],
        out,
        lse.T.contiguous(),
        spans.queries,
        spans.keys,
        spans.longest_queries,
        spans.longest_keys,
        0.0,
        True,
        no_dropout,
        no_dropout,
    )
    grad_k = torch.zeros_like(k).index_add_(0, spans.key_rows, dk)
    grad_v = torch.zeros_like(v).index_add_(0, spans.key_rows, dv)
    return grad_q, grad_k, grad_v
