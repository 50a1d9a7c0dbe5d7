"""More than one rank: DDP and FSDP2 as functions over an unchanged module, and the few collectives that
training needs.

In: a module, and the process group that `torchrun` describes. Out: the module wrapped. One process needs none
of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Ranks:
    """This process among all that train together."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """Of the process group, if there is one."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()

    @property
    def first(self) -> bool:
        return self.rank == 0


def wrap(module: nn.Module, sharding: str, device: torch.device) -> nn.Module:
    """`module` for several ranks ("ddp": replicated; "fsdp": parameters, gradients and optimizer state
    sharded); as it is for one.
    """
    if Ranks.current().count == 1:
        return module
    if sharding == "ddp":
        return DistributedDataParallel(
            module, device_ids=[device.index or 0] if device.type == "cuda" else None
        )
    mesh = dist.init_device_mesh(device.type, (Ranks.current().count,))
    return fully_shard(module, mesh=mesh)


def unwrap(module: nn.Module) -> nn.Module:
    """The module itself (FSDP2 shards in place, DDP holds it)."""
    return module.module if isinstance(module, DistributedDataParallel) else module


@contextmanager
def gradients_stay_local(module: nn.Module, local: bool) -> Iterator[None]:
    """While `local`, backward adds up gradients without exchanging them: all but the last micro-batch of a
    step.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(not local)
    with module.no_sync() if local and isinstance(module, DistributedDataParallel) else nullcontext():
        yield


@contextmanager
def whole_parameters(module: nn.Module) -> Iterator[None]:
    """Every parameter whole on every rank: for evaluation and export outside the wrapped forward. A
    collective.
    """
    if isinstance(module, FSDPModule):
        module.unshard()
    yield
    if isinstance(module, FSDPModule):
        module.reshard()


def sum_over_ranks(values: Tensor, device: torch.device) -> Tensor:
    """Sum of a small CPU tensor over all ranks, back on the CPU."""
    if not dist.is_initialized():
        return values
    total = values.to(device)
    dist.all_reduce(total)
    return total.cpu()


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor's full value, on the CPU. A collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


@torch.no_grad()
def put(into: Tensor, value: Tensor) -> None:
    """Copy a full value into a tensor that may be sharded."""
    value = value.to(into.device)
    if isinstance(into, DTensor):
        value = distribute_tensor(value, into.device_mesh, into.placements)
    into.copy_(value)
