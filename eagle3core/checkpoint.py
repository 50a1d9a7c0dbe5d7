"""Training state on disk: written under a temporary name and renamed last, so that a kill at any moment costs
nothing but steps.

In: model, optimizer and the run's position. Out: `step-NNNNNN/` with tensors.safetensors and state.json.
Nothing is pickled. The learning rate, the data order and every random draw are functions of (seed, step), so
the step is their whole state.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from eagle3core.distributed import Ranks, put, whole
from eagle3core.drafters.interface import Draft

MOMENTS = ("exp_avg", "exp_avg_sq")


class CheckpointError(ValueError):
    """A checkpoint that this run must not go on from; the message says what differs."""


@dataclass(frozen=True)
class Progress:
    """step: optimizer steps done. total_steps: of the whole run, fixed at its start. best_tau is 0 before the
    first evaluation.
    """

    step: int
    total_steps: int
    best_step: int = 0
    best_tau: float = 0.0


def save_checkpoint(
    folder: Path,
    draft: Draft,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    binding: Mapping[str, Any],
) -> Path | None:
    """Write `folder`/step-NNNNNN and drop the older ones. Every rank calls it (sharded tensors are gathered);
    the first one writes.

    `binding` is what a later run must have in common with this one.
    """
    tensors = {f"map.{name}": getattr(draft, name) for name in ("d2t", "t2d")}
    for name, parameter in _trained(draft):
        tensors[f"model.{name}"] = whole(parameter)
        state = optimizer.state[parameter]
        for moment in MOMENTS:
            tensors[f"{moment}.{name}"] = whole(state[moment])
        tensors[f"step.{name}"] = whole(state["step"])
    if not Ranks.current().first:
        return None
    final = folder / f"step-{progress.step:06d}"
    partial = folder / f".partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / "tensors.safetensors")
    (partial / "state.json").write_text(
        json.dumps({"progress": asdict(progress), "binding": dict(binding)}, indent=2)
    )
    for name in ("tensors.safetensors", "state.json"):
        _sync(partial / name)
    if final.exists():  # an earlier run of the same steps; its content is the same
        shutil.rmtree(final)
    os.replace(partial, final)
    _sync(folder)
    for other in [*folder.glob("step-*"), *folder.glob(".partial-*")]:
        if other != final:
            shutil.rmtree(other)
    return final


def load_checkpoint(
    folder: Path, draft: Draft, optimizer: torch.optim.Optimizer, binding: Mapping[str, Any]
) -> Progress | None:
    """Take up the newest checkpoint; None where there is none.

    Raises CheckpointError where the run that wrote it had another configuration, draft vocabulary or shape.
    """
    found = sorted(folder.glob("step-*"))
    if not found:
        return None
    newest = found[-1]
    state = json.loads((newest / "state.json").read_text())
    wanted = json.loads(json.dumps(dict(binding)))
    changed = sorted(
        key for key in wanted.keys() | state["binding"].keys() if wanted.get(key) != state["binding"].get(key)
    )
    if changed:
        theirs = ", ".join(f"{key} {state['binding'].get(key)!r} -> {wanted.get(key)!r}" for key in changed)
        raise CheckpointError(f"{newest} was written with other settings ({theirs}); start in a new folder")
    tensors = load_file(newest / "tensors.safetensors")
    for name in ("d2t", "t2d"):
        if not torch.equal(tensors[f"map.{name}"], getattr(draft, name).cpu()):
            raise CheckpointError(
                f"{newest} has another draft vocabulary ({name} differs); start in a new folder"
            )
    for name, parameter in _trained(draft):
        if f"model.{name}" not in tensors or tensors[f"model.{name}"].shape != parameter.shape:
            raise CheckpointError(f"{newest}: no tensor {name} of shape {tuple(parameter.shape)}")
        put(parameter, tensors[f"model.{name}"])
        state_of = {"step": tensors[f"step.{name}"].to(parameter.device)}
        for moment in MOMENTS:
            state_of[moment] = torch.zeros_like(parameter)
            put(state_of[moment], tensors[f"{moment}.{name}"])
        optimizer.state[parameter] = state_of
    return Progress(**state["progress"])


def read_progress(folder: Path) -> Progress | None:
    """Where the newest checkpoint stands, without its tensors; None where there is none."""
    found = sorted(folder.glob("step-*"))
    return Progress(**json.loads((found[-1] / "state.json").read_text())["progress"]) if found else None


def _trained(draft: Draft) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in draft.named_parameters() if parameter.requires_grad]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
