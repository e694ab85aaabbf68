"""torch's own ways to train on several ranks, and the floor under them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import Batch, Contender, Setup, adamw, loss_of


def ddp(build: Callable[[], nn.Module], mesh: DeviceMesh, bf16: bool) -> Contender:
    """`DistributedDataParallel`, whose gradients are views of its buckets: without, it holds them twice.

    It lets go of the views only when the next step begins: the buckets stay either way, and so a meter sees them.
    """
    return _loop(DistributedDataParallel(build(), gradient_as_bucket_view=True), bf16, early=True)


def fsdp2(build: Callable[[], nn.Module], mesh: DeviceMesh, bf16: bool, reshard: bool, compiled: bool) -> Contender:
    """`fully_shard`: a group for each block, resharded after forward or kept, and one for the rest.

    The rest keeps torch's default, which is to stay gathered: its head is used last in forward and first in backward.
    Blocks are compiled each by itself, as torchtitan does it.
    """
    model, policy = build(), MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    for block in model.get_submodule("blocks").children():
        if compiled:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _loop(model, autocast=False)


def floor(build: Callable[[], nn.Module], mesh: DeviceMesh, bf16: bool) -> Contender:
    """Every rank trains its own copy and none communicates: not a way to train, but a module's loop has no faster."""
    return _loop(build(), bf16)


CONTENDERS: dict[str, Setup] = {
    "ddp": ddp,
    "fsdp2": partial(fsdp2, reshard=True, compiled=False),
    "fsdp2-keep": partial(fsdp2, reshard=False, compiled=False),
    "fsdp2-compiled": partial(fsdp2, reshard=True, compiled=True),
    "fsdp2-keep-compiled": partial(fsdp2, reshard=False, compiled=True),
    "floor": floor,
}


def _loop(model: nn.Module, autocast: bool, early: bool = False) -> Contender:
    """The loop that everyone writes around a module, which drops gradients at its end, or `early` in the next step."""
    optimizer = adamw(model)

    def step(batch: Batch) -> Tensor:
        if early:
            optimizer.zero_grad()
        with torch.autocast(batch["inputs"].device.type, torch.bfloat16, enabled=autocast):
            loss = loss_of(model(batch["inputs"]), batch)
        loss.backward()
        optimizer.step()
        if not early:
            optimizer.zero_grad()
        return loss.detach()

    return Contender(step)
