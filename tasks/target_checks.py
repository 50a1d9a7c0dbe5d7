"""Whether this machine can run a target at all, asked before anything runs.

In: a recipe and the size of the weights. Out: None, or one line that says what is missing.
"""

from __future__ import annotations

import psutil

from tasks.devices import cuda_devices
from tasks.recipe import Recipe

BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
# Above this a CPU takes days for what the recipes ask; recipes can insist with target.allow_cpu.
LARGEST_ON_CPU = 2_000_000_000
GIB = 1024**3


class TargetError(RuntimeError):
    """The target cannot be used; one line says what is wrong, where, and what to do."""


def memory_problem(recipe: Recipe, stored_bytes: int, stored_bits: int) -> str | None:
    """Say why the target does not fit this machine's devices, or None where it does.

    stored_bytes, stored_bits: the weight files' tensors as they lie on disk; the recipe's dtype may be wider.
    """
    model = recipe.target.model
    bits = BITS[recipe.target.dtype]
    # Quantised weights stay as they are; others are held in the recipe's dtype.
    needed = stored_bytes if stored_bits < 16 else stored_bytes * bits // stored_bits
    parameters = stored_bytes * 8 // stored_bits
    if devices := cuda_devices():
        import torch

        used = recipe.vllm.tensor_parallel
        if used > devices:
            return f"vllm.tensor_parallel is {used}, but this machine has {devices} CUDA device(s): lower it"
        room = min(torch.cuda.get_device_properties(i).total_memory for i in range(used)) * used
        room = int(room * recipe.vllm.memory_share)
        if needed * 1.1 > room:
            return (
                f"{model} needs about {needed * 1.1 / GIB:.0f} GiB of device memory for weights alone, "
                f"{used} device(s) "
                f"give {room / GIB:.0f} GiB: raise vllm.tensor_parallel, or take a larger device or a "
                f"smaller target"
            )
        return None
    if recipe.responses.engine == "http" and recipe.features.engine == "vllm" and parameters > LARGEST_ON_CPU:
        return (
            f"{model}: answers may come over HTTP, but its features are made on this machine, "
            "which has no CUDA device"
        )
    if parameters > LARGEST_ON_CPU and not recipe.target.allow_cpu:
        return (
            f"{model} has {parameters / 1e9:.1f} B parameters and this machine has no CUDA device: run "
            f"it where there "
            f"is a GPU with {needed * 1.2 / GIB:.0f} GiB or more, or set target.allow_cpu to wait for a "
            f"CPU (days)"
        )
    room = psutil.virtual_memory().total
    if needed * 1.5 > room:
        return (
            f"{model} needs about {needed * 1.5 / GIB:.0f} GiB of memory on a CPU and this machine has "
            f"{room / GIB:.0f} GiB: take a smaller target or a larger machine"
        )
    return None
