"""Fixtures that every test may use. Nothing here reaches the network, and nothing starts before it is asked
for.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before any library reads them: no test asks a model hub, and no library reports home.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

ROOT = Path(__file__).resolve().parent.parent
# The lock on the device lies here: tests of one session wait for each other, not for a build that runs beside
# them.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="draftline-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)

# `--import-mode=importlib` leaves sys.path alone; helpers such as tests/tiny_target.py are imported as
# tests.*
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real prompts and rows beside the repository; they are not part of it, so a clone may lack them."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real test data is not there: {folder}")
    return folder


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A server with a database of its own, one for the whole run: the client's event worker lives as long as its
    process and keeps the address of the first server that it meets.
    """
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield
