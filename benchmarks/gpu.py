"""One GPU: tokens a second, MFU and peak memory of a training step in bf16, fzero beside FSDP2, on NCCL.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json          # GPTs of 0.4 and 1.5 billion parameters
    python benchmarks/gpu.py --sizes 0.4B --contenders fzero-3,fsdp2-compiled
    python benchmarks/gpu.py --two-ranks                                 # two ranks on the GPU train alike, slowly
    python benchmarks/gpu.py --device cpu --tiny                         # a dry run of all of it, on a core

One rank: no contender communicates, all else is as on many. They take turns in one process with products of matrices,
whose rate is the whole that MFU is a part of. All hold their state at once: 12 bytes a parameter and contender.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, NamedTuple

import flags
import matrix
from contenders import CONTENDERS, able
from launch import run, run_each
from machine import machine
from quartiles import quartiles
from runs import SIZES, Plan, Size
from step import TOLERANCE, Results, check, milliseconds, summary, table

CONTESTANTS = "fsdp2,fsdp2-compiled,fzero-3,fzero-3-compiled,fzero-3-graph"
PAIR = "fsdp2,fzero-1,fzero-2,fzero-3"


class Row(NamedTuple):
    """A contender on one GPU. `mfu` counts causal attention once, and nothing that is computed again."""

    tokens: float  # a second, of the median step
    mfu: float
    peak: int  # bytes


def main(given: argparse.Namespace) -> None:
    """Measures each size, prints tables and writes the record; fails when losses disagree."""
    record: dict[str, Any] = {"device": given.device, "sizes": {}}
    for size in ["tiny"] if given.tiny else given.sizes.split(","):
        record["sizes"][size] = pair(given, size) if given.two_ranks else alone(given, size)
    flags.write(given.json, record | machine())


def pair(given: argparse.Namespace, size: str) -> dict[str, Any]:
    """Two ranks on the one GPU, each a host of its own to NCCL: that losses agree, never how fast."""
    plan = plan_of(given, size, PAIR.split(","))
    plan = replace(plan, bf16=False, one_gpu=True)
    results = run(plan, 2, given.timeout)
    rows = summary(results)
    print(table(plan, 2, rows))
    check(rows, TOLERANCE[plan.bf16])
    return plan.record() | {"ranks": 2, "losses": {name: result["losses"] for name, result in results.items()}}


def alone(given: argparse.Namespace, size: str) -> dict[str, Any]:
    """One rank, timed with the others and then weighed by itself."""
    plan = plan_of(given, size, given.contenders.split(","))
    results = run(replace(plan, contenders=(*plan.contenders, "matrix")), 1, given.timeout)
    weights = run_each(replace(plan, meter="memory", rounds=1), 1, given.timeout)
    rate = 1000 * matrix.flops(given.device) / quartiles(milliseconds(results.pop("matrix"))).median
    rows = rows_of(SIZES[size], results, {name: weight["peak"] for name, weight in weights.items()}, rate)
    print(table(plan, 1, summary(results)))
    print(f"matrices are multiplied at {rate / 1e12:.3g} TFLOP/s")
    for name, row in rows.items():
        print(f"{name:<20}{row.tokens:>12,.0f} tokens/s{row.mfu:>10.1%} MFU{row.peak / 2**30:>10.2f} GiB")
    check(summary(results), TOLERANCE[plan.bf16])
    figures = {name: row._asdict() for name, row in rows.items()}
    return plan.record() | {"ranks": 1, "matrix": rate, "rows": figures, "times": results, "memory": weights}


def plan_of(given: argparse.Namespace, size: str, names: list[str]) -> Plan:
    """Who takes turns, on which model."""
    return Plan(able(tuple(names), given.device), size, "time", given.rounds, given.steps, given.device, bf16=True)


def rows_of(size: Size, results: Results, peaks: dict[str, int], rate: float) -> dict[str, Row]:
    """A row for each contender, given how many floating-point operations a second the device is good for."""
    rows = {}
    for name, result in results.items():
        seconds = quartiles(milliseconds(result)).median / 1000
        rows[name] = Row(size.batch * size.seq / seconds, flops(size) / seconds / rate, peaks[name])
    return rows


def flops(size: Size) -> int:
    """Floating-point operations of a step: 6 for a token and an element of a matrix, and those of causal attention.

    Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1.
    """
    matrices = size.layers * 12 * size.dim**2 + size.dim * size.vocab
    attention = size.layers * size.seq * size.dim
    return size.batch * size.seq * 6 * (matrices + attention)


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = flags.parser(__doc__, sized=False)
    parser.set_defaults(device="cuda")
    parser.add_argument("--sizes", default="0.4B,1.5B", help=f"some of {','.join(SIZES)}")
    parser.add_argument("--tiny", action="store_true", help="a model that any machine can train")
    parser.add_argument("--two-ranks", action="store_true", help="instead: two ranks on the GPU, in fp32")
    parser.add_argument("--contenders", default=CONTESTANTS, help=f"some of {','.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
