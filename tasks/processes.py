"""Child processes that die as a whole, and the lock on the device.

In: a module of ours and a JSON-able spec. Out: its events, one by one, as they come; WorkerError on failure.
An engine or a trainer starts children of its own: whatever happens to us (exception, SIGTERM, SIGKILL), none
of them may be left behind, and what they print must not block on a pipe that nobody reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

logger = logging.getLogger(__name__)

EVENTS_VARIABLE = "DRAFTLINE_EVENTS"
PARENT_VARIABLE = "DRAFTLINE_PARENT"
LOG_LINES = 15
POLL_SECONDS = 0.2
GRACE_SECONDS = 5.0
PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).resolve().parent.parent


class WorkerError(RuntimeError):
    """A worker that did not finish; the message has its last log lines and where the whole log is."""


class WorkerCancelled(WorkerError):
    """A worker that was ended because `cancelled` said so."""


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_worker(
    module: str,
    spec: Mapping[str, Any],
    *,
    folder: Path,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    timeout: float | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Run `module` as `__main__` with `<folder>/spec.json` as its one argument, to its end.

    The worker's output goes to `<folder>/worker.log`; `on_event` gets what it `emit`s, in order, on this
    thread. It lives in a session of its own, with a temporary folder of its own; the kernel ends it when this
    process dies; everything it started is ended before this function returns, on every way out.

    `python`: the interpreter; default: this one. `env`: laid over this process's environment. `timeout`:
    seconds for the whole run. `cancelled`: asked now and then; the worker is ended once it says so.
    Raises WorkerError (exit code not 0, timeout), WorkerCancelled, and what `on_event` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec_file, log_file, event_file = folder / "spec.json", folder / "worker.log", folder / "events.jsonl"
    spec_file.write_text(json.dumps(spec, indent=1))
    event_file.write_bytes(b"")
    deadline = None if timeout is None else time.monotonic() + timeout
    with (
        log_file.open("wb") as log,
        event_file.open("rb") as events,
        # Engines leave socket files behind when killed; the name is short: a socket's path holds 107 bytes.
        tempfile.TemporaryDirectory(prefix="worker-", ignore_cleanup_errors=True) as temporary,
    ):
        environment = {
            **os.environ,
            **(env or {}),
            "TMPDIR": temporary,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            EVENTS_VARIABLE: str(event_file),
            PARENT_VARIABLE: str(os.getpid()),
        }
        worker = subprocess.Popen(
            [python or sys.executable, "-m", __name__, module, str(spec_file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            while worker.poll() is None:
                _deliver(events, on_event)
                if deadline is not None and time.monotonic() > deadline:
                    raise WorkerError(_failure(module, f"took longer than {timeout:.0f} s", log_file))
                if cancelled():
                    raise WorkerCancelled(f"worker {module} was called off")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(POLL_SECONDS)
            _deliver(events, on_event)
        finally:
            end_session(worker)
    if worker.returncode:
        raise WorkerError(_failure(module, _exit_reason(worker.returncode), log_file))


def emit(event: Mapping[str, Any]) -> None:
    """Inside a worker: report one JSON-able event to the parent. Does nothing when run by hand.

    One line, one write: a worker that is killed leaves at most one torn line, which is never read.
    """
    path = os.environ.get(EVENTS_VARIABLE)
    if path:
        with open(path, "ab", buffering=0) as file:
            file.write(json.dumps(event).encode() + b"\n")


def end_session(worker: subprocess.Popen[bytes]) -> None:
    """End a worker that was started with `start_new_session` together with every process it started."""
    family = _family(worker.pid)
    for number, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        alive = [process for process in family if _alive(process)]
        if not alive and worker.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, number)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(patience)
        psutil.wait_procs(alive, timeout=patience)
        # Children that were born, or lost their parent, between the look and the signal.
        family = _family(worker.pid)


@contextlib.contextmanager
def device_lock(path: Path | None = None) -> Iterator[None]:
    """Hold the device alone: one flock per machine and user, which the kernel frees when the holder dies.

    `path`: the lock file; default: one in the user's runtime or temporary directory.
    """
    if path is None:
        base = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("TMPDIR") or "/tmp"
        path = Path(base) / f"draftline-device-{os.getuid()}.lock"
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for the device: another run of this user holds it (%s)", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start(module: str, spec_file: str) -> None:
    """Inside the child, before anything is imported: tie our life to the parent's, then become `module`.

    The kernel tells only us that the parent died, so SIGTERM here ends the whole process group, engines too.
    """
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(os.environ[PARENT_VARIABLE]):  # it died before the kernel was asked
        sys.exit(1)
    sys.argv = [module, spec_file]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _family(leader: int) -> list[psutil.Process]:
    """Every living process of the leader's session, and every descendant that made a session of its own."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(leader).children(recursive=True):
            found[child.pid] = child
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if process.pid != leader and os.getsid(process.pid) == leader:
                found[process.pid] = process
    return list(found.values())


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _deliver(events: Any, on_event: Callable[[dict[str, Any]], None]) -> None:
    """Hand over every whole line that is there; a torn one waits for its rest."""
    while True:
        start = events.tell()
        line = events.readline()
        if not line.endswith(b"\n"):
            events.seek(start)
            return
        on_event(json.loads(line))


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    hint = " (the kernel ran out of memory?)" if -code == signal.SIGKILL else ""
    return f"was ended by {names.get(-code, -code)}{hint}"


def _failure(module: str, reason: str, log_file: Path) -> str:
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    tail = "\n  ".join(lines[-LOG_LINES:])
    return f"worker {module} {reason}; whole log: {log_file}; its last lines:\n  {tail}"


if __name__ == "__main__":
    _start(*sys.argv[1:])
