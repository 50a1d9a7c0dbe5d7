"""Calls to the kernel that make storage quick, and that Python lacks or makes with its own lock held.

In: a file, or mapped memory. Out: nothing but effects on the page cache; a system that knows no such call goes without.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

_SYNC_FILE_RANGE_WRITE = 2
_MADV_WILLNEED, _MADV_POPULATE_READ = 3, 22


def _function(name: str, *arguments: Any) -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = arguments
    return function


_sync_file_range = _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_madvise = _function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def start_writing(descriptor: int, start: int, count: int) -> None:
    """Have bytes that were written go to the disk now, without waiting: what is written next overlaps with it."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, start, count, _SYNC_FILE_RANGE_WRITE)


def read_ahead(memory: np.ndarray, start: int, end: int) -> None:
    """Have [start, end) of a mapped file read into the page cache, without waiting."""
    _advise(memory, start, end, _MADV_WILLNEED)


def populate(memory: np.ndarray, start: int, end: int) -> None:
    """Read and map [start, end) of a mapped file, so that touching it waits for nothing.

    Raises OSError where the disk cannot read it, or the file has become shorter: a touch would end the process (SIGBUS).
    """
    error = _advise(memory, start, end, _MADV_POPULATE_READ)
    if error in _UNREADABLE:
        raise OSError(error, "it cannot be read: a disk error, or it was cut while in use")


_UNREADABLE = {14, 133, 5}  # EFAULT, EHWPOISON, EIO. An older kernel says EINVAL, and the touch itself reads.


def _advise(memory: np.ndarray, start: int, end: int, advice: int) -> int:
    """Returns the error's number, or 0."""
    if _madvise is None:
        return 0
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    return ctypes.get_errno() if _madvise(memory.ctypes.data + first, end - first, advice) else 0
