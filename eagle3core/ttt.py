"""The training step's forward: a packed batch in, its loss and per-step figures out. `TrainingTimeTest` is
what trains, and is wrapped by DDP or FSDP.

In: `PackedBatch` and how many labels the whole optimizer step has. Out: `StepResult`, whose loss is ready for
`.backward()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eagle3core.head_loss import RowResults, ScoredRows, head_loss
from eagle3core.losses import LOSSES, Loss, RowLoss, Rows
from eagle3core.packing import PackedBatch
from eagle3core.unroll import Unroll, Unrolling


@dataclass(frozen=True)
class StepResult:
    """loss: scalar. labels, losses, hits, alpha: [N] sums over the scored rows of each TTT step, fp32,
    detached.
    """

    loss: Tensor
    labels: Tensor
    losses: Tensor
    hits: Tensor
    alpha: Tensor


class TrainingTimeTest(nn.Module):
    """The draft under training. Loss = sum over steps i of decay**i * (sum over labels) / counts[i]; with
    anchors, steps >= 1 over a share of the chains weigh 1 / share, which keeps the gradient unbiased.

    A loss that weighs a chain's own steps (`Loss.chains`) replaces decay**i / counts[i] by its weights /
    counts[0].
    """

    def __init__(
        self, draft: nn.Module, loss: str = "ce", step_decay: float = 0.8, unroll: Unrolling | None = None
    ) -> None:
        super().__init__()
        self.draft = draft
        self.loss: Loss = LOSSES[loss]
        self.step_decay = step_decay
        self.unroll = unroll or Unroll()

    def forward(self, batch: PackedBatch | None, counts: Tensor | None = None) -> StepResult:
        """counts: [N] labels of the whole optimizer step, every rank and micro-batch; default: this batch's
        own.

        No batch: a loss of 0 that reaches every parameter, for a rank that must still take part in the
        exchange of gradients.
        """
        if batch is None:
            return no_batch(self, len(counts))
        outputs = self.unroll(self.draft, batch)
        rows = ScoredRows.of(batch)
        weights = self._weights(batch, rows, outputs, batch.counts if counts is None else counts)
        total, results = self._head(outputs, batch, rows, weights, self.loss)
        return StepResult(total, *_per_step(rows, results, len(batch.steps)))

    def _head(
        self, outputs: Sequence[Tensor], batch: PackedBatch, rows: ScoredRows, weights: Tensor, loss: Loss
    ) -> tuple[Tensor, RowResults]:
        draft = self.draft
        return head_loss(
            outputs, draft.norm, draft.lm_head.weight, batch.teacher, rows, weights, loss, self.unroll.dtype
        )

    def _weights(self, batch: PackedBatch, rows: ScoredRows, outputs: Sequence[Tensor], counts: Tensor) -> Tensor:
        """Weight of every scored row, [n] fp32."""
        steps = torch.arange(len(batch.steps), dtype=torch.float64)
        share = torch.where(steps > 0, batch.anchor_share, 1.0)
        if self.loss.chains is None:
            return (
                (self.step_decay**steps / counts.clamp_min(1) / share).float().to(rows.step.device)[rows.step]
            )
        with torch.no_grad():
            _, results = self._head(
                outputs, batch, rows, torch.zeros_like(rows.step, dtype=torch.float32), Loss(_no_loss)
            )
        alpha = results.alpha.new_zeros(len(batch.chains), len(batch.steps))
        alpha[rows.chain, rows.step] = results.alpha
        by_step = (1 / counts[:1].clamp_min(1) / share).float().to(rows.step.device)
        return self.loss.chains(alpha)[rows.chain, rows.step] * by_step[rows.step]


def no_batch(module: nn.Module, steps: int) -> StepResult:
    """The result of no batch at all, whose loss of 0 reaches every trained parameter."""
    zero = sum(parameter.sum() * 0 for parameter in module.parameters() if parameter.requires_grad)
    return StepResult(zero, *torch.zeros(4, steps))


def _no_loss(rows: Rows) -> RowLoss:
    return RowLoss(torch.zeros_like(rows.alpha), None, rows.p)


def _per_step(rows: ScoredRows, results: RowResults, steps: int) -> tuple[Tensor, ...]:
    columns = (torch.ones_like(results.values), results.values, results.hits.float(), results.alpha)
    return tuple(column.new_zeros(steps).index_add_(0, rows.step, column) for column in columns)
