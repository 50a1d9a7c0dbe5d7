"""How many CUDA devices there are; without torch where there is no driver that one could be used through.

In: nothing. Out: a count. Importing torch takes seconds and 200 MB, and most stages need nothing else of it.
"""

from __future__ import annotations

import ctypes

DRIVERS = ("libcuda.so.1", "libamdhip64.so")


def cuda_devices() -> int:
    """Devices as torch counts them."""
    if not any(map(_loads, DRIVERS)):
        return 0
    import torch

    return torch.cuda.device_count()


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
