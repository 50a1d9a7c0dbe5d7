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
            own_k, own_v = _own(diagonals[0::2], len(q)), _own(diagonals[1::2], len(q))
            scores = _scores(q, own_k)
            merged = torch.cat([_grouped(lse, k)[..., None], scores], -1).logsumexp(-1)
            own = (scores - merged[..., None]).exp().to(q.dtype) @ own_v
            merged = merged.flatten(1)
            out = torch.addcmul(own.flatten(1, 2), out, (lse - merged).exp()[..., None]).to(q.dtype)
            lse = merged
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
        if not diagonals:
            return grad_q, grad_k, grad_v, None
        own_k, own_v = _own(diagonals[0::2], len(q)), _own(diagonals[1::2], len(q))
        weight = (_scores(q, own_k) - _grouped(lse, k)[..., None]).exp_()  # [alive, kv_heads, group, steps]
        delta = _grouped((grad * out).sum(-1, dtype=torch.float32), k)[..., None]
        slope = (_grouped(grad, k) @ own_v.mT - delta).mul_(weight).mul_(q.shape[-1] ** -0.5).to(q.dtype)
        grad_q += (slope @ own_k).flatten(1, 2)
        grad_own_k = (slope.mT @ _grouped(q, k)).unbind(2)
        grad_own_v = (weight.to(q.dtype).mT @ _grouped(grad, k)).unbind(2)
        pairs = zip(diagonals[0::2], grad_own_k, diagonals[1::2], grad_own_v, strict=True)
        own = [_for_all(*part) for keys, dk, values, dv in pairs for part in ((keys, dk), (values, dv))]
        return grad_q, grad_k, grad_v, None, *own


def _grouped(x: Tensor, keys: Tensor) -> Tensor:
    """[alive, heads, *] -> [alive, kv_heads, group, *], a view: the heads that share a key head together."""
    return x.unflatten(1, (keys.shape[1], -1))


def _own(diagonals: Sequence[Tensor], alive: int) -> Tensor:
    """Every later step's keys (or values) of the chains alive now, [alive, kv_heads, steps, d]."""
    return torch.stack([own[:alive] for own in diagonals], 2)


def _scores(q: Tensor, own_k: Tensor) -> Tensor:
    """Scaled products of each chain's queries with its own keys, [alive, kv_heads, group, steps] fp32."""
    return (_grouped(q, own_k) @ own_k.mT).float() * q.shape[-1] ** -0.5


def _for_all(own: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a step's keys [then, kv_heads, d] from that of the chains still alive: 0 for the
    others.
    """
    if len(grad) == len(own):
        return grad
    return torch.cat([grad, grad.new_zeros(len(own) - len(grad), *grad.shape[1:])])


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
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
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
