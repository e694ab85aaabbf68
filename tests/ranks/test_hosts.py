"""Ranks of two hosts, started by torchrun, train, agree and fail as ranks of one host do.

Two ranks are on one host and one on the other. This file is also the script of a rank: it writes what the rank found.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts import Host, two_hosts
from processes import can_read_memory, refusal
from programs import layers, training
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero import VirtualMesh, optim
from fzero.ranks.live import live
from fzero.ranks.transports import choose_transport

ROOT = Path(__file__).resolve().parents[2]
WORLD, LOST = 3, 2
STEPS = 3
X = torch.linspace(-1, 1, 30).view(6, 5)
"""The batch of all ranks, two rows a rank."""


def train(step: Any, place: Any, x: torch.Tensor) -> list[Any]:
    """The loss of each step on each rank, and the parameters at the end."""
    params = fzero.partition(layers(), place)
    state, losses = optim.adamw(0.1).init(params), []
    for _ in range(STEPS):
        params, state, loss = step(params, state, x)
        losses.append(loss.flatten().tolist())
    return [losses, [x.tolist() for x in fzero.tree.leaves(fzero.unpartition(params))]]


def find() -> dict[str, Any]:
    """What a rank finds, at last how it is told of the rank that is lost."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    on, rank, beside = live(mesh), dist.get_rank(), dist.new_group([0, 1])
    found: dict[str, Any] = {"transport": type(on.transports["fsdp"]).__name__}
    if rank != LOST:
        found["beside"] = type(choose_transport(beside, "cpu", on.members)).__name__
    step = fzero.shard(training(optim.adamw(0.1)), mesh)
    mine = X.chunk(WORLD)[rank]
    found["trained"] = train(step, mesh, mine)
    found["refused"] = refusal(lambda: train(step, mesh, mine[None] if rank == LOST else mine)).message
    if rank == LOST:
        os.kill(os.getpid(), signal.SIGKILL)
    return {**found, "lost": refusal(lambda: train(step, mesh, mine)).message}


def main(folder: Path) -> None:
    """One rank, which fails as its job does: torchrun waits for minutes where one host fails and the other does not."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of an agent that hears of the lost rank before this one does
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(find()))
    os._exit(1)


def start(host: Host, ranks: int, folder: Path) -> subprocess.Popen[str]:
    """torchrun on one of two hosts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", __file__, str(folder)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    same = {name: os.environ[name] for name in ("PATH", "MKL_CBWR") if name in os.environ}  # products of equal bits
    return host.start(command, {**same, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks 0 and 1 found."""
    folder = tmp_path_factory.mktemp("hosts")
    with two_hosts() as (one, other):
        agents = [start(one, 2, folder), start(other, 1, folder)]
        said = [agent.communicate(timeout=240)[0] for agent in agents]
    files = sorted(folder.iterdir())
    assert [path.stem for path in files] == ["0", "1"], "\n".join(said)[-8000:]
    return [json.loads(path.read_text()) for path in files]


def test_ranks_of_a_host_read_memory_and_those_of_two_send_messages(found: list[dict[str, Any]]) -> None:
    beside = "SameHost" if can_read_memory() else "PointToPoint"
    assert [(each["transport"], each["beside"]) for each in found] == 2 * [("PointToPoint", beside)]


def test_ranks_of_two_hosts_train_as_virtual_ranks_do(found: list[dict[str, Any]]) -> None:
    mesh = VirtualMesh(fsdp=WORLD)
    losses, weights = train(fzero.simulate(training(optim.adamw(0.1)), mesh), mesh, X)
    for each in found:
        assert each["trained"] == [losses, weights]


def test_ranks_of_two_hosts_agree(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "ranks 0, 1 have" in each["refused"] and "rank 2 has" in each["refused"], each["refused"]
        assert "[2, 5]" in each["refused"] and "[1, 2, 5]" in each["refused"]


def test_a_rank_that_dies_on_another_host_is_named(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["lost"].startswith("agreement before a step: rank 2 died or left; "), each["lost"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
