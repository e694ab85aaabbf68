"""One training step of fzero (stage 3) and of FSDP2, side by side: seconds and peak tensor bytes.

    python benchmarks/step.py --size S
    python benchmarks/step.py --size M --floor --json benchmarks/results/step-m.json

Times are taken in one launch that holds all contenders and lets them take turns, so that a slow minute of the machine
hits all alike; each starts from the same weights and data, and the losses of fzero and FSDP2 must agree at every step.
Memory is measured in a launch for each contender alone, over a few steady steps: nothing of one can hide in the
allocator of the other, and the meter's thread slows down no clock. `examples/measure.py` says what is counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from launch import launch
from machine import machine
from runs import SIZES, Plan

Results = dict[str, dict[str, Any]]


class Row(NamedTuple):
    """What a contender's steps cost on rank 0, and its memory on the rank that has most."""

    milliseconds: float  # median
    quartiles: tuple[float, float]  # the first and the third
    time_ratio: float
    peak: int  # bytes
    state: int  # bytes
    memory_ratio: float


STEPS = {"S": 10, "M": 3}
TOLERANCE = {False: 1e-3, True: 3e-2}
"""Greatest relative difference of two losses, without and with bf16: rounding, grown by the steps before."""


def main(flags: argparse.Namespace) -> None:
    """Measures, prints the table and writes the record; fails when the losses disagree."""
    plan = plan_of(flags)
    results = measured(plan, flags.ranks, flags.timeout)
    rows, difference = summary(results), loss_difference(results)
    print(table(plan, flags.ranks, rows))
    print(f"losses of fzero and fsdp2 differ by at most {difference:.1e} of their size")
    predicted, peak = (results["fzero"][key] / 2**20 for key in ("predicted", "peak"))
    print(f"fzero predicted a peak of {predicted:.1f} MiB before it ran, {predicted / peak:.3f} of what was measured")
    if flags.json:
        record = {"plan": asdict(plan), "gpt": asdict(SIZES[plan.size]), "ranks": flags.ranks} | machine()
        record |= {"summary": {name: row._asdict() for name, row in rows.items()}, "loss_difference": difference}
        flags.json.write_text(json.dumps(record | {"results": results}, indent=1) + "\n")
    if not difference <= TOLERANCE[plan.bf16]:
        sys.exit(f"losses differ by more than {TOLERANCE[plan.bf16]:.1e}: the two did not train alike")


def plan_of(flags: argparse.Namespace) -> Plan:
    """The timed launch that the flags ask for."""
    contenders = ("fsdp2", "fzero", "floor") if flags.floor else ("fsdp2", "fzero")
    steps = flags.steps or STEPS[flags.size]
    return Plan(contenders, flags.size, "time", flags.rounds, steps, flags.device, flags.bf16)


def measured(plan: Plan, ranks: int, timeout: float) -> Results:
    """Per contender: `seconds` [rounds][steps], `losses` [rounds * steps], `peak`, `state` and `predicted` bytes."""
    results = launch(plan, ranks, timeout)
    for name in plan.contenders:
        results[name] |= launch(replace(plan, contenders=(name,), meter="memory"), ranks, timeout)[name]
    return results


def loss_difference(results: Results) -> float:
    """Greatest relative difference between the losses of fzero and of FSDP2 at a step."""
    pairs = zip(results["fzero"]["losses"], results["fsdp2"]["losses"], strict=True)
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def summary(results: Results) -> dict[str, Row]:
    """A row for each contender, with ratios to FSDP2."""
    base = median(milliseconds(results["fsdp2"]))
    rows = {}
    for name, result in results.items():
        low, middle, high = quantiles(milliseconds(result), n=4, method="inclusive")
        ratios = middle / base, result["peak"] / results["fsdp2"]["peak"]
        rows[name] = Row(middle, (low, high), ratios[0], result["peak"], result["state"], ratios[1])
    return rows


def milliseconds(result: dict[str, Any]) -> list[float]:
    """Of every step."""
    return [1000 * seconds for turn in result["seconds"] for seconds in turn]


def table(plan: Plan, ranks: int, rows: dict[str, Row]) -> str:
    """What is compared, and a line for each contender."""
    size, precision = SIZES[plan.size], "bf16" if plan.bf16 else "fp32"
    sizes = f"GPT {size.layers} x d{size.dim}, vocab {size.vocab}, {size.batch} x {size.seq} tokens a rank, {precision}"
    head = f"{'':<8}{'ms a step':>11}{'quartiles':>18}{'ratio':>8}{'peak MiB':>12}{'at rest':>10}{'ratio':>8}"
    lines = (line(name, row) for name, row in rows.items())
    return "\n".join([f"size {plan.size}: {sizes}, {ranks} rank(s) on {plan.device}", head, *lines])


def line(name: str, row: Row) -> str:
    """One line of the table."""
    spread = "{:.1f} - {:.1f}".format(*row.quartiles)
    memory = f"{row.peak / 2**20:>12.1f}{row.state / 2**20:>10.1f}{row.memory_ratio:>8.2f}"
    return f"{name:<8}{row.milliseconds:>11.1f}{spread:>18}{row.time_ratio:>8.2f}{memory}"


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="S")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender")
    parser.add_argument("--steps", type=int, help="steps a turn (10 for S, 3 for M)")
    parser.add_argument("--floor", action="store_true", help="also ranks that do not communicate")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo on cores, or NCCL on GPUs")
    parser.add_argument("--ranks", type=int, help="2 on cpu, 1 on cuda")
    parser.add_argument("--bf16", action="store_true", help="cast weights to bf16 for compute and all-gathers")
    parser.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a launch")
    flags = parser.parse_args()
    flags.ranks = flags.ranks or {"cpu": 2, "cuda": 1}[flags.device]
    return flags


if __name__ == "__main__":
    main(parse())
