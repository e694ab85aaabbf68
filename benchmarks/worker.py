"""One rank of a comparison. `launch.py` starts it under torchrun with a plan to read, a file for rank 0 to write and
the port of the store that says whose turn it is."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import matrix
import torch
import torch.distributed as dist
from contenders import set_up_of
from counting import count
from gpt import GPT, GPTConfig
from measure import growth, nbytes
from profiled import shares
from runs import SIZES, Plan
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training import Batch, Contender
from turns import Turns

WARM_UP_STEPS = 2
STUCK = timedelta(minutes=3)
"""A collective that takes longer than this ends the run."""


def main(plan: Plan, out: Path, turns: Turns) -> None:
    """Writes what the plan's meter shows for each of its contenders that is here."""
    mesh, device = start(plan)
    result = measure(plan, mesh, device, turns)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    gc.collect()  # NCCL waits for the end of CUDA graphs, so no contender is alive here
    dist.barrier()
    dist.destroy_process_group()


def measure(plan: Plan, mesh: DeviceMesh, device: torch.device, turns: Turns) -> dict[str, Any]:
    """For each contender that is here, what the plan's meter shows."""
    rate = matrix.rate(mesh, plan.bf16) if plan.meter == "gpu" else 0.0
    batch = make_batch(plan, device)
    contenders = {name: set_up(name, plan, mesh, device) for name in plan.here}
    for contender in contenders.values():
        for _ in range(WARM_UP_STEPS):
            contender.step(batch)
    if plan.meter == "time":
        return clock(contenders, plan, batch, turns)
    if plan.meter == "comm":
        return {name: count(contender, plan, batch, mesh) for name, contender in contenders.items()}
    meter = {"memory": weigh, "gpu": time_and_weigh, "budget": predict, "trace": profile_to_file}.get(
        plan.meter, shares
    )
    found = {name: meter(contender, plan, batch) for name, contender in contenders.items()}
    return {name: {**result, "matrix": rate} for name, result in found.items()} if rate else found


def start(plan: Plan) -> tuple[DeviceMesh, torch.device]:
    """The mesh of all ranks and this rank's device. Makes the process group."""
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", 0 if plan.one_gpu else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if plan.one_gpu:
        os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"  # NCCL refuses two ranks of one host on one GPU
    dist.init_process_group("nccl" if plan.device == "cuda" else "gloo", timeout=STUCK)
    return init_device_mesh(plan.device, (dist.get_world_size(),), mesh_dim_names=("fsdp",)), device


def make_batch(plan: Plan, device: torch.device) -> Batch:
    """The batch of this rank: random tokens, the same for every contender and every step."""
    size, generator = SIZES[plan.size], torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(size.vocab, (size.batch, size.seq + 1), generator=generator).to(device)
    return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def set_up(name: str, plan: Plan, mesh: DeviceMesh, device: torch.device) -> Contender:
    """The contender, from the same initial weights as all others."""
    layers, dim, seq, _, vocab = astuple(SIZES[plan.size])
    config = GPTConfig(vocab=vocab, seq=seq, dim=dim, layers=layers, heads=dim // 64)

    def build() -> nn.Module:
        torch.manual_seed(0)
        with device:
            return GPT(config)

    return set_up_of(name)(build, mesh, plan.bf16)


def clock(contenders: dict[str, Contender], plan: Plan, batch: Batch, turns: Turns) -> dict[str, Any]:
    """For each contender, seconds [rounds][steps] on rank 0 and losses [rounds * steps], the mean over ranks."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}
    turns.ready(contenders, plan.contenders)
    for number, name in enumerate(plan.turns):
        if name in contenders:
            turns.begin(number)
            turn = [timed_step(contenders[name], batch) for _ in range(plan.steps)]
            seconds[name].append([elapsed for elapsed, _ in turn])
            losses[name] += [mean(loss).item() for _, loss in turn]
            turns.end(number)
    return {name: {"seconds": seconds[name], "losses": losses[name]} for name in contenders}


def time_and_weigh(contender: Contender, plan: Plan, batch: Batch) -> dict[str, Any]:
    """Seconds and losses as of `clock`, then bytes as of `weigh`. `reserved` are the bytes that the allocator of a GPU
    has taken from it, those of CUDA graphs among them, which its peak leaves out; -1 elsewhere."""
    rounds = [[timed_step(contender, batch) for _ in range(plan.steps)] for _ in range(plan.rounds)]
    found = weigh(contender._replace(program=None), plan, batch)  # a prediction would trace once more
    reserved = torch.cuda.memory_reserved() if plan.device == "cuda" else -1
    seconds = [[elapsed for elapsed, _ in turn] for turn in rounds]
    losses = [mean(loss).item() for turn in rounds for _, loss in turn]
    return {"seconds": seconds, "losses": losses, **found, "reserved": reserved}


def predict(contender: Contender, plan: Plan, batch: Batch) -> dict[str, Any]:
    """What `time_and_weigh` does, and the bytes, the seconds and the remarks of the contender's program, -1 and None
    where there is none."""
    found = time_and_weigh(contender, plan, batch)
    if contender.program is None:
        return found | {"planned_seconds": None, "remarks": ()}
    program = contender.program(batch)
    planned = {"predicted": program.memory().peak, "planned_seconds": program.timeline().seconds}
    return found | planned | {"remarks": program.remarks}


def profile_to_file(contender: Contender, plan: Plan, batch: Batch) -> dict[str, Any]:
    """Writes a profile of the plan's steps to its file. The twenty operations that take longest."""
    key = "cuda_time_total" if plan.device == "cuda" else "cpu_time_total"
    with torch.profiler.profile() as profile:
        for _ in range(plan.steps):
            contender.step(batch)
        if plan.device == "cuda":
            torch.cuda.synchronize()
    profile.export_chrome_trace(plan.trace)
    return {"longest": profile.key_averages().table(sort_by=key, row_limit=20, max_name_column_width=60)}


def timed_step(contender: Contender, batch: Batch) -> tuple[float, Tensor]:
    """Seconds until the step is done on this rank's device, and its loss."""
    begin = time.perf_counter()
    loss = contender.step(batch)
    if loss.is_cuda:
        torch.cuda.synchronize(loss.device)
    return time.perf_counter() - begin, loss


def weigh(contender: Contender, plan: Plan, batch: Batch) -> dict[str, int]:
    """Peak tensor bytes of a step, bytes held between steps, and the peak that the contender predicted, on the rank
    that has most; -1 where this platform, or it, cannot tell."""

    def run() -> None:
        for _ in range(plan.steps):
            contender.step(batch)

    device = batch["inputs"].device
    predicted = contender.program(batch).memory().peak if contender.program else -1
    state = nbytes(tensors(device))
    grown = growth(run, device)
    most = torch.tensor([-1 if grown is None else state + grown, state, predicted], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return dict(zip(("peak", "state", "predicted"), most.tolist()))


def tensors(device: torch.device) -> list[Tensor]:
    """Every tensor on a device that Python knows in this process: no contender needs to tell what it holds."""
    gc.collect()
    plain = (Tensor, nn.Parameter)  # others wrap one of these, or are fake
    return [x for x in gc.get_objects() if type(x) in plain and x.device.type == device.type]


def mean(loss: Tensor) -> Tensor:
    """The mean over ranks."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


if __name__ == "__main__":
    main(Plan.read(Path(sys.argv[1])), Path(sys.argv[2]), Turns(int(sys.argv[3])))
