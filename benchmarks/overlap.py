"""How much communication a step of a GPT hides behind its compute where the wire needs no core of its own.

    python benchmarks/overlap.py --size M                      # one core, two ranks, a wire of 1.5 GB/s
    python benchmarks/overlap.py --size M --ranks 16 --wire 3e9 --trace trace.json

This process is one rank. What it computes is real; a collective takes as long as it would on a wire of the given speed,
one behind the other, as NCCL does them on a GPU or a network card beside the CPU, and gives what was gathered at first.
So ranks need no other cores, and seconds that the rank waits are seconds that communication is exposed. The table has
them as they were, beside what `program.timeline()` said before from rates that were measured in one step.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from fzero_steps import ADAMW, training_step
from runs import SIZES, Size
from torch import Tensor

import fzero
from fzero.execution.calibration import fit_rates, time_nodes
from fzero.execution.codegen import link
from fzero.layout.layout import Layout
from fzero.passes import defaults
from fzero.program.comm import Comm
from fzero.program.program import Program
from fzero.program.rates import Rates
from fzero.ranks.live import Live
from fzero.ranks.transports import Pending
from fzero.state.fill import copy_slices
from fzero.state.grouping import group_by_layout

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


class Wire:
    """The transport of one rank without others: each collective takes the seconds that `rates` say, one by one."""

    rank = 0

    def __init__(self, mesh: fzero.VirtualMesh, rates: Rates) -> None:
        self.mesh, self.rates, self.world = mesh, rates, mesh.size()
        self.free = self.waited = self.sent = 0.0
        self.known: dict[Any, Tensor] = {}  # what collectives gave at first, so that they cost no core

    def send(self, op: str, nbytes: int, result: Tensor) -> Pending:
        """Start a collective behind all that has been."""
        seconds = self.rates.communicate(Comm(op, self.mesh.shard_axis, None, torch.float32, nbytes), self.mesh)
        self.free = max(self.free, time.perf_counter()) + seconds
        self.sent += seconds
        return Pending(nullcontext(), [partial(self.idle, self.free)], lambda: result)

    def idle(self, until: float) -> None:
        """Wait. That a busy machine wakes this process later is no communication."""
        begin = time.perf_counter()
        if until > begin:
            self.waited += until - begin
            time.sleep(until - begin)

    def all_gather(self, block: Tensor, attempt: Any, into: Tensor | None = None) -> Pending:
        key = block.numel(), block.dtype
        if key not in self.known:
            self.known[key] = block.repeat(self.world)
        return self.send("all_gather", self.known[key].nbytes, self.known[key])

    def reduce_scatter(self, fulls: Any, wire: Any, attempt: Any) -> Pending:
        key = wire, fulls[0].dtype
        if key not in self.known:
            self.known[key] = torch.full((wire.stride,), 1e-3, dtype=fulls[0].dtype)
        return self.send("reduce_scatter", wire.sent * fulls[0].element_size(), self.known[key])

    def all_reduce(self, x: Tensor, op: str, attempt: Any) -> Tensor:
        return self.send("all_reduce", x.nbytes, x.clone()).wait()


class OneRank(Live):
    """The first rank of a mesh that has no others, on a `Wire`."""

    def __init__(self, mesh: fzero.VirtualMesh, rates: Rates) -> None:
        self.mesh, self.rank, self.number, self.wire = mesh, 0, 0, Wire(mesh, rates)

    def begin(self, exchange: Any) -> Pending:
        return exchange.start(self.wire, nullcontext())

    def settle(self) -> None:
        """Nobody reads this rank's memory."""


def traced(size: Size, ranks: int, clip: bool) -> Program:
    """The step of one rank before `split` and what follows it, made without memory for it."""
    config = GPTConfig(vocab=size.vocab, seq=size.seq, dim=size.dim, layers=size.layers, heads=size.dim // 64)
    params, apply = fzero.lower(GPT(config))
    optimizer = fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), ADAMW) if clip else ADAMW
    mesh = fzero.VirtualMesh(fsdp=ranks)
    params = fzero.partition(params, mesh)
    tokens = torch.zeros(size.batch * ranks, size.seq, dtype=torch.int64)
    step = fzero.simulate(training_step(apply, optimizer), mesh, passes=first())
    return step.trace(params, optimizer.init(params), {"inputs": tokens, "targets": tokens})


