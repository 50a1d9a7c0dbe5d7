"""What can go wrong with bytes on disk, each as one line that says what, where, and what to do.

In: an OSError or a checksum that does not agree. Out: StorageError, or DamagedPart that names the file.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StorageError(RuntimeError):
    """The store cannot do what was asked; the message is one line for the user."""


class DamagedPart(StorageError):
    """A file of an artifact is missing, cut short or altered. `path` is the file, `reason` what was seen."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(
            f"{path} is damaged: {reason}. `python -m storage.check STORE --repair` takes it out of its "
            "artifact; the next build makes that file again and keeps the others"
        )
        self.path = Path(path)
        self.reason = reason

    def __reduce__(self) -> tuple[type[DamagedPart], tuple[Path, str]]:
        return type(self), (self.path, self.reason)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space" (also over quota, or over the process's file-size limit) and read-only disks into
    StorageError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageError(
                f"disk full while writing {path} ({error.strerror}); finished parts are kept: free some "
                "space, or point store.uri somewhere else, and run the same command again"
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StorageError(
                f"cannot write {path}: {error.strerror}; choose a store.uri that is writable"
            ) from error
        raise
