"""One holder at a time, across processes, freed by the kernel when its holder dies.

In: a path for the lock file. Out: a context in which this process alone holds it.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.errors import StorageError

logger = logging.getLogger(__name__)


@contextmanager
def file_lock(path: Path, what: str, wait: bool = True) -> Iterator[None]:
    """Hold `path` exclusively; the file is gone afterwards.

    Waits for another holder, saying once what it waits for; StorageError instead where `wait` is off.
    """
    descriptor = _acquire(path, what, wait)
    try:
        yield
    finally:
        # Unlinked while held: whoever waits on this inode sees below that the path is no longer it, and
        # tries again.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, what: str, wait: bool) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise StorageError(f"{what} is being made by another process") from None
                logger.info("waiting for another process that is making %s", what)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_still(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
