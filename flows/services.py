"""The servers around the flows: the Prefect server, a worker, the two web pages. All of them on loopback.

`python -m flows.services server | up | ui | down | status`. Each is started once, found again by its record
under `.run/`, and ended by `down`; a port that somebody else holds is one clear line.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tasks.tracking import PAGE as MLFLOW_URL

RUN = Path(".run")
START_SECONDS = 120
STOP_SECONDS = 15


class ServiceError(RuntimeError):
    """A service that cannot be reached or started; the message says what to do."""


@dataclass(frozen=True)
class Running:
    """One background process of ours. `created` (seconds since the epoch) tells it from a later owner of its
    pid.
    """

    name: str
    pid: int
    created: float
    url: str

    def process(self) -> psutil.Process | None:
        """The living process, or None."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


def prefect_url() -> str:
    """The Prefect server's address (its page; the API is at /api), as prefect.toml or the environment gives
    it.
    """
    from prefect.settings import get_current_settings

    return (
        (get_current_settings().api.url or "http://127.0.0.1:4200/api").removesuffix("/").removesuffix("/api")
    )


def server_is_up() -> bool:
    """Whether a Prefect server answers at `prefect_url()`."""
    import httpx

    with suppress(httpx.HTTPError, ValueError):
        return httpx.get(f"{prefect_url()}/api/health", timeout=3).json() is True
    return False


def require_server() -> None:
    """Raises ServiceError, saying what to start, where no Prefect server answers."""
    if not server_is_up():
        raise ServiceError(
            f"no Prefect server answers at {prefect_url()}: start it with `make deploy` or `make up`"
        )


def start_server() -> str:
    """The Prefect server, started in the background where it is not up; returns its address."""
    url = prefect_url()
    if not server_is_up():
        address = urlsplit(url)
        if address.hostname not in {"127.0.0.1", "localhost"}:
            raise ServiceError(
                f"no Prefect server answers at {url}, and only one on this machine can be started here"
            )
        port = str(address.port or 4200)
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", port]
        _start("prefect", command, url, ready=server_is_up)
    return url


def start_worker() -> Path:
    """The process that runs deployments, in the background; returns its log."""
    _start("worker", [sys.executable, "-m", "flows.serve"], url="", ready=_worker_is_ready)
    return RUN / "worker.log"


def start_mlflow(tracking_uri: str, artifacts: str) -> str:
    """MLflow's page over the recipe's tracking store; returns its address. A server's own address is given
    back.
    """
    if tracking_uri.startswith("http"):
        return tracking_uri
    address = urlsplit(MLFLOW_URL)
    # Without the job runner and with one worker it is 2 processes and 500 MB; the defaults take 1.5 GB.
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", tracking_uri]
    command += [
        "--artifacts-destination",
        artifacts,
        "--host",
        "127.0.0.1",
        "--port",
        str(address.port),
        "--workers",
        "1",
    ]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    _start("mlflow", command, MLFLOW_URL, ready=lambda: _listening(MLFLOW_URL), environment=environment)
    return MLFLOW_URL


def status() -> list[Running]:
    """Every service of ours that is alive."""
    return [record for record in map(_read, ("prefect", "worker", "mlflow")) if record is not None]


def stop_all() -> list[str]:
    """End what `.run/` records, worker first; returns the names."""
    stopped = []
    for name in ("worker", "mlflow", "prefect"):
        record = _read(name)
        process = record.process() if record else None
        if record and process:
            family = [*process.children(recursive=True), process]
            # To the leader alone: the worker cancels the run it has and ends that run's processes itself.
            with suppress(psutil.Error):
                process.terminate()
            _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
            for survivor in alive:
                with suppress(psutil.Error):
                    survivor.kill()
            stopped.append(name)
        (RUN / f"{name}.json").unlink(missing_ok=True)
    return stopped


def _start(
    name: str,
    command: list[str],
    url: str,
    *,
    ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Start `command` in a session of its own, output to `.run/<name>.log`, and wait until it is ready."""
    if _read(name):
        return
    if url and _listening(url):
        raise ServiceError(
            f"port {urlsplit(url).port} is taken by another program, so {name} cannot start at {url}: "
            f"end that program{_port_hint(name)}"
        )
    RUN.mkdir(exist_ok=True)
    log = RUN / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "DO_NOT_TRACK": "true", **(environment or {})},
        )
    record = Running(name, process.pid, psutil.Process(process.pid).create_time(), url)
    (RUN / f"{name}.json").write_text(json.dumps(asdict(record)))
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None:
            (RUN / f"{name}.json").unlink(missing_ok=True)
            last = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
            raise ServiceError(f"{name} ended while starting ({last.strip()}); see {log}")
        if time.monotonic() > deadline:
            raise ServiceError(f"{name} was not ready after {START_SECONDS} s; see {log}")
        time.sleep(0.3)


def _read(name: str) -> Running | None:
    with suppress(FileNotFoundError, ValueError, TypeError):
        record = Running(**json.loads((RUN / f"{name}.json").read_text()))
        return record if record.process() else None
    return None


def _listening(url: str) -> bool:
    address = urlsplit(url)
    with (
        suppress(OSError),
        socket.create_connection((address.hostname or "127.0.0.1", address.port or 80), timeout=1),
    ):
        return True
    return False


def _worker_is_ready() -> bool:
    with suppress(OSError):
        return b"ready" in (RUN / "worker.log").read_bytes()
    return False


def _port_hint(name: str) -> str:
    if name == "prefect":
        return ", or choose another port in prefect.toml (api.url and server.api.port)"
    return ""


def main() -> int:
    """The command line; returns the exit code."""
    from tasks.recipe import RecipeError, load_recipe

    parser = argparse.ArgumentParser(prog="python -m flows.services", description=__doc__)
    parser.add_argument("command", choices=["server", "up", "ui", "down", "status"])
    parser.add_argument("--recipe", default="smollm2-135m", help="whose tracking store the MLflow page shows")
    arguments = parser.parse_args()
    try:
        if arguments.command == "down":
            print("stopped:", ", ".join(stop_all()) or "nothing was running")
        elif arguments.command == "status":
            for record in status():
                print(f"{record.name}: pid {record.pid}  {record.url}")
        else:
            print(f"Prefect  {start_server()}")
            if arguments.command != "server":
                tracking = load_recipe(arguments.recipe).tracking
                print(f"MLflow   {start_mlflow(tracking.uri, tracking.artifacts)}")
            if arguments.command == "up":
                print(f"worker   running, its log is {start_worker()}")
            print("`make down` ends them")
    except (ServiceError, RecipeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
