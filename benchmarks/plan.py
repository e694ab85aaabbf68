"""Seconds and memory to plan a training step of a GPT on ranks that are not there: to trace it, rewrite it by each
pass, and say what it keeps alive and what it communicates. And microseconds to recognize the arguments of a step.

    python benchmarks/plan.py                                            # 6 to 96 layers of width 12,288, 1,024 ranks
    python benchmarks/plan.py --layers 12 --ranks 8 1024 4096
    python benchmarks/plan.py --layers 96 --seconds 60 --gib 4           # exit status 1 beyond a limit
    python benchmarks/plan.py --scan                                     # the layers as a loop, with fzero.scan

Parameters are on the meta device. Each plan is made in a process of its own, whose peak RSS says what it needs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from fzero_steps import ADAMW, training_step
from machine import machine
from torch import Tensor
from torch.nn import functional

import fzero
from fzero.given import copy_aliases
from fzero.passes import defaults
from fzero.passes.run import Pass
from fzero.pipeline import Pipeline
from fzero.program.program import Program
from fzero.ranks.virtual import virtual
from fzero.returned import Returned

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, Block, GPTConfig

MIB, GIB = 1 << 20, 1 << 30
Row = dict[str, Any]


class Watch:
    """Seconds of each thing that is done, by its name, without those of things that are done in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within = 0.0

    def of(self, name: str, do: Callable[..., Any], *args: Any) -> Any:
        """What `do(*args)` returns."""
        self.seconds[name] = 0.0  # names stand in the order in which things begin
        start, before, self._within = time.perf_counter(), self._within, 0.0
        result = do(*args)
        taken = time.perf_counter() - start
        self.seconds[name] = taken - self._within
        self._within = before + taken
        return result


def scanned(config: GPTConfig) -> Callable[..., Any]:
    """`apply` of a GPT that scans its blocks."""
    block_apply = fzero.lower(Block(config))[1]

    def block(h: Tensor, _: None, p: Any) -> tuple[Tensor, None]:
        return block_apply(p, h), None

    def apply(p: Any, tokens: Tensor) -> Tensor:
        h = functional.embedding(tokens, p["wte"]["weight"]) + p["wpe"]["weight"][: tokens.shape[1]]
        h, _ = fzero.scan(block, h, layers=p["blocks"])
        h = functional.layer_norm(h, (config.dim,), p["norm"]["weight"], p["norm"]["bias"])
        return functional.linear(h, p["head"]["weight"])

    return apply


