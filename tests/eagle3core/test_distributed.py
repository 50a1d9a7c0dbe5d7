"""Several ranks do what one does: gloo on a CPU, DDP and FSDP2, gradients and whole runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from training_toys import make_trainer, weights

TOY = Path(__file__).parent / "training_toys.py"
SAME = {"anchor_share": 1.0, "epochs": 1}


def run_ranks(folder: Path, count: int = 2, **changes) -> None:
    meeting = folder.parent / f"{folder.name}.meeting"
    meeting.unlink(missing_ok=True)  # an earlier run's ranks wrote their addresses into it
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(TOY), str(folder), json.dumps(changes), str(rank), str(count), str(meeting)],
            cwd=TOY.parents[2],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_ranks_equal_one(tmp_path: Path, sharding: str) -> None:
    """Two ranks with two micro-batches each, one process with the same four."""
    one = make_trainer(tmp_path / "one", **SAME, accumulate=4)
    one._backward(one.feed.step(0))
    gradients = {name: p.grad.clone() for name, p in one.draft.named_parameters() if p.grad is not None}
    one.optimizer.zero_grad()
    result = one.run()
    folder = tmp_path / "two"
    run_ranks(folder, **SAME, accumulate=2, sharding=sharding)
    final = weights(one)
    for rank in range(2):
        theirs = torch.load(f"{folder}.gradients-{rank}", weights_only=True)
        assert theirs.keys() == gradients.keys()
        for name, value in gradients.items():
            torch.testing.assert_close(theirs[name], value, atol=1e-5, rtol=1e-4)
        for name, value in torch.load(f"{folder}.weights-{rank}", weights_only=True).items():
            torch.testing.assert_close(value, final[name], atol=1e-3, rtol=1e-3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["best_step"] == result.best_step
    assert lines[-1]["best_tau"] == pytest.approx(result.best_tau, abs=1e-3)
    assert (folder / "best/model.safetensors").exists()


@pytest.mark.slow
def test_sharded_checkpoint_is_whole(tmp_path: Path) -> None:
    """A run of two sharded ranks leaves a checkpoint of whole tensors, from which it goes on."""
    folder = tmp_path / "two"
    run_ranks(folder, **SAME, accumulate=2, sharding="fsdp")
    before = torch.load(f"{folder}.weights-0", weights_only=True)
    run_ranks(folder, **SAME, accumulate=2, sharding="fsdp")  # nothing left to do but to load
    after = torch.load(f"{folder}.weights-1", weights_only=True)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
