"""How long an engine will take, from measured rates: what a stage says before it starts.

In: a recipe, the target, token counts. Out: seconds.
"""

from __future__ import annotations

from pathlib import Path

from tasks.devices import cuda_devices
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe

# Start of one engine with its imports, measured on the 2-core machine (SmolLM2-135M, enforce_eager): 15-25 s.
START_SECONDS = 25.0
# Useful work per second of one engine. CPU core: 160 new tokens/s of 135M parameters at 64 in flight, two
# operations a parameter and token, less a third for captures and ragged ends. CUDA: an A100-class device at a
# tenth of its bf16 peak, which is an assumption until a GPU run replaces it.
CPU_CORE_FLOPS = 2.8e10
CUDA_FLOPS = 3e13
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def parameter_count(target: TargetInfo) -> float:
    """Parameters of the target, from its weight files as stored."""
    stored = sum(file.stat().st_size for file in Path(target.path).glob("*.safetensors"))
    dtype = target.config.get("dtype") or target.config.get("torch_dtype") or "bfloat16"
    return stored / BYTES.get(str(dtype), 2)


def engine_seconds(recipe: Recipe, target: TargetInfo, engines: int, tokens: float) -> float:
    """Seconds to start `engines` and run `tokens` (read or written) through them."""
    rate = CUDA_FLOPS * recipe.vllm.tensor_parallel if cuda_devices() else CPU_CORE_FLOPS
    return START_SECONDS + 2 * parameter_count(target) * tokens / (rate * engines)
