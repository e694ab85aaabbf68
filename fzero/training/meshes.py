"""Meshes: the mesh of all ranks and its process group, from torchrun's variables, and the arguments of a program."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.mesh import SHARD_AXES, SHARD_AXIS

PORT = 29500
"""DeepSpeed's, and torchrun's, port of rank 0."""


class StateSpread(NamedTuple):
    """How state is spread over ranks.

    `shard` neighbours hold all state, and other groups of these hold the same; None for one group of all ranks. Of a
    group `local` neighbours share a node, and state lies along two axes, "node" and "local"; None for one axis.
    """

    shard: int | None = None
    local: int | None = None


EVENLY = StateSpread()


def find_local_rank(args: Any) -> int:
    """The number of this process on its host: that of `args`, or torchrun's."""
    given = args.get("local_rank") if isinstance(args, Mapping) else getattr(args, "local_rank", None)
    return int(os.environ.get("LOCAL_RANK", 0)) if given is None or given < 0 else int(given)


def make_mesh(
    local_rank: int, port: int, required: bool | None, device: str | None = None, *, spread: StateSpread = EVENLY
) -> DeviceMesh:
    """The mesh of all ranks over which state is spread so: by default along one axis. Makes the process group where
    there is none. `device` is "cpu" or "cuda", by default "cuda" where torch finds it.

    Raises:
        FzeroError: as `split_world`.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    init_distributed(distributed_port=port, dist_init_required=required)
    sizes = split_world(dist.get_world_size(), spread)
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def split_world(world: int, spread: StateSpread) -> dict[str, int]:
    """The axes of a mesh of `world` ranks, over which state is spread so, and their sizes.

    Raises:
        FzeroError: where ranks are no groups of so many, or those of a group no nodes.
    """
    shard, local = world if spread.shard is None else spread.shard, spread.local
    for what, ranks, size in (("groups", world, shard), ("nodes", shard, 1 if local is None else local)):
        if size < 1 or ranks % size:
            problem = f"{ranks} ranks are no {what} of {size}"
            raise FzeroError("mesh", problem, f"give a number of ranks that divides {ranks}, or mesh=")
    along = {SHARD_AXIS: shard} if local is None else dict(zip(SHARD_AXES, (shard // local, local)))
    return along if spread.shard is None else {"replica": world // shard, **along}


@check_arguments
def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    *,
    dist_init_required: bool | None = None,
) -> None:
    """Make torch's process group where there is none, from torchrun's variables: DeepSpeed's function of that name. A
    process without these variables is alone. `auto_mpi_discovery` does nothing.

    Raises:
        FzeroError: with `dist_init_required=False`, where there is no process group.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        problem = "is False, and there is no process group"
        raise FzeroError("dist_init_required", problem, "call torch.distributed.init_process_group first")
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        host, at = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", distributed_port)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, init_method=f"tcp://{host}:{at}", rank=rank, world_size=world)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)  # a free port


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """A parser with the arguments --deepspeed and --deepspeed_config, which `initialize(args=)` reads."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="does nothing: it tells a program's own code")
    group.add_argument("--deepspeed_config", default=None, help="path of a JSON file")
    return parser
