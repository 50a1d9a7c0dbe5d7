"""AdamW with fp32 state, the learning rate as a pure function of the step, and gradient clipping.

In: parameters and a `TrainingConfig`'s numbers. Out: a torch optimizer; everything about the schedule can be
recomputed from the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

WSD_DECAY_SHARE = 0.2  # the last share of a warm-up, stable, decay run


def _constant(progress: float) -> float:
    return 1.0


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _wsd(progress: float) -> float:
    return min(1.0, (1 - progress) / WSD_DECAY_SHARE)


SCHEDULES: dict[str, Callable[[float], float]] = {"constant": _constant, "cosine": _cosine, "wsd": _wsd}


def learning_rate(step: int, total: int, peak: float, schedule: str, warmup_share: float) -> float:
    """Learning rate of optimizer step `step` (0-based) of `total`: a linear warm-up, then the schedule down
    to 0 after the last step.
    """
    warmup = round(warmup_share * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * SCHEDULES[schedule]((step - warmup) / max(1, total - warmup))


def make_optimizer(module: nn.Module, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """Fused AdamW over what is trained; norms and other vectors are never decayed."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def clip_gradients(parameters: Iterable[Tensor], largest: float) -> float:
    """Scale all gradients together so that their norm is at most `largest`; returns the norm before."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    # A DTensor's, of sharded parameters. Its class is not imported: that takes a second, and every command comes by here.
    value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if value > largest:
        torch._foreach_mul_(grads, largest / value)
    return value
