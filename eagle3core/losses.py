"""The shelf of losses: what a row's draft distribution q is asked to be, given the target's p, and how a
chain weighs its steps.

In: probabilities. Out: each row's loss and its gradient with respect to the logits, in closed form.
`head_loss.py` calls them chunk by chunk. Every gradient here is scale * q + (a correction on p's support), so
a sparse target never costs a pass over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Some rows of a chunk on the support of p, which has S entries. p, q, log_q: [rows, S] fp32; alpha:
    [rows] is sum min(p, q).
    """

    p: Tensor
    q: Tensor
    log_q: Tensor
    alpha: Tensor


@dataclass(frozen=True)
class RowLoss:
    """values: [rows]. Gradient with respect to the logits: scale [rows] * q (None means 1), plus correction
    [rows, S] on p's support.
    """

    values: Tensor
    scale: Tensor | None
    correction: Tensor


def cross_entropy(rows: Rows) -> RowLoss:
    """Soft cross-entropy, forward KL up to the target's entropy: gradient q - p."""
    return RowLoss(-torch.linalg.vecdot(rows.p, rows.log_q), None, -rows.p)


def negative_log_overlap(rows: Rows) -> RowLoss:
    """LK alpha (LK losses, arXiv 2602.23881): -log sum min(p, q), the chance that a sampled draft token is accepted."""
    alpha = rows.alpha.clamp_min(torch.finfo(torch.float32).tiny)
    below = rows.q * (rows.q < rows.p)  # d alpha / d z_j = below_j - q_j sum(below)
    return RowLoss(-alpha.log(), below.sum(-1) / alpha, -below / alpha[:, None])


def overlap_mix(rows: Rows) -> RowLoss:
    """LK lambda (the hybrid of arXiv 2602.23881): lambda CE + (1 - lambda) (1 - alpha), lambda = exp(-3 alpha)
    held constant: CE far away, total variation near.
    """
    mix = (-3 * rows.alpha).exp()
    below = rows.q * (rows.q < rows.p)
    values = -mix * torch.linalg.vecdot(rows.p, rows.log_q) + (1 - mix) * (1 - rows.alpha)
    return RowLoss(
        values, mix + (1 - mix) * below.sum(-1), -mix[:, None] * rows.p - (1 - mix)[:, None] * below
    )


def expected_acceptance(alpha: Tensor) -> Tensor:
    """Weights [C, N] under which -log alpha has the gradient of -E[accepted] = -sum_k prod_{j<=k} alpha_j
    (section 5).

    alpha: [C, N], 0 where a step is not scored. d/d(log alpha_j) of the sum is the survival from j on. On cross-entropy
    they are D-PACE's weights (arXiv 2605.18810: a position's share in the gradient of the expected accepted length),
    with the overlap as the chance of acceptance.
    """
    return alpha.cumprod(1).flip(1).cumsum(1).flip(1)


@dataclass(frozen=True)
class Loss:
    """rows: the loss of one row. chains: where the steps of a chain weigh each other, row scores alpha [C, N]
    -> weights [C, N].

    With `chains` the step weights come from the chain itself, and the loss is divided by chains; without,
    each step by its labels.
    """

    rows: Callable[[Rows], RowLoss]
    chains: Callable[[Tensor], Tensor] | None = None


LOSSES: dict[str, Loss] = {
    "ce": Loss(cross_entropy),
    "lk-alpha": Loss(negative_log_overlap),
    "lk-lambda": Loss(overlap_mix),
    "acceptance": Loss(negative_log_overlap, expected_acceptance),
    "d-pace": Loss(cross_entropy, expected_acceptance),
}
