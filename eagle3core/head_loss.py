"""Final norm, draft head and loss in one: rows in chunks, forward and gradient together, so that no batch's
logits ever exist.

In: the unroll's outputs, laid end to end, and which of them count for how much. Out: the weighted loss, with
gradients, and what each row did. Three GEMMs a row (logits, their pull on the states, their pull on the
head); the softmax is never made twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3core.fused import inverse_rms, unit_backward
from eagle3core.losses import Loss, Rows
from eagle3core.packing import PackedBatch
from eagle3core.teacher import PackedTeacher

LOGITS_BYTES = {"cpu": 48 << 20, "cuda": 1 << 30}  # one chunk of fp32 logits
ROW_BLOCK = 128  # a matrix product of a whole number of these is up to 8 % faster a row, on a CPU


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
    outputs: Sequence[Tensor],
    norm: torch.nn.RMSNorm,
    head: Tensor,
    teacher: PackedTeacher,
    rows: ScoredRows,
    weights: Tensor,
    loss: Loss,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, RowResults]:
    """outputs: every step's [alive, H] fp32, head [D, H], weights [n] fp32 -> sum of weights * row losses
    (scalar), and the rows' results.

    `dtype` is that of the GEMMs; softmax and loss are fp32.
    """
    work = _Work(teacher, rows, weights, loss, norm.eps, dtype, torch.is_grad_enabled())
    total, values, hits, alpha = _HeadLoss.apply(work, norm.weight, head, *outputs)
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
    def forward(ctx: Any, work: _Work, norm: Tensor, head: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        states, count = torch.cat(outputs), len(work.rows.state)
        values, alpha = states.new_empty(count), states.new_empty(count)
        hits = torch.empty(count, dtype=torch.bool, device=states.device)
        weight = head.to(work.dtype)
        grads = _Gradients.of(states, norm, head if ctx.needs_input_grad[2] else None) if work.gradients else None
        ctx.sizes = [len(output) for output in outputs]
        size = min(count, _chunk_rows(LOGITS_BYTES[states.device.type], len(head)))
        buffer = weight.new_empty(size, len(head))  # one for all chunks: fresh memory costs page faults
        for chunk in work.rows.chunks(size):
            place = work.rows.state[chunk]
            unit, scale = _unit(states.index_select(0, place), work.eps)
            normed = unit * norm
            logits = torch.mm(normed.to(work.dtype), weight.T, out=buffer[: len(place)]).float()
            values[chunk], hits[chunk], alpha[chunk] = _row_losses(logits, work, chunk)
            if grads is not None:  # `logits` now holds the loss's gradient
                pull = grads.add_head(logits, weight, normed, work.weights[chunk, None])
                grads.add_states(pull, norm, unit, scale, place)
        if grads is not None:
            grads.clear_unscored(work.rows.state)
            ctx.grads = grads
        ctx.mark_non_differentiable(values, hits, alpha)
        return torch.dot(values, work.weights), values, hits, alpha

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.grads
        del ctx.grads  # scaled in place: a second backward would be wrong, so it finds nothing
        tensors = (grads.states, grads.norm, grads.head)
        if grad.is_cuda or grad != 1:  # the usual 1 saves a pass over the head's gradient
            tensors = tuple(tensor if tensor is None else tensor.mul_(grad) for tensor in tensors)
        states, norm, head = tensors
        return None, norm, head, *states.split(ctx.sizes)


def _chunk_rows(logits_bytes: int, draft_vocabulary: int) -> int:
    rows = max(64, logits_bytes // (4 * draft_vocabulary))
    return rows - rows % ROW_BLOCK if rows > ROW_BLOCK else rows


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) [rows, H] and 1 / rms(x) [rows, 1]; `x` is overwritten."""
    scale = inverse_rms(x, eps)
    return x.mul_(scale), scale


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
    """Gradients of states [rows, H], norm [H] and head [D, H], summed over chunks in fp32; None for a frozen head.

    A state is read once, in its chunk, and its gradient takes its place.
    """

    states: Tensor
    norm: Tensor
    head: Tensor | None
    started: bool = False

    @classmethod
    def of(cls, states: Tensor, norm: Tensor, head: Tensor | None) -> _Gradients:
        return cls(states, torch.zeros_like(norm), None if head is None else torch.empty_like(head))

    def clear_unscored(self, scored: Tensor) -> None:
        """States [n] other than `scored` reached no loss: their gradient is 0."""
        unscored = torch.ones(len(self.states), dtype=torch.bool, device=scored.device)
        self.states[unscored.index_fill_(0, scored, False)] = 0

    def add_head(self, slope: Tensor, weight: Tensor, normed: Tensor, row_weights: Tensor) -> Tensor:
        """Take in the head's part of a chunk whose loss has gradient `slope` [rows, D] at its logits, before
        the row weights; returns the gradient of `normed` [rows, H], which is overwritten.

        The row weights go onto the narrow factors, never over [rows, D].
        """
        slope = slope.to(weight.dtype)
        if self.head is None:
            return (slope @ weight).float().mul_(row_weights)
        weighted = normed.mul_(row_weights).to(weight.dtype)
        if weight.dtype == torch.float32:
            self.head.addmm_(slope.T, weighted, beta=float(self.started))
        elif self.started:
            self.head += slope.T @ weighted
        else:
            self.head.copy_(slope.T @ weighted)
        self.started = True
        return (slope @ weight).float().mul_(row_weights)

    def add_states(self, pull: Tensor, norm: Tensor, unit: Tensor, scale: Tensor, place: Tensor) -> None:
        """Take in the norm's part: `pull` [rows, H] is the gradient of unit * norm, and is overwritten."""
        self.norm += torch.linalg.vecdot(pull, unit, dim=0)
        self.states.index_copy_(0, place, unit_backward(pull.mul_(norm), unit, scale))
