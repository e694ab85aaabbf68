"""Meshes: the mesh of all ranks, from torchrun's variables. Makes the process group where there is none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fzero.base.errors import FzeroError
from fzero.base.mesh import SHARD_AXIS

PORT = 29500
"""DeepSpeed's, and torchrun's, port of rank 0."""


def find_local_rank(args: Any) -> int:
    """The number of this process on its host: that of `args`, or torchrun's."""
    given = args.get("local_rank") if isinstance(args, Mapping) else getattr(args, "local_rank", None)
    return int(os.environ.get("LOCAL_RANK", 0)) if given is None or given < 0 else int(given)


def make_mesh(local_rank: int, port: int, required: bool | None) -> DeviceMesh:
    """The mesh of all ranks. Makes the process group where there is none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        if required is False:
            problem = "is False, and there is no process group"
            raise FzeroError("dist_init_required", problem, "call torch.distributed.init_process_group first")
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            host, at = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", port)
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(backend, init_method=f"tcp://{host}:{at}", rank=rank, world_size=world)
        else:
            dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)  # a free port
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=(SHARD_AXIS,))