def first() -> tuple[Any, ...]:
    """The default passes as far as they do not look at rates."""
    passes = defaults(stage=3, in_place=True)
    return passes[: passes.index(fzero.passes.split)]


def scheduled(program: Program, rates: Rates) -> Program:
    """The program after the other default passes."""
    program = replace(program, measured=rates)
    for rewrite in defaults(stage=3, in_place=True)[len(first()) :]:
        program = rewrite(program)
    return program


def arguments(program: Program, vocab: int) -> list[Tensor]:
    """What the first rank calls a program with: small random numbers, slices of a bucket next to each other."""
    draw = torch.Generator().manual_seed(0)
    given: dict[int, Tensor] = {}
    places: dict[int, tuple[Layout, int]] = {}
    for i, (argument, node) in enumerate(zip(program.arguments, program.placeholders)):
        value = node.meta["val"]
        if not value.is_floating_point():
            given[i] = torch.randint(vocab if value.ndim else 1, value.shape, generator=draw)
        elif argument.bucket is not None:
            layout = program.layouts[argument.bucket]
            places[i] = layout, argument.leaf
            given[i] = 0.02 * torch.rand(layout.leaves[argument.leaf].shape, generator=draw)
    for layout, members in group_by_layout(places, {i: given[i].dtype for i in places}):
        placed = copy_slices({index: given[i] for i, index in members.items()}, layout, 0)
        given.update((i, placed[index]) for i, index in members.items())
    return [given[i] for i in sorted(given)]


def measured(program: Program, on: OneRank, tensors: list[Tensor], steps: int) -> tuple[float, float]:
    """Seconds of a step, the median of some, and the part of communication that was hidden in all of them."""
    run, seconds = link(program, on), []
    run(tensors)
    wire = on.wire
    wire.waited = wire.sent = 0.0
    for _ in range(steps):
        begin = time.perf_counter()
        run(tensors)
        seconds.append(time.perf_counter() - begin)
    return median(seconds), 1 - wire.waited / wire.sent if wire.sent else 1.0


def main(flags: argparse.Namespace) -> None:
    """Prints the table, and the timeline of the schedule that was measured."""
    torch.set_num_threads(1)
    size = SIZES[flags.size]
    program = traced(size, flags.ranks, flags.clip)
    wire_rates = program.rates._replace(wire=flags.wire, latency=flags.latency)
    on, tensors = OneRank(program.mesh, wire_rates), arguments(program, size.vocab)
    eager = scheduled(program, wire_rates)
    for _ in range(2):
        rates = fit_rates(eager, time_nodes(eager, on, tensors, lambda: None))
    print(f"size {flags.size}: {size}, rank 0 of {flags.ranks}, one core")
    print(f"measured: {rates}")
    later = scheduled(program, rates)
    seconds, hidden = measured(later, on, tensors, flags.steps)
    line = later.timeline()
    print(f"{'':<12}{'ms a step':>11}{'hidden':>9}")
    print(f"{'predicted':<12}{1000 * line.seconds:>11.1f}{line.hidden(*COLLECTIVES):>9.1%}")
    print(f"{'measured':<12}{1000 * seconds:>11.1f}{hidden:>9.1%}")
    print(line)
    if flags.trace:
        line.export_chrome_trace(flags.trace)


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="S")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--wire", type=float, default=1.5e9, help="bytes that a rank sends a second")
    parser.add_argument("--latency", type=float, default=1e-4, help="seconds a collective")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--clip", action="store_true", help="clip by the global norm")
    parser.add_argument("--trace", type=Path, help="a file for the predicted timeline")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