def arguments(layers: int, dim: int, ranks: int, scan: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step and what it is given on one rank: parameters, AdamW's state, and a batch of one."""
    config = GPTConfig(vocab=50257, seq=2048, dim=dim, layers=layers, heads=max(dim // 128, 1))
    with torch.device("meta"):
        params, apply = fzero.lower(GPT(config))
        tokens = torch.zeros(1, config.seq, dtype=torch.int64)
        apply = scanned(config) if scan else apply
    params = fzero.partition(params, fzero.VirtualMesh(fsdp=ranks))
    return training_step(apply), (params, ADAMW.init(params), {"inputs": tokens, "targets": tokens})


def plan(layers: int, dim: int, ranks: int, scan: bool) -> Row:
    """Seconds of each part, peak RSS before and after, and what was planned."""
    step, args = arguments(layers, dim, ranks, scan)
    watch, before, processor = Watch(), peak_rss(), time.process_time()

    def watched(rewrite: Pass) -> Pass:
        function = getattr(rewrite, "func", rewrite)

        @functools.wraps(function)  # a pass of fzero's own still: others are checked as they run
        def run(program: Program) -> Program:
            return watch.of(function.__name__, rewrite, program)

        return run

    passes = [*map(watched, defaults(stage=3, in_place=True))]
    pipeline: Pipeline[Program] = Pipeline(step, virtual(fzero.VirtualMesh(fsdp=ranks)), passes, lambda on, made: made)
    program = watch.of("trace", pipeline.program, args)
    memory = watch.of("memory", program.memory)
    comm = watch.of("comm", program.comm)
    return {
        "layers": layers, "dim": dim, "ranks": ranks,
        "seconds": watch.seconds, "processor": time.process_time() - processor, "rss": [before, peak_rss()],
        "numel": sum(leaf.numel() for leaf in fzero.tree.leaves(args[0])),
        "nodes": len(program.graph.nodes), "peak": memory.peak, "comm": sum(each.nbytes for each in comm),
    }  # fmt: skip


def peak_rss() -> int:
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def recognition(leaves: int, calls: int = 200) -> Row:
    """Median seconds of what a call does with the leaves of its arguments, all of them state, before it runs."""
    mesh = fzero.VirtualMesh(fsdp=8)
    state = fzero.partition({f"p{i:04}": torch.zeros(16) for i in range(leaves)}, mesh)
    pipeline = Pipeline(lambda state: (state,), virtual(mesh), (), lambda on, program: Returned(program, on))
    taken: dict[str, list[float]] = {}
    for _ in range(calls):
        watch = Watch()
        given, treedef = watch.of("flatten", fzero.tree.flatten, (state,))
        returned = watch.of("recognize", pipeline.prepare, given, treedef)
        tensors = watch.of("take", copy_aliases, given, range(leaves))
        (state,) = watch.of("return", returned, tensors)
        for name, seconds in watch.seconds.items():
            taken.setdefault(name, []).append(seconds)
    return {"leaves": leaves, "seconds": {name: statistics.median(each) for name, each in taken.items()}}


def apart(do: Callable[..., Row], *args: Any) -> Row:
    """What `do(*args)` returns in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(do, args)


def show(rows: list[Row]) -> None:
    """A table, a plan a column."""

    def line(name: str, form: str, values: Iterable[float]) -> None:
        print(f"{name:18}" + "".join(f"{value:{form}}" for value in values))

    line("layers", "9d", (row["layers"] for row in rows))
    line("ranks", "9,d", (row["ranks"] for row in rows))
    line("parameters, 1e9", "9.2f", (row["numel"] / 1e9 for row in rows))
    line("nodes", "9,d", (row["nodes"] for row in rows))
    for name in rows[0]["seconds"]:
        line(name, "9.3f", (row["seconds"][name] for row in rows))
    line("all, seconds", "9.3f", map(total, rows))
    line("of the processor", "9.3f", (row["processor"] for row in rows))
    line("RSS grown, MiB", "9.0f", (grown(row) / MIB for row in rows))
    line("peak of step, GiB", "9.2f", (row["peak"] / GIB for row in rows))


def total(row: Row) -> float:
    """Seconds of all that is planning."""
    return sum(row["seconds"].values())


def grown(row: Row) -> int:
    """Bytes of peak RSS that planning added."""
    before, after = row["rss"]
    return after - before


def main() -> int:
    """Prints the tables; 1 where a plan is beyond a limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, 24, 48, 96])
    parser.add_argument("--dim", type=int, default=12288)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024])
    parser.add_argument("--scan", action="store_true", help="the layers as a loop")
    parser.add_argument("--leaves", type=int, default=1000, help="of the arguments to recognize")
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit of a plan")
    parser.add_argument("--gib", type=float, default=math.inf, help="limit of what a plan adds to peak RSS")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [(layers, options.dim, ranks) for layers in options.layers for ranks in options.ranks]
    rows = [apart(plan, *case, options.scan) for case in cases]
    calls = apart(recognition, options.leaves)
    print(machine())
    show(rows)
    each = ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in calls["seconds"].items())
    print(f"{calls['leaves']} leaves of state, microseconds a call: {each}")
    if options.json:
        written = {"machine": machine(), "plans": rows, "recognition": calls}
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return int(any(total(row) > options.seconds or grown(row) > options.gib * GIB for row in rows))


if __name__ == "__main__":
    sys.exit(main())
