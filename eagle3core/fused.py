"""Layers that remember less: their GEMMs' input is made again in backward from what is kept anyway.

In: fp32 rows, and weights in the compute dtype. Out: the layer's result. An RMSNorm's or SwiGLU's output is
cheap to make and wide to keep; autograd would keep it for the weight's gradient. No GEMM is repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def norm_linear(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """x / rms(x), then linear: x [rows, H] fp32, weight [out, H] -> [rows, out] in weight's dtype.

    The norm's own weight belongs into `weight` (`fold_norm`): W (g * u) = (W * g) u.
    """
    return _NormLinear.apply(x, eps, weight)


def fold_norm(weight: Tensor, norm: nn.RMSNorm) -> Tensor:
    """weight [out, H] that takes the unit rows of `norm_linear` instead of `norm`'s output."""
    return weight * norm.weight


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """`norm(x)` for x [rows, H] fp32."""
    return _RmsNorm.apply(x, norm.weight, norm.eps)


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up, then linear: gate_up [rows, 2 I], gate first; weight [H, I] -> [rows, H]."""
    return _SwigluLinear.apply(gate_up, weight)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square of each row, [rows, 1] fp32."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def unit_backward(grad: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """Gradient of x from that of unit = x * scale, scale = inverse_rms(x) [rows, 1]; `grad` is overwritten.

    Exact with eps: d scale / d x = -scale**3 x / H, so dx = scale (grad - unit mean(grad * unit)).
    """
    pull = torch.linalg.vecdot(grad, unit).unsqueeze_(-1)
    return grad.addcmul_(unit, pull, value=-1 / unit.shape[-1]).mul_(scale)


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, weight: Tensor) -> Tensor:
        scale = inverse_rms(x, eps)
        ctx.save_for_backward(x, scale, weight)
        return F.linear((x * scale).to(weight.dtype), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        unit = x * scale
        grad_weight = grad.T @ unit.to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, None, grad_weight
        return unit_backward((grad @ weight).float(), unit, scale), None, grad_weight


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = inverse_rms(x, eps)
        ctx.save_for_backward(x, scale, weight)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        unit = x * scale
        return unit_backward(grad * weight, unit, scale), (grad * unit).sum(0), None


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
        pull = grad @ weight  # of silu * up
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(pull, silu, out=grad_up)
        grad_weight = grad.T @ silu.mul_(up)
        torch.ops.aten.silu_backward.grad_input(pull.mul_(up), gate, grad_input=grad_gate)
        return grad_gate_up, grad_weight
