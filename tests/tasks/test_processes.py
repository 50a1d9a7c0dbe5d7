"""Workers: events arrive in order, failures carry the log, and nothing outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tasks.processes import WorkerError, device_lock, run_worker


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a worker module and return its name; it is importable by the child alone."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(body: str) -> str:
        header = "import json, os, subprocess, sys, time\nfrom tasks.processes import emit\n"
        header += "spec = json.load(open(sys.argv[1]))\n"
        (tmp_path / "some_worker.py").write_text(header + textwrap.dedent(body))
        return "some_worker"

    return write


def wait_until(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_events_arrive_in_order_and_the_spec_reaches_the_worker(tmp_path, worker):
    module = worker("for i in range(spec['count']): emit({'i': i})")
    events: list[dict] = []
    run_worker(module, {"count": 200}, folder=tmp_path / "run", on_event=events.append)
    assert events == [{"i": i} for i in range(200)]


def test_environment_is_laid_over_ours_and_temporary_files_go_with_the_worker(tmp_path, worker):
    module = worker("emit({'colour': os.environ['COLOUR'], 'tmp': os.environ['TMPDIR']})")
    events: list[dict] = []
    run_worker(module, {}, folder=tmp_path / "run", env={"COLOUR": "green"}, on_event=events.append)
    assert events[0]["colour"] == "green"
    assert not Path(events[0]["tmp"]).exists()


def test_a_failure_names_exit_code_log_and_last_lines(tmp_path, worker):
    module = worker("print('all was well'); raise RuntimeError('no such layer')")
    with pytest.raises(WorkerError) as caught:
        run_worker(module, {}, folder=tmp_path / "run")
    message = str(caught.value)
    assert "exited with code 1" in message
    assert "no such layer" in message
    assert str(tmp_path / "run" / "worker.log") in message


def test_a_timeout_is_a_worker_error(tmp_path, worker):
    module = worker("time.sleep(60)")
    with pytest.raises(WorkerError, match="took longer than 1 s"):
        run_worker(module, {}, folder=tmp_path / "run", timeout=1)


GRANDCHILDREN = """
    plain = subprocess.Popen(['sleep', '300'])
    own_session = subprocess.Popen(['sleep', '300'], start_new_session=True)
    emit({'pids': [os.getpid(), plain.pid, own_session.pid]})
    time.sleep(300)
"""


def test_an_exception_in_the_parent_ends_the_whole_family(tmp_path, worker):
    module = worker(GRANDCHILDREN)
    pids: list[int] = []

    def fail(event: dict) -> None:
        pids.extend(event["pids"])
        raise KeyError("parent is unhappy")

    with pytest.raises(KeyError):
        run_worker(module, {}, folder=tmp_path / "run", on_event=fail)
    assert len(pids) == 3
    assert not any(_running(pid) for pid in pids)


def test_a_killed_parent_takes_its_worker_and_grandchildren_along(tmp_path, worker):
    module = worker("""
        child = subprocess.Popen(['sleep', '300'])
        emit({'pids': [os.getpid(), child.pid]})
        time.sleep(300)
    """)
    pid_file = tmp_path / "pids"
    script = (
        "import sys; from pathlib import Path; from tasks.processes import run_worker\n"
        f"run_worker({module!r}, {{}}, folder=Path({str(tmp_path / 'run')!r}),\n"
        f"  on_event=lambda e: Path({str(pid_file)!r}).write_text(' '.join(map(str, e['pids']))))"
    )
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ["PYTHONPATH"]])}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        assert wait_until(lambda: pid_file.exists() and len(pid_file.read_text().split()) == 2)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        pids = [int(pid) for pid in pid_file.read_text().split()]
        assert wait_until(lambda: not any(_running(pid) for pid in pids))
    finally:
        parent.kill()


def test_the_device_is_held_by_one_at_a_time(tmp_path):
    lock = tmp_path / "device.lock"
    script = (
        "import sys, time; from pathlib import Path; from tasks.processes import device_lock\n"
        f"with device_lock(Path({str(lock)!r})): print('held', flush=True); time.sleep(300)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    holder = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        started = time.monotonic()
        threading_kill = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {holder.pid}"])
        with device_lock(lock):  # the kernel frees a dead holder's lock
            assert time.monotonic() - started > 0.4
        threading_kill.wait()
    finally:
        holder.kill()
        holder.wait()


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
