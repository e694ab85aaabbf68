"""Microbatches: what k of them cost, beside the sum of their parts.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/microbatches.py --size M

First the program: its nodes, the lines of its listing and the seconds to trace it, for 2 and for 64 microbatches. Then
time: a step of 4 microbatches, beside its parts: 4 steps that return the gradient of one, 4 that add it up, and one
that updates. Stage 3; each rank runs one thread. Steps take turns, and times are medians. The heap keeps its memory, so
that no step pays for pages that the allocator gave back to the system behind another one.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from fzero_steps import ADAMW
from machine import machine
from runs import SIZES
from torch import Tensor
from torch.nn.functional import cross_entropy

import fzero

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig

FEW, MANY, TURNS = 2, 64, 4
State = tuple[Any, Any]


def build(name: str) -> tuple[Any, Any]:
    """The model of a size, as `fzero.lower` returns it."""
    size = SIZES[name]
    config = GPTConfig(vocab=size.vocab, seq=size.seq, dim=size.dim, layers=size.layers, heads=size.dim // 64)
    torch.manual_seed(0)
    return fzero.lower(GPT(config))


def batch_of(name: str, microbatches: int) -> dict[str, Tensor]:
    """Random tokens of a rank, the size's batch in each microbatch."""
    size = SIZES[name]
    tokens = torch.randint(size.vocab, (microbatches * size.batch, size.seq + 1))
    return {"inputs": tokens[:, :-1].clone(), "targets": tokens[:, 1:].clone()}


class Steps:
    """The steps to compare: of k microbatches, of one gradient, of one update."""

    def __init__(self, apply: Any) -> None:
        self.apply = apply

    def sums(self, params: Any, batch: Any) -> tuple[Tensor, int]:
        """The summed loss, and the number of tokens."""
        logits = self.apply(params, batch["inputs"]).flatten(0, 1)
        return cross_entropy(logits, batch["targets"].flatten(), reduction="sum"), batch["targets"].numel()

    def accumulating(self, microbatches: int) -> Callable[..., Any]:
        """A training step of k microbatches."""

        def step(params: Any, state: Any, batch: Any) -> Any:
            loss, grads = fzero.accumulate(self.sums, microbatches)(params, batch)
            return (*self.update(params, state, grads), loss)

        return step

    def gradient(self, params: Any, batch: Any) -> Any:
        """The gradient of one microbatch."""
        return fzero.grad(lambda p: self.sums(p, batch)[0] / batch["targets"].numel())(params)

    def add(self, sums: Any, grads: Any) -> Any:
        """The gradients so far, and one more."""
        return fzero.optim.apply_updates(sums, grads)

    def update(self, params: Any, state: Any, grads: Any) -> State:
        """One step of AdamW."""
        updates, state = ADAMW.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state


def programs(name: str, ranks: int) -> dict[str, list[float]]:
    """For few and for many microbatches: nodes with those of the loop's body, lines, and seconds to trace."""
    params, apply = build(name)
    mesh = fzero.VirtualMesh(fsdp=ranks)
    params = fzero.partition(params, mesh)
    found: dict[str, list[float]] = {"nodes": [], "lines": [], "seconds": []}
    for microbatches in (FEW, MANY):
        given = {key: x.repeat(ranks, 1) for key, x in batch_of(name, microbatches).items()}
        step, seconds = fzero.simulate(Steps(apply).accumulating(microbatches), mesh), list[float]()
        for _ in range(3):
            start = time.perf_counter()
            program = step.trace(params, ADAMW.init(params), given)
            seconds.append(time.perf_counter() - start)
        inside = [
            len(node.args[0].graph.nodes) for node in program.graph.nodes if fzero.ops.is_call(node, fzero.ops.loop)
        ]
        found["nodes"].append(len(program.graph.nodes) + sum(inside))
        found["lines"].append(len(str(program).splitlines()))
        found["seconds"].append(median(seconds))
    return found


def times(name: str, mesh: Any, repeats: int) -> dict[str, float]:
    """Median seconds of a step of k microbatches, of a gradient, of adding it up, and of an update."""
    params, apply = build(name)
    steps = Steps(apply)
    params = fzero.partition(params, mesh)
    state = ADAMW.init(params)
    many, one = batch_of(name, TURNS), batch_of(name, 1)
    whole = fzero.shard(steps.accumulating(TURNS), mesh)
    gradient, add, update = (fzero.shard(step, mesh) for step in (steps.gradient, steps.add, steps.update))
    taken: dict[str, list[float]] = {"whole": [], "gradient": [], "add": [], "update": []}

    def clock(what: str, step: Callable[..., Any], *args: Any) -> Any:
        dist.barrier()
        start = time.perf_counter()
        result = step(*args)
        dist.barrier()
        taken[what].append(time.perf_counter() - start)
        return result

    for _ in range(repeats + 2):  # the first two trace and warm up
        params, state, _ = clock("whole", whole, params, state, many)
        sums = fzero.tree.map(torch.zeros_like, params)
        for _ in range(TURNS):
            grads = clock("gradient", gradient, params, one)
            sums = clock("add", add, sums, grads)
        params, state = clock("update", update, params, state, sums)
    return {what: median(seconds[2 * len(seconds) // (repeats + 2) :]) for what, seconds in taken.items()}


def keep_heap() -> None:
    """Let glibc keep all memory that is freed.

    Otherwise it returns the heap behind a step to the system, unless a value that is alive lies at its end: the
    gradients between two parts do, and nothing between two steps. A step of size M then maps 70 to 800 MB again, which
    takes up to 0.3 of its 6.5 seconds, and a part at most a seventh of that.
    """
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    if not (libc.mallopt(mmap_max, 0) and libc.mallopt(trim_threshold, 2**31 - 1)):
        raise OSError("mallopt refuses to keep the heap")


def main() -> None:
    """Prints both tables. Rank 0 writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="S")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    dist.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    seconds = times(flags.size, mesh, flags.repeats)
    if dist.get_rank() == 0:
        print(f"size {flags.size}: {SIZES[flags.size]}, {dist.get_world_size()} ranks")
        made = programs(flags.size, dist.get_world_size())
        print(f"{'microbatches':<14}" + "".join(f"{k:>10}" for k in (FEW, MANY)) + f"{'ratio':>8}")
        for what, (few, many) in made.items():
            print(f"{what:<14}{few:>10.4g}{many:>10.4g}{many / few:>8.2f}")
        parts = TURNS * (seconds["gradient"] + seconds["add"]) + seconds["update"]
        whole = seconds["whole"]
        print(f"{TURNS} microbatches {1000 * whole:.1f} ms, its parts {1000 * parts:.1f} ms, ratio {whole / parts:.3f}")
        if flags.json:
            flags.json.write_text(
                json.dumps({"size": flags.size, "programs": made, "seconds": seconds} | machine()) + "\n"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
