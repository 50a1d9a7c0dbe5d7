"""Where a worker's spec, log and events lie while its stage runs.

In: an artifact's folder being written. Out: a folder inside it that is gone once the stage succeeded, and
kept, with the log in it, where the stage failed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = ".worker"


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    path = folder / NAME
    shutil.rmtree(path, ignore_errors=True)  # of a run that failed or was killed: what was on its way is made again
    path.mkdir(parents=True)
    yield path
    shutil.rmtree(path)
