"""Hidden states in one byte a number, with a scale for every token and layer.

In: states of any float type. Out: codes and scales as they are stored; and back to bfloat16, for the trainer.
The scale is per token and layer because a few tokens' states are a thousand times larger than all others. Source
of e4m3: "FP8 Formats for Deep Learning" (arXiv 2209.05433).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

QuantisedDtype = Literal["fp8_e4m3", "int8"]
LARGEST: dict[str, float] = {"fp8_e4m3": 448.0, "int8": 127.0}


def quantise(states: Tensor, dtype: QuantisedDtype) -> tuple[Tensor, Tensor]:
    """States [rows, L, H] -> codes [rows, L * H], uint8 (e4m3's bits) or int8, and scales [rows, L] float32.

    A state is code * scale; the largest of a token and layer is met exactly. Raises ValueError where one is not finite.
    """
    states = states.float()
    largest = states.abs().amax(-1)
    if not largest.isfinite().all():
        raise ValueError(f"a hidden state is not finite: it cannot be stored as {dtype}; set features.dtype to bfloat16")
    scales = largest.clamp_min(torch.finfo(torch.float32).tiny * LARGEST[dtype]) / LARGEST[dtype]
    scaled = states / scales[..., None]
    if dtype == "int8":
        codes = scaled.round().to(torch.int8)
    else:
        codes = scaled.clamp(-LARGEST[dtype], LARGEST[dtype]).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(1), scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [rows, L * H], uint8 or int8, and scales [rows, L] -> states [rows, L * H] bfloat16."""
    values = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
    states = values.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    return states.flatten(1).bfloat16()
