"""Linear layers that remember less: their input is made again in backward from what is already kept.

In: fp32 rows and weights in the compute dtype. Out: the layer's result. An RMSNorm's or SwiGLU's output is
cheap to make and wide to keep; autograd would keep it for the weight's gradient. The GEMMs are never
repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """RMSNorm then linear: x [rows, H] fp32, norm [H], weight [out, H] -> [rows, out] in weight's dtype."""
    return _NormLinear.apply(x, norm, eps, weight)


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up, then linear: gate_up [rows, 2 I], gate first; weight [H, I] -> [rows, H]."""
    return _SwigluLinear.apply(gate_up, weight)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square of each row, [rows, 1] fp32."""
    return (
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square() / x.shape[-1] + eps
    ).rsqrt()


def norm_backward(grad: Tensor, x: Tensor, scale: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm's input [rows, H] and weight [H]. scale: [rows, 1], `inverse_rms(x)`; grad: [rows,
    H] fp32, overwritten.
    """
    unit = x * scale
    grad_norm = (grad * unit).sum(0)
    grad.mul_(norm)
    pull = torch.linalg.vecdot(grad, unit)[:, None] / x.shape[-1]
    return grad.addcmul_(unit, pull, value=-1).mul_(scale), grad_norm


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        scale = inverse_rms(x, eps)
        ctx.save_for_backward(x, norm, scale, weight)
        return F.linear((x * scale).mul_(norm).to(weight.dtype), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, scale, weight = ctx.saved_tensors
        grad_weight = grad.T @ (x * scale).mul_(norm).to(weight.dtype)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            return None, None, None, grad_weight
        grad_x, grad_norm = norm_backward((grad @ weight).float(), x, scale, norm)
        return grad_x if ctx.needs_input_grad[0] else None, grad_norm, None, grad_weight


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weight = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        silu = F.silu(gate)
        grad_weight = grad.T @ (silu * up)
        pull = grad @ weight  # of silu * up
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(pull, silu, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(pull.mul_(up), gate, grad_input=grad_gate)
        return grad_gate_up, grad_weight
