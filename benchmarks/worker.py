"""One rank of a benchmark. `step.py` starts it under torchrun with a plan to read and a file for rank 0 to write."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import CONTENDERS, Batch, Contender
from gpt import GPT, GPTConfig
from measure import measure, nbytes
from runs import SIZES, Plan
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WARM_UP_STEPS = 2
STUCK = timedelta(minutes=3)
"""A collective that takes longer than this ends the run."""


def main(plan: Plan, out: Path) -> None:
    """Writes what the plan's meter shows for each of its contenders."""
    mesh, device = start(plan)
    batch = make_batch(plan, device)
    contenders = {name: set_up(name, plan, mesh, device) for name in plan.contenders}
    for contender in contenders.values():
        for _ in range(WARM_UP_STEPS):
            contender.step(batch)
    meter = {"time": clock, "memory": weigh}[plan.meter]
    result = meter(contenders, plan, batch)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def start(plan: Plan) -> tuple[DeviceMesh, torch.device]:
    """The mesh of all ranks and this rank's device. Makes the process group."""
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if plan.device == "cuda" else "gloo", timeout=STUCK)
    return init_device_mesh(plan.device, (dist.get_world_size(),), mesh_dim_names=("fsdp",)), device


def make_batch(plan: Plan, device: torch.device) -> Batch:
    """The batch of this rank: random tokens, the same for every contender and every step."""
    size, generator = SIZES[plan.size], torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(size.vocab, (size.batch, size.seq + 1), generator=generator).to(device)
    return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def set_up(name: str, plan: Plan, mesh: DeviceMesh, device: torch.device) -> Contender:
    """The contender, from the same initial weights as all others."""
    size = SIZES[plan.size]
    torch.manual_seed(0)
    config = GPTConfig(vocab=size.vocab, seq=size.seq, dim=size.dim, layers=size.layers, heads=size.dim // 64)
    return CONTENDERS[name](GPT(config).to(device), mesh, plan.bf16)


def clock(contenders: dict[str, Contender], plan: Plan, batch: Batch) -> dict[str, Any]:
    """For each contender, seconds [rounds][steps] on rank 0 and losses [rounds * steps], the mean over ranks."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(plan.rounds):
        for name, contender in contenders.items():
            dist.barrier()
            turn = [timed_step(contender, batch) for _ in range(plan.steps)]
            seconds[name].append([elapsed for elapsed, _ in turn])
            losses[name] += [mean(loss).item() for _, loss in turn]
    return {name: {"seconds": seconds[name], "losses": losses[name]} for name in contenders}


def timed_step(contender: Contender, batch: Batch) -> tuple[float, Tensor]:
    """Seconds until the step is done on this rank's device, and its loss."""
    begin = time.perf_counter()
    loss = contender.step(batch)
    if loss.is_cuda:
        torch.cuda.synchronize(loss.device)
    return time.perf_counter() - begin, loss


def weigh(contenders: dict[str, Contender], plan: Plan, batch: Batch) -> dict[str, Any]:
    """For each contender, peak tensor bytes of a step and bytes of its state at rest, on the rank that has most."""
    return {name: weigh_one(contender, plan, batch) for name, contender in contenders.items()}


def weigh_one(contender: Contender, plan: Plan, batch: Batch) -> dict[str, int]:
    """As `weigh`, with the peak that the contender predicted; -1 where this platform, or it, cannot tell."""

    def run() -> None:
        for _ in range(plan.steps):
            contender.step(batch)

    device = batch["inputs"].device
    peak = measure(run, (contender.state(), batch), device).peak
    held = nbytes(contender.state())
    predicted = contender.predict(batch) if contender.predict else -1
    most = torch.tensor([-1 if peak is None else peak, held, predicted], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return dict(zip(("peak", "state", "predicted"), most.tolist()))


def mean(loss: Tensor) -> Tensor:
    """The mean over ranks."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


if __name__ == "__main__":
    main(Plan.read(Path(sys.argv[1])), Path(sys.argv[2]))
