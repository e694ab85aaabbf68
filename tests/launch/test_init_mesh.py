"""Meshes of processes that start with the variables of a launcher, and without any."""

from __future__ import annotations

import multiprocessing
import os
import socket
from datetime import timedelta
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from processes import Refusal, refusal

from fzero import FzeroError, VirtualMesh
from fzero.base.mesh import mesh_shape
from fzero.launch import init_mesh
from fzero.launch.mesh import choose_device, choose_mesh, find_local_rank

SOON = timedelta(seconds=30)


def find_free_port() -> int:
    """One that SLURM's numbers lead to."""
    for port in range(10_000 + os.getpid() % 10_000, 30_000):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no port is free")


def make_variables(launcher: str, rank: int, port: int) -> dict[str, str]:
    """What a process of two on this host gets."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    match launcher:
        case "srun":
            return {
                "SLURM_JOB_ID": str(port - 10_000), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NODELIST": "nowhere", "SLURM_STEP_NODELIST": "nowhere",
            }  # fmt: skip
        case "mpirun":
            names = {"RANK": str(rank), "SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "2"}
            return address | {f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}
    return address | {"JOB_COMPLETION_INDEX": str(rank), "WORLD_SIZE": "2"}


def try_launchers(rank: int, ports: dict[str, int], said: Any) -> None:
    """What one process finds with each launcher, one after the other."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for launcher, port in ports.items():
        os.environ.clear()
        os.environ.update(make_variables(launcher, rank, port))
        few = refusal(lambda: init_mesh("fsdp=3"))
        mesh = init_mesh("tp=2,fsdp=*", timeout=SOON)
        numbers = torch.tensor([10.0 + rank])
        dist.all_reduce(numbers)
        again = init_mesh()  # in the process group that is there, as in a worker of Ray Train
        other = refusal(lambda: init_mesh("fsdp=4"))
        local = [find_local_rank()]
        os.environ.update(RANK=str(1 - rank), WORLD_SIZE="2", LOCAL_RANK="5")  # of a launcher that made another group
        local.append(find_local_rank())
        found[launcher] = few, mesh_shape(mesh), mesh.get_rank(), numbers.item(), mesh_shape(again), other, local
        dist.destroy_process_group()
    os.environ.clear()
    found["alone"] = mesh_shape(init_mesh(timeout=SOON)), dist.get_world_size()
    dist.destroy_process_group()
    said.send(found)


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    first = find_free_port()
    ports = {launcher: first + i for i, launcher in enumerate(("srun", "mpirun", "indexed"))}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(processes.IMPORTED)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    tasks = [context.Process(target=try_launchers, args=(i, ports, pipes[i][1]), daemon=True) for i in range(2)]
    for task, (_, theirs) in zip(tasks, pipes):
        task.start()
        theirs.close()
    try:
        return [ours.recv() for ours, _ in pipes]
    finally:
        for task in tasks:
            task.join(10.0)
            task.kill()


@pytest.mark.parametrize("launcher", ["srun", "mpirun", "indexed"])
def test_processes_meet_by_what_their_launcher_sets(on_ranks: list[dict[str, Any]], launcher: str) -> None:
    few: Refusal
    for rank, found in enumerate(on_ranks):
        few, mesh, number, total, again, other, local = found[launcher]
        assert (mesh, number, total) == (VirtualMesh(tp=2, fsdp=1), rank, 21.0) and again == VirtualMesh(fsdp=2)
        assert few.message.startswith("axes: is fsdp=3, and there are 2 ranks; write sizes that multiply to 2")
        assert other.message.startswith("axes: is fsdp=4, and there are 2 ranks")
        assert local == [None if launcher == "indexed" else rank, 5]


def test_a_process_without_a_launcher_is_alone(on_ranks: list[dict[str, Any]]) -> None:
    assert [found["alone"] for found in on_ranks] == [(VirtualMesh(fsdp=1), 1)] * 2


def test_axes_of_a_world() -> None:
    assert choose_mesh("axes", None, 8) == VirtualMesh(fsdp=8)
    assert choose_mesh("axes", "fsdp = *, tp=4", 32) == VirtualMesh(fsdp=8, tp=4)
    for axes, words in (
        ("fsdp=*,tp=4", "is fsdp=*,tp=4, and there are 6 ranks; write sizes that divide 6"),
        ("fsdp=2", "is fsdp=2, and there are 6 ranks; write sizes that multiply to 6, or start 2 processes"),
        ("fsdp=*,tp=*", "write axes and sizes"),
        ("fsdp", "write axes and sizes"),
    ):
        with pytest.raises(FzeroError) as error:
            choose_mesh("axes", axes, 6)
        assert words in str(error.value)


def test_the_gpu_of_a_process() -> None:
    assert [choose_device(*given, {}) for given in ((3, 8), (0, 1), (None, 1))] == [3, 0, 0]
    assert choose_device(3, 1, {"CUDA_VISIBLE_DEVICES": "3"}) == 0
    for local_rank, count, words in (
        (None, 8, "LOCAL_RANK: is not set, and this process sees 8 GPUs"),
        (8, 8, "this process: is number 8 on its host, and sees 8 GPUs; start at most 8"),
        (1, 1, "this process: is number 1 on its host, and sees 1 GPU; start at most 1 on a host, or show each"),
        (0, 0, "torch finds no GPU"),
    ):
        with pytest.raises(FzeroError) as error:
            choose_device(local_rank, count, {})
        assert words in str(error.value)
