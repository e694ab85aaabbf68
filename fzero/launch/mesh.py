"""The mesh of a run: the process group that its processes meet in, and a `DeviceMesh` of axes with names."""

from __future__ import annotations

import os
import re
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh, read_mesh
from fzero.launch.environment import Launch, Variables, find_launch

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that choose the GPUs which a process sees."""


@check_arguments
def init_mesh(axes: str | None = None, *, device: str | None = None, timeout: timedelta | None = None) -> DeviceMesh:
    """The mesh of all processes that a launcher started: torchrun, SLURM's srun, mpirun, Kubernetes or Ray Train.

        mesh = fzero.launch.init_mesh("fsdp=8,tp=4")
        mesh = fzero.launch.init_mesh("fsdp=*,tp=4")  # fsdp has as many ranks as there are
        mesh = fzero.launch.init_mesh()               # all ranks along "fsdp"

    The last axes vary first: put those that send most behind, so that their ranks are neighbours. A process without a
    launcher is a mesh of one rank. Makes torch's process group where there is none, and chooses the process's GPU.
    `device` is "cpu" or "cuda", by default "cuda" where torch finds one. `timeout` is that of the process group. All
    processes call it. At the end `torch.distributed.destroy_process_group()` frees the group.

    Raises:
        FzeroError: for axes whose sizes do not multiply to the number of processes, for what `find_launch` refuses, for
            a GPU that is not there, for processes that do not meet.
    """
    if device not in (None, "cpu", "cuda"):
        raise FzeroError("device", f"is {device!r}", 'give "cpu" or "cuda"')
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dist.is_initialized():  # as in a worker of Ray Train
        mesh, local_rank = choose_mesh("axes", axes, dist.get_world_size()), find_local_rank()
    else:
        launch = find_launch(os.environ)
        mesh, local_rank = choose_mesh("axes", axes, launch.world), launch.local_rank
    if device == "cuda":
        torch.cuda.set_device(choose_device(local_rank, torch.cuda.device_count(), os.environ))
    if not dist.is_initialized():
        join(launch, BACKENDS[device], timeout)
    return init_device_mesh(device, tuple(mesh.sizes.values()), mesh_dim_names=mesh.names)


def choose_mesh(where: str, axes: str | None, world: int) -> VirtualMesh:
    """The mesh of `axes`, of as many ranks as there are; without axes all ranks along "fsdp". One size may be "*".

    Raises:
        FzeroError: about `where`, for axes whose sizes do not multiply to `world`, and as `read_mesh`.
    """
    if axes is None:
        return VirtualMesh(fsdp=world)
    is_open = re.search(r"=\s*\*", axes) is not None
    given = read_mesh(where, re.sub(r"=\s*\*", "=1", axes, count=1))
    rest = world // given.size() if is_open else 1
    if rest * given.size() != world:
        problem = f"is {axes}, and there {'is 1 rank' if world == 1 else f'are {world} ranks'}"
        more = f"that divide {world}" if is_open else f"that multiply to {world}"
        raise FzeroError(where, problem, f"write sizes {more}, or start {given.size()} processes")
    return read_mesh(where, re.sub(r"=\s*\*", f"={rest}", axes))


def find_local_rank() -> int | None:
    """The number of this process on its host, in the process group that is there. The launcher says it where the group
    is that of the launcher. Another group, such as that of Ray Train within a task of SLURM, has LOCAL_RANK."""
    try:
        launch = find_launch(os.environ)
    except FzeroError:  # the variables are not those of this group, which needs none of them
        launch = None
    if launch is not None and (launch.rank, launch.world) == (dist.get_rank(), dist.get_world_size()):
        return launch.local_rank
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if local.isdecimal() else None


def choose_device(local_rank: int | None, count: int, variables: Variables) -> int:
    """The GPU of a process, of the `count` that it sees. A launcher may show each process its own alone, by one of
    VISIBLE among the `variables` of the process.

    Raises:
        FzeroError: where there is none, or where the number of the process on its host is unknown or too large.
    """
    if count == 0:
        raise FzeroError("device", "is 'cuda', and torch finds no GPU", 'give device="cpu"')
    if count == 1 and (local_rank is None or any(variables.get(name) for name in VISIBLE)):
        return 0
    if local_rank is None:
        problem = f"is not set, and this process sees {count} GPUs"
        raise FzeroError("LOCAL_RANK", problem, "give each process its number on its host, or show it one GPU")
    if local_rank >= count:
        problem = f"is number {local_rank} on its host, and sees {count} GPU{'s' * (count > 1)}"
        way_out = f"start at most {count} on a host, or show each process a GPU of its own by {VISIBLE[0]}"
        raise FzeroError("this process", problem, way_out)
    return local_rank


def join(launch: Launch, backend: str, timeout: timedelta | None = None) -> None:
    """Make torch's process group of all processes of a launch.

    Raises:
        FzeroError: where they do not meet.
    """
    host = f"[{launch.address}]" if ":" in launch.address else launch.address
    where = f"tcp://{host}:{launch.port}"
    try:
        dist.init_process_group(backend, where, timeout, launch.world, launch.rank)
    except (RuntimeError, ValueError) as error:
        problem = f"{launch.world} of {launch.launcher} do not meet at {host}:{launch.port}: {error}"
        way_out = "see that each host reaches this address, that the port is free, and that all of them start"
        raise FzeroError("the ranks", problem, way_out) from error
