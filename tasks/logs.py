"""Where what we say goes: short lines on the console, everything in a log file.

In: a name for the run. Out: `.run/logs/<name>-<time>.log` with full tracebacks, and a quiet console without
any.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

PACKAGES = ("flows", "tasks", "storage", "eagle3core")
FOLDER = Path(".run/logs")
KEPT_LOGS = 50


@contextmanager
def log_to_file(name: str, folder: Path = FOLDER) -> Iterator[Path]:
    """Inside: every record of this process also goes to a new file, tracebacks included. An error ends it
    there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in _logs(folder)[: -KEPT_LOGS + 1]:
        old.unlink(missing_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.log"
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s  %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)
    try:
        yield path
    except BaseException:
        # To this file alone: on the console the error is one line.
        record = logger.makeRecord(__name__, logging.ERROR, "", 0, "it ended with", (), sys.exc_info())
        handler.handle(record)
        raise
    finally:
        root.removeHandler(handler)
        handler.close()


def last_log_file(folder: Path = FOLDER) -> Path | None:
    """The newest log."""
    return next(reversed(_logs(folder)), None)


def quiet_console() -> None:
    """Make the console show our packages' lines and others' warnings, one line each, without tracebacks."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            root.removeHandler(handler)
    console = logging.StreamHandler()
    console.setFormatter(_OneLine(datefmt="%H:%M:%S"))
    console.addFilter(_worth_showing)
    root.addHandler(console)


class _OneLine(logging.Formatter):
    """Time, level where it is a warning or worse, message; a traceback is in the log file alone."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self.formatTime(record, self.datefmt)}  {level}{record.getMessage()}"


def _worth_showing(record: logging.LogRecord) -> bool:
    if record.name.split(".")[0] in PACKAGES:
        return record.levelno >= logging.INFO
    # Prefect reports every exception of a task, and again of its flow; the command prints it once.
    told_twice = record.name.startswith(("prefect.flow_runs", "prefect.task_runs"))
    return record.levelno >= logging.WARNING and not told_twice


def _logs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
