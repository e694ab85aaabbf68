"""The ranks of an example: all processes that torchrun started, or one process alone."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def start() -> tuple[torch.device, DeviceMesh | None]:
    """This process's device and, under torchrun, the mesh of all ranks. Makes the process group."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if not dist.is_torchelastic_launched():
        return device, None
    return device, init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("fsdp",))


def finish(mesh: DeviceMesh | None) -> None:
    """Ends the process group once every rank is here: gloo aborts ranks whose peers leave early."""
    if mesh:
        dist.barrier()
        dist.destroy_process_group()


def run(main: Callable[[DeviceMesh, int], Any], *, steps: int) -> None:
    """Calls `main(mesh, steps)` on all ranks. A process alone is a mesh of one rank. `steps` is the default of the flag
    `--steps`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps)
    given = parser.parse_args()
    device, mesh = start()
    if mesh is None:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",))
    main(mesh, given.steps)
    finish(mesh)


def say(mesh: DeviceMesh, text: str) -> None:
    """Prints a line on rank 0."""
    if mesh.get_rank() == 0:
        print(text, flush=True)
