"""Final norm, draft head and loss in one: rows in chunks, forward and gradient together, so that no batch's
logits ever exist.

In: the unroll's outputs, laid end to end, and which of them count for how much. Out: the weighted loss, with
gradients, and what each row did. Three GEMMs a row (logits, their pull on the states, their pull on the
head); the softmax is never made twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3core.fused import inverse_rms, norm_backward
from eagle3core.losses import Loss, Rows
from eagle3core.packing import PackedBatch
from eagle3core.teacher import PackedTeacher

LOGITS_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # one chunk of fp32 logits


@dataclass(frozen=True)
class ScoredRows:
    """The n (chain, step) pairs whose label counts, ordered by label so that steps share a label's target
    distribution.

    state: place in the outputs laid end to end. label: row of the teacher. chain, step: which. All [n] int64.
    """

    state: Tensor
    label: Tensor
    chain: Tensor
    step: Tensor

    @classmethod
    def of(cls, batch: PackedBatch) -> ScoredRows:
        start, columns = 0, []
        for number, step in enumerate(batch.steps):
            columns.append(
                (
                    step.scored + start,
                    batch.label_rows(number),
                    step.scored,
                    torch.full_like(step.scored, number),
                )
            )
            start += step.alive
        state, label, chain, step = (torch.cat(column) for column in zip(*columns, strict=True))
        order = label.argsort(stable=True)
        return cls(state[order], label[order], chain[order], step[order])

    def chunks(self, size: int) -> Iterator[slice]:
        for start in range(0, len(self.state), size):
            yield slice(start, start + size)


@dataclass(frozen=True)
class RowResults:
    """What each scored row did, [n] each. values: its loss, unweighted. hits: bool, the target's argmax is
    the draft's (a tie is a hit).

    alpha: sum min(p, q), the chance that a sampled draft token is accepted.
    """

    values: Tensor
    hits: Tensor
    alpha: Tensor


def head_loss(
    states: Tensor,
    norm: torch.nn.RMSNorm,
    head: Tensor,
    teacher: PackedTeacher,
    rows: ScoredRows,
    weights: Tensor,
    loss: Loss,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, RowResults]:
    """states [all steps' alive, H] fp32, head [D, H], weights [n] fp32 -> sum of weights * row losses
    (scalar), and the rows' results.

    `dtype` is that of the GEMMs; softmax and loss are fp32.
    """
    work = _Work(teacher, rows, weights, loss, norm.eps, dtype, torch.is_grad_enabled())
    total, values, hits, alpha = _HeadLoss.apply(states, norm.weight, head, work)
    return total, RowResults(values, hits, alpha)


@dataclass(frozen=True)
class _Work:
    teacher: PackedTeacher
    rows: ScoredRows
    weights: Tensor
    loss: Loss
    eps: float
    dtype: torch.dtype
    gradients: bool


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, norm: Tensor, head: Tensor, work: _Work) -> tuple[Tensor, ...]:
        count = len(work.rows.state)
        values, alpha = states.new_empty(count), states.new_empty(count)
        hits = torch.empty(count, dtype=torch.bool, device=states.device)
        weight = head.to(work.dtype)
        grads = _Gradients.zeros(states, norm, head) if work.gradients else None
        size = max(64, LOGITS_BYTES[states.device.type] // (4 * len(head)))
        for chunk in work.rows.chunks(size):
            place = work.rows.state[chunk]
            x = states[place]
            scale = inverse_rms(x, work.eps)
            normed = (x * scale).mul_(norm)
            logits = (normed.to(work.dtype) @ weight.T).float()
            values[chunk], hits[chunk], alpha[chunk] = _row_losses(logits, work, chunk)
            if grads is not None:  # `logits` now holds the loss's gradient
                grads.add(logits, weight, x, scale, normed, norm, place, work.weights[chunk, None])
        if grads is not None:
            ctx.grads = grads
        ctx.mark_non_differentiable(values, hits, alpha)
        return torch.dot(values, work.weights), values, hits, alpha

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.grads
        del ctx.grads  # scaled in place: a second backward would be wrong, so it finds nothing
        return grads.states.mul_(grad), grads.norm.mul_(grad), grads.head.mul_(grad), None


def _row_losses(logits: Tensor, work: _Work, chunk: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, hits and alphas of a chunk's rows; `logits` [rows, D] is overwritten with the losses' gradient.
    """
    label_rows = work.rows.label[chunk]
    label = work.teacher.labels[label_rows, None]
    target = work.teacher.at(label_rows)
    label_logit = logits.gather(1, label)
    hits = label_logit[:, 0] >= logits.amax(-1)
    support = target.gather(logits).clone()
    q = torch.softmax(logits, -1, out=logits)
    # log Z from the label's logit and probability: the target's own argmax is never a vanishing probability.
    log_z = label_logit - q.gather(1, label).clamp_min(torch.finfo(torch.float32).tiny).log()
    q_support = target.gather(q)
    alpha = torch.minimum(target.probs, q_support).sum(-1)
    result = work.loss.rows(Rows(target.probs, q_support, support.sub_(log_z), alpha))
    if work.gradients:
        if result.scale is not None:
            q.mul_(result.scale[:, None])
        target.add_(q, result.correction)
    return result.values, hits, alpha


@dataclass
class _Gradients:
    """Gradients of states [rows, H], norm [H] and head [D, H], summed over chunks in fp32."""

    states: Tensor
    norm: Tensor
    head: Tensor

    @classmethod
    def zeros(cls, states: Tensor, norm: Tensor, head: Tensor) -> _Gradients:
        return cls(*(torch.zeros_like(tensor, dtype=torch.float32) for tensor in (states, norm, head)))

    def add(
        self,
        slope: Tensor,
        weight: Tensor,
        x: Tensor,
        scale: Tensor,
        normed: Tensor,
        norm: Tensor,
        place: Tensor,
        row_weights: Tensor,
    ) -> None:
        """Take in a chunk whose loss has gradient `slope` [rows, D] with respect to its logits, before the
        row weights.
        """
        slope = slope.to(weight.dtype)
        # The row weights go onto the two narrow factors, never over [rows, D].
        weighted = (normed * row_weights).to(weight.dtype)
        if weight.dtype == torch.float32:
            self.head.addmm_(slope.T, weighted)
        else:
            self.head += slope.T @ weighted
        grad, grad_norm = norm_backward((slope @ weight).float().mul_(row_weights), x, scale, norm)
        self.states.index_copy_(0, place, grad)
        self.norm += grad_norm
