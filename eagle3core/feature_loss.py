"""A soft cross-entropy through a frozen head that both sides share: EAGLE-1's, over the target's whole vocabulary.

In: predicted and true states. Out: each row's loss, with the gradient of the predicted states alone. Rows go in chunks,
so that no batch's logits ever exist.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3core.head_loss import LOGITS_BYTES


def frozen_head_loss(
    predicted: Tensor, wanted: Tensor, head: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """predicted, wanted [n, H] fp32, head [V, H] -> (cross-entropy [n], hits bool[n], alpha [n]) of softmax(head predicted)
    against softmax(head wanted); hits and alpha as in `RowResults`. `dtype` is that of the GEMMs.
    """
    return _FrozenHead.apply(predicted, wanted, head, dtype)


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, predicted: Tensor, wanted: Tensor, head: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        weight, count = head.to(dtype), len(predicted)
        values, alpha, grads = predicted.new_empty(count), predicted.new_empty(count), torch.empty_like(predicted)
        hits = torch.empty(count, dtype=torch.bool, device=predicted.device)
        size = max(16, LOGITS_BYTES[predicted.device.type] // (4 * len(head)))
        for start in range(0, count, size):
            rows = slice(start, start + size)
            p = (wanted[rows].to(dtype) @ weight.T).float().softmax(-1)
            log_q = (predicted[rows].to(dtype) @ weight.T).float().log_softmax(-1)
            hits[rows] = log_q.gather(1, p.argmax(-1, keepdim=True))[:, 0] >= log_q.amax(-1)
            values[rows] = -torch.linalg.vecdot(p, log_q)
            q = log_q.exp_()
            alpha[rows] = torch.minimum(p, q).sum(-1)
            grads[rows] = (q.sub_(p).to(dtype) @ weight).float()
        ctx.save_for_backward(grads)
        ctx.mark_non_differentiable(hits, alpha)
        return values, hits, alpha

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grads,) = ctx.saved_tensors
        return grads * grad[:, None], None, None, None
