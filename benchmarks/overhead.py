"""What of fzero's step is neither compute nor transport: Python between the two, by Python's own profiler.

    python benchmarks/overhead.py                                        # stages 1 to 3, size S
    python benchmarks/overhead.py --size M --contenders fzero-3 --json benchmarks/results/overhead.json

Waiting for other ranks is transport. `profiled.py` says what else is what; the profiler slows what it counts.
"""

from __future__ import annotations

import argparse
from typing import Any

import flags
from contenders import able
from launch import run_each
from machine import machine
from runs import SIZES, Plan

CONTESTANTS = "fzero-1,fzero-2,fzero-3"


def main(given: argparse.Namespace) -> None:
    """Measures, prints the table and writes the record."""
    contenders = able(tuple(given.contenders.split(",")), given.device)
    plan = Plan(contenders, given.size, "overhead", 1, given.steps, given.device, given.bf16)
    results = run_each(plan, given.ranks, given.timeout)
    print(f"size {plan.size}: {SIZES[plan.size]}, {given.ranks} rank(s) on {plan.device}; of rank 0's step, profiled")
    print(f"{'':<20}{'ms a step':>11}{'compute':>11}{'transport':>11}{'own':>11}   most of it")
    for name, result in results.items():
        print(line(name, result))
    flags.write(given.json, plan.record() | {"ranks": given.ranks, "results": results} | machine())


def line(name: str, result: dict[str, Any]) -> str:
    """One line of the table."""
    seconds, whole = result["seconds"], sum(result["seconds"].values())
    cells = (f"{100 * seconds.get(kind, 0) / whole:.1f} %" for kind in ("compute", "transport", "own"))
    most = ", ".join(f"{function} {1000 * spent:.1f} ms" for function, spent in result["most"][:3])
    return f"{name:<20}{1000 * whole:>11.1f}" + "".join(f"{cell:>11}" for cell in cells) + f"   {most}"


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = flags.parser(__doc__)
    parser.add_argument("--contenders", default=CONTESTANTS, help="fzero's")
    parser.add_argument("--steps", type=int, default=10, help="to profile")
    return flags.parsed(parser)


if __name__ == "__main__":
    main(parse())
