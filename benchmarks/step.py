"""Seconds of one training step of fzero and of its peers, side by side.

    python benchmarks/step.py                                            # ddp, fsdp2, fzero-3 and the floor, size S
    python benchmarks/step.py --size M --contenders fzero-1,fzero-2,fzero-3,ddp,fsdp2,deepspeed-3,floor
    python benchmarks/step.py --size M --contenders all --ranks 4 --json benchmarks/results/step.json

All contenders of this environment live in the same processes, those of another in processes beside them, and all take
turns, so that a slow minute of the machine hits all alike. Each starts from the same weights and data, and the losses
of those that train must agree at every step, or the run fails.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import flags
import torch
from contenders import CONTENDERS, TRAINING, able
from launch import run
from machine import machine
from quartiles import Quartiles, quartiles
from runs import SIZES, Plan

Results = dict[str, dict[str, Any]]

CONTESTANTS = "ddp,fsdp2,fzero-3,floor"
STEPS = {"tiny": 3, "S": 10}  # 3 for larger sizes
TOLERANCE = {False: 1e-3, True: 3e-2}
"""Greatest relative difference of two losses, without and with bf16: rounding, grown by the steps before."""


class Row(NamedTuple):
    """What a contender's steps cost on rank 0; `ratio` is to FSDP2's median, or to that of who is first."""

    milliseconds: Quartiles
    ratio: float
    difference: float | None  # greatest relative one of its losses; None where it does not train as the others do


def main(given: argparse.Namespace) -> None:
    """Measures, prints the table and writes the record; fails when the losses disagree."""
    plan = plan_of(given)
    results = run(plan, given.ranks, given.timeout)
    rows = summary(results)
    print(table(plan, given.ranks, rows))
    record = plan.record() | {"ranks": given.ranks} | machine()
    record |= {"summary": {name: row._asdict() for name, row in rows.items()}, "results": results}
    flags.write(given.json, record)
    check(rows, TOLERANCE[plan.bf16])


def plan_of(given: argparse.Namespace) -> Plan:
    """The timed run that the flags ask for."""
    names = [*TRAINING, "floor"] if given.contenders == "all" else given.contenders.split(",")
    steps = given.steps or STEPS.get(given.size, 3)
    return Plan(able(tuple(names), given.device), given.size, "time", given.rounds, steps, given.device, given.bf16)


def summary(results: Results) -> dict[str, Row]:
    """A row for each contender."""
    times = {name: quartiles(milliseconds(result)) for name, result in results.items()}
    base = times.get("fsdp2", next(iter(times.values()))).median
    differences = loss_differences(results)
    return {name: Row(time, time.median / base, differences.get(name)) for name, time in times.items()}


def milliseconds(result: dict[str, Any]) -> list[float]:
    """Of every step."""
    return [1000 * seconds for turn in result["seconds"] for seconds in turn]


def loss_differences(results: Results) -> dict[str, float]:
    """Contender that trains -> greatest relative difference of its losses to those of the first of them, at a step."""
    losses = {name: torch.tensor(result["losses"]) for name, result in results.items() if name in TRAINING}
    first = next(iter(losses.values()), torch.tensor([]))
    return {name: ((own - first).abs() / first.abs()).max().item() for name, own in losses.items()}


def check(rows: dict[str, Row], tolerance: float) -> None:
    """Exit with an error where losses differ by more than the tolerance, or are not numbers."""
    apart = [name for name, row in rows.items() if row.difference is not None and not row.difference <= tolerance]
    if apart:
        sys.exit(f"losses of {', '.join(apart)} differ by more than {tolerance:.1e}: they did not train alike")


def table(plan: Plan, ranks: int, rows: dict[str, Row]) -> str:
    """What is compared, and a line for each contender."""
    precision = "bf16" if plan.bf16 else "fp32"
    head = f"{'':<20}{'ms a step':>11}{'quartiles':>20}{'ratio':>8}{'losses apart':>15}"
    title = f"size {plan.size}: {SIZES[plan.size]}, {precision}, {ranks} rank(s) on {plan.device}"
    return "\n".join([title, head, *(line(name, row) for name, row in rows.items())])


def line(name: str, row: Row) -> str:
    """One line of the table."""
    low, median, high = row.milliseconds
    spread = f"{low:.1f} - {high:.1f}"
    apart = "-" if row.difference is None else f"{row.difference:.1e}"
    return f"{name:<20}{median:>11.1f}{spread:>20}{row.ratio:>8.2f}{apart:>15}"


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = flags.parser(__doc__)
    parser.add_argument("--contenders", default=CONTESTANTS, help=f"all, or some of {','.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender")
    parser.add_argument("--steps", type=int, help="steps a turn (10 for S, 3 for larger ones)")
    return flags.parsed(parser)


if __name__ == "__main__":
    main(parse())
