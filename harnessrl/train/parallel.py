"""One process or many: who we are, sharding the policy with FSDP2, and the few collectives the loop needs.

Started by torchrun, every rank runs the same loop; rank 0 owns the service, the engine and the run folder, plans the
updates and deals the packs. Started plainly, the world has size 1 and nothing here communicates.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")

PATIENCE = timedelta(days=1)
"""How long a collective waits: ranks wait for rank 0 to collect rollouts. Where a rank dies, torchrun ends the others."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among its peers."""

    rank: int = 0
    """0 leads."""
    size: int = 1
    """Processes that train together."""
    device: str = "cpu"
    """Where this process computes."""

    @property
    def leads(self) -> bool:
        """True on the rank that owns service, engine and record."""
        return self.rank == 0

    def deal(self, parts: Sequence[T] | None) -> T:
        """Give part r of rank 0's `parts` to rank r; the others pass None."""
        if self.size == 1:
            assert parts is not None
            return parts[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, list(parts) if parts is not None else None, src=0)
        return received[0]  # type: ignore[no-any-return]

    def gather(self, item: T) -> list[T]:
        """Every rank's item, by rank, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items


def _end_with(launcher: int) -> None:
    """End this rank when its launcher was killed: it would wait in a collective for as long as those may take."""
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)


@contextmanager
def world(*, dtype: torch.dtype = torch.float32) -> Iterator[World]:
    """Join the process group that torchrun describes in the environment, or be alone.

    With CUDA, tensors on a device go through NCCL and objects through gloo; that path has not been run yet.

    Args:
        dtype: what policies will compute in; one process needs a group of its own for another than float32 (`shard`).
    """
    size, local = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    if size > 1:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    cuda = torch.cuda.is_available()
    device = f"cuda:{local}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(local)
    if size == 1 and dtype == torch.float32:
        yield World(device=device)
        return
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE, **alone)
    try:
        yield World(rank=dist.get_rank(), size=size, device=device)
    finally:
        dist.destroy_process_group()


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks of a model: what its own class says must not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def recompute_blocks(model: nn.Module) -> None:
    """Keep only each block's input for the backward pass and compute its activations again there (before `shard`)."""
    for block in blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def shard(policy: nn.Module, model: nn.Module, here: World, *, dtype: torch.dtype = torch.float32) -> None:
    """Shard the policy's float32 parameters over all ranks, a unit a block and one for the rest.

    Alone in float32 there is nothing to do. In another type one process shards over itself, so that every number of
    ranks has the same arithmetic: a unit computes with a copy of its weights in that type, each pack's gradient is made
    in it, then cast to float32, summed over ranks and added to the packs before. Weights and optimizer stay in float32.

    Args:
        policy: the module whose forward is called.
        model: the transformers model inside it.
        dtype: what forward and backward compute in.
    """
    if here.size == 1 and dtype == torch.float32:
        return
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks(model):
        fully_shard(block, mp_policy=precision)
    fully_shard(policy, mp_policy=precision)


def whole(value: Tensor) -> Tensor:
    """A tensor in full on every rank; a collective where it is sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value
