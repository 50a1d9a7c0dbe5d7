"""SIGKILL in the middle of a stage, then the same command: it goes on, and ends as an unbroken build does.

In fp32 a state's last bits follow the batch it was computed in, and a resumed engine batches what is left:
the answers are the same token by token, and what is trained on the same features is the same bit by bit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from storage.artifacts import ArtifactStore
from tests.end_to_end.tiny import write_tiny_recipe

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240.0


@pytest.fixture(scope="module")
def environment(prefect_server: None) -> dict[str, str]:
    """What the commands need to find the tests' Prefect server from a folder that has no prefect.toml."""
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url
    return {**os.environ, "PREFECT_API_URL": url, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    changes = {"training.max_steps": 60, "training.checkpoint_every": 4, "responses.part_size": 4}
    return write_tiny_recipe(folder, **changes, **{"tracking.enabled": False})


def start(recipe: Path, environment: dict[str, str], store: Path, flow: str = "build-draft") -> subprocess.Popen:
    command = [sys.executable, "-m", "flows", flow, str(recipe), "--set", f"store.uri={store}"]
    return subprocess.Popen(command, cwd=recipe.parent, env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said


def kill_when(process: subprocess.Popen, ready: Callable[[], bool]) -> None:
    """SIGKILL the moment that `ready`; every child has to go by itself."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def parts(store: Path, kind: str) -> dict[str, bytes]:
    """Finished files of a kind, written or being written, by name."""
    found: Iterator[Path] = (store / kind).glob("*/part-*.parquet") if (store / kind).exists() else iter(())
    return {path.name: path.read_bytes() for path in found}


def whole_parts(store: Path) -> dict[str, tuple[bytes, bytes]]:
    """Responses and features of the parts that count: a part of which only the features are there is made again."""
    responses, features = parts(store, "responses"), parts(store, "features")
    return {name: (responses[name], features[name]) for name in responses.keys() & features.keys()}


def draft(store: Path) -> bytes:
    (ref,) = ArtifactStore(str(store)).list("draft")
    return (Path(ref.uri) / "draft/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(recipe: Path, environment: dict[str, str]) -> Path:
    store = recipe.parent / "uninterrupted"
    finish(start(recipe, environment, store))
    return store


@pytest.mark.slow
def test_killed_twice_while_answering_it_keeps_what_was_written_and_answers_the_rest(
    recipe: Path, environment: dict[str, str], uninterrupted: Path
):
    store = recipe.parent / "killed-in-responses"

    def answering() -> subprocess.Popen:
        return start(recipe, environment, store, "regenerate-data")

    kill_when(answering(), lambda: bool(parts(store, "features")))
    first = whole_parts(store)
    kill_when(answering(), lambda: whole_parts(store).keys() > first.keys())
    second = whole_parts(store)
    assert first.items() <= second.items()
    finish(answering())
    assert second.items() <= whole_parts(store).items()
    assert parts(store, "features").keys() == parts(uninterrupted, "features").keys()
    assert parts(store, "responses") == parts(uninterrupted, "responses")
    assert not list(store.glob("*/.partial-*"))


@pytest.mark.slow
def test_killed_while_training_it_ends_in_the_same_draft_bit_by_bit(
    recipe: Path, environment: dict[str, str], uninterrupted: Path
):
    store = recipe.parent / "killed-in-training"
    for kind in ("conversations", "responses", "features", "vocabulary"):
        shutil.copytree(uninterrupted / kind, store / kind)
    kill_when(
        start(recipe, environment, store),
        lambda: any((store / "draft").glob(".partial-*/training/checkpoint*/*")),
    )
    assert not ArtifactStore(str(store)).list("draft")
    finish(start(recipe, environment, store))
    assert draft(store) == draft(uninterrupted)
    assert not list(store.glob("*/.partial-*"))
