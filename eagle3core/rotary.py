"""Rotary position embedding as Llama has it: inverse frequencies (plain, linear, llama3) and the rotation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None = None) -> Tensor:
    """Angular frequency of each pair, [head_dim / 2] fp32. Raises ValueError for a scaling not known here."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if not scaling:
        return frequencies
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise ValueError(f"rope scaling {kind!r} is not known; known: default, linear, llama3")


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1's rule: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = context * frequencies / (2 * math.pi)  # full turns over the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling["factor"] + blend * frequencies


def cos_sin(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every row's angles, each [rows, 1, head_dim / 2]; the angle itself is fp32."""
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [rows, heads, head_dim], halves paired as Llama's checkpoints have them."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
