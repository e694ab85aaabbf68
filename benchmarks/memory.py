"""Bytes of tensors that a training step of fzero and of its peers needs at most, and those that fzero predicted.

    python benchmarks/memory.py                                          # ddp, fsdp2 and fzero's stages, size S
    python benchmarks/memory.py --size M --contenders all --json benchmarks/results/memory.json

Each contender has processes of its own, so that nothing of one can hide in the allocator of another, and is measured
over a few steady steps on the rank that needs most. `worker.py` and `examples/measure.py` say what is counted.
"""

from __future__ import annotations

import argparse
from typing import Any

import flags
from contenders import CONTENDERS, TRAINING, able
from launch import run_each
from machine import machine
from runs import SIZES, Plan

CONTESTANTS = "ddp,fsdp2,fzero-1,fzero-2,fzero-3"
MIB = 2**20

Weights = dict[str, dict[str, int]]


def main(given: argparse.Namespace) -> None:
    """Measures, prints the table and writes the record."""
    names = [*TRAINING, "floor"] if given.contenders == "all" else given.contenders.split(",")
    contenders = able(tuple(names), given.device)
    plan = Plan(contenders, given.size, "memory", 1, given.steps, given.device, given.bf16)
    weights = run_each(plan, given.ranks, given.timeout)
    print(table(plan, given.ranks, weights))
    flags.write(given.json, plan.record() | {"ranks": given.ranks, "results": weights} | machine())


def table(plan: Plan, ranks: int, weights: Weights) -> str:
    """What is compared, and a line for each contender; ratios are to FSDP2's peak, or to that of who is first."""
    precision = "bf16" if plan.bf16 else "fp32"
    title = f"size {plan.size}: {SIZES[plan.size]}, {precision}, {ranks} rank(s) on {plan.device}; MiB of tensors"
    head = f"{'':<20}{'peak':>10}{'ratio':>8}{'at rest':>10}{'predicted':>12}{'of peak':>10}"
    base = weights.get("fsdp2", next(iter(weights.values())))["peak"]
    return "\n".join([title, head, *(line(name, row, base) for name, row in weights.items())])


def line(name: str, row: dict[str, Any], base: int) -> str:
    """One line of the table; what cannot be told is a dash."""
    peak, state, predicted = (row[key] for key in ("peak", "state", "predicted"))
    ratio = f"{peak / base:.2f}" if peak >= 0 < base else "-"
    part = f"{predicted / peak:.3f}" if predicted >= 0 < peak else "-"
    cells = [f"{nbytes / MIB:.1f}" if nbytes >= 0 else "-" for nbytes in (peak, state, predicted)]
    return f"{name:<20}{cells[0]:>10}{ratio:>8}{cells[1]:>10}{cells[2]:>12}{part:>10}"


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = flags.parser(__doc__)
    parser.add_argument("--contenders", default=CONTESTANTS, help=f"all, or some of {','.join(CONTENDERS)}")
    parser.add_argument("--steps", type=int, default=4, help="to measure over")
    return flags.parsed(parser)


if __name__ == "__main__":
    main(parse())
