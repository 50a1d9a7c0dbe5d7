"""Where what we say goes: short lines on the console, everything in a log file.

In: a name for the run. Out: `.run/logs/<name>-<time>.log` with full tracebacks, and a quiet console without
any.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

PACKAGES = ("flows", "tasks", "storage", "eagle3core")
FOLDER = Path(".run/logs")
KEPT_LOGS = 50


def log_to_file(name: str, folder: Path = FOLDER) -> Path:
    """Send every record of this process to a new file as well, tracebacks included; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)[: -KEPT_LOGS + 1]:
        old.unlink(missing_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.log"
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s  %(message)s"))
    logging.getLogger().addHandler(handler)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)
    return path


def quiet_console() -> None:
    """Replace the root logger's console by one that shows our packages' lines, and others' warnings, without
    tracebacks.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            root.removeHandler(handler)
    console = logging.StreamHandler()
    console.setFormatter(_OneLine(datefmt="%H:%M:%S"))
    console.addFilter(_worth_showing)
    root.addHandler(console)


class _OneLine(logging.Formatter):
    """Time and message, the level where it is a warning or worse, never a traceback: the log file has that.
    """

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self.formatTime(record, self.datefmt)}  {level}{record.getMessage()}"


def _worth_showing(record: logging.LogRecord) -> bool:
    if record.name.split(".")[0] in PACKAGES:
        return record.levelno >= logging.INFO
    # Prefect reports every exception of a task and again of its flow; the command prints it once, as one
    # line.
    return record.levelno >= logging.WARNING and not record.name.startswith(
        ("prefect.flow_runs", "prefect.task_runs")
    )
