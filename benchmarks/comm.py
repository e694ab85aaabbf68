"""Bytes that fzero's steps communicate, predicted and counted, and how fast its transport moves them beside torch's.

    python benchmarks/comm.py                                  # stages 1 to 3 of size S; buffers of 1, 16 and 64 MiB
    python benchmarks/comm.py --size M --ranks 4 --json benchmarks/results/comm.json

Bytes are those of full, gathered buffers, padding included: of `program.comm()`, and of what a step hands to its
transport. A rank moves (N - 1) / N of them, twice that for an all-reduce: GB/s are those, as NCCL's tests count them.
Collectives of one size take turns.
"""

from __future__ import annotations

import argparse
import sys

import flags
from launch import Launch, launch, run
from machine import machine
from quartiles import quartiles
from runs import SIZES, Plan

STAGES = ("fzero-1", "fzero-2", "fzero-3")
MIB = 2**20

Counts = dict[str, dict[str, dict[str, list[float]]]]
Seconds = dict[str, list[float]]  # of each collective


def main(given: argparse.Namespace) -> None:
    """Counts and times, prints both tables and writes the record; fails where a step moves what was not predicted."""
    plan = Plan(STAGES, given.size, "comm", 1, given.steps, given.device, given.bf16)
    counts = run(plan, given.ranks, given.timeout)
    print(f"size {given.size}: {SIZES[given.size]}, {given.ranks} ranks; one step, MiB of full buffers")
    print(count_table(counts))
    asked = {"mib": given.mib, "rounds": given.rounds, "device": given.device}
    (seconds,) = launch([Launch("bandwidth.py", asked, given.device)], given.ranks, given.timeout)
    print(f"\none collective, ms, median of {given.rounds} and quartiles, and GB/s that a rank moves")
    print(speed_table(seconds, given.ranks))
    flags.write(given.json, plan.record() | {"ranks": given.ranks, "counts": counts, "seconds": seconds} | machine())
    wrong = [name for name, count in counts.items() if count["predicted"] != count["counted"]]
    if wrong:
        sys.exit(f"{', '.join(wrong)} moved other bytes than predicted")


def count_table(counts: Counts) -> str:
    """A line for each collective of each stage."""
    lines = [f"{'':<10}{'collective':<17}{'calls':>8}{'predicted':>12}{'calls':>8}{'counted':>12}"]
    for name, count in counts.items():
        for op in sorted({*count["predicted"], *count["counted"]}):
            figures = [count[kind].get(op, (0, 0)) for kind in ("predicted", "counted")]
            cells = "".join(f"{calls:>8g}{nbytes / MIB:>12.3f}" for calls, nbytes in figures)
            lines.append(f"{name:<10}{op:<17}{cells}")
    return "\n".join(lines)


def speed_table(seconds: dict[str, Seconds], ranks: int) -> str:
    """A line for each collective of each size."""
    lines = [f"{'MiB':>5}  {'':<30}{'ms':>9}{'quartiles':>20}{'GB/s':>8}"]
    for mib, rows in seconds.items():
        for name, turns in rows.items():
            low, median, high = quartiles([1000 * turn for turn in turns])
            spread = f"{low:.2f} - {high:.2f}"
            rate = moved(name, int(mib) * MIB, ranks) / median / 1e6
            lines.append(f"{mib:>5}  {name:<30}{median:>9.2f}{spread:>20}{rate:>8.2f}")
    return "\n".join(lines)


def moved(name: str, nbytes: int, ranks: int) -> float:
    """Bytes that a rank sends, of a full buffer of `nbytes`."""
    return nbytes * (ranks - 1) / ranks * (2 if name.endswith("all_reduce") else 1)


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = flags.parser(__doc__)
    parser.add_argument("--steps", type=int, default=2, help="to count over")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 64], help="of the full buffers to time")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each collective")
    return flags.parsed(parser)


if __name__ == "__main__":
    main(parse())
