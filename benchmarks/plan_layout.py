"""Seconds to plan a tree of 100,000 leaves for 4,096 ranks: where all leaves lie, and one rank's chunks of each.

    python benchmarks/plan_layout.py
    python benchmarks/plan_layout.py --leaves 100000 --ranks 4096 --limit 2   # exit status 1 beyond 2 seconds

Trees are 1,000 layers, a bucket each, and all leaves in one bucket; boundaries fall anywhere, or between rows.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from machine import machine

from fzero import VirtualMesh, tree
from fzero.layout.chunks import rank_overlaps
from fzero.layout.packing import pack
from fzero.state.grouping import plan_buckets

SHAPES = ((4096, 4096), (4096,), (11008, 4096), (4096, 11008), (), (1024, 4096), (32000,))
CHUNK = 2**23  # elements

Granularity = Callable[[str, tuple[int, ...]], int | None]


class Plan(NamedTuple):
    """Seconds of each part, and of the processor for all; overlaps of a rank with chunks; padding as a part of all."""

    keys: float
    layouts: float
    chunks: float
    processor: float
    overlaps: int
    padding: float


def layers(leaves: int) -> tree.Tree:
    """Layers of 100 leaves."""
    return {"blocks": [{f"p{i:02}": _leaf(i) for i in range(100)} for _ in range(leaves // 100)]}


def one_bucket(leaves: int) -> tree.Tree:
    """All leaves in one layer."""
    return {"all": {f"p{i:06}": _leaf(i) for i in range(leaves)}}


def _leaf(number: int) -> torch.Tensor:
    return torch.empty(SHAPES[number % len(SHAPES)], device="meta")


def rows(path: str, shape: tuple[int, ...]) -> int | None:
    """Elements of a row."""
    return math.prod(shape[1:]) if len(shape) > 1 else None


def plan(params: tree.Tree, ranks: int, granularity: Granularity | None) -> Plan:
    """Plan from nothing: what was worked out before is forgotten."""
    pack.cache_clear()
    leaves, treedef = tree.flatten(params)
    start, processor = time.perf_counter(), time.process_time()
    keys = tree.keys(treedef)
    named = time.perf_counter()
    found = [layout for layout, _ in plan_buckets(keys, leaves, VirtualMesh(fsdp=ranks), None, granularity)]
    padded, numel = (sum(getattr(layout, size) for layout in found) for size in ("padded", "numel"))
    laid = time.perf_counter()
    overlaps = sum(
        1
        for layout in found
        for leaf in range(len(layout.leaves))
        for _ in rank_overlaps(layout, leaf, ranks // 2, CHUNK)
    )
    taken = named - start, laid - named, time.perf_counter() - laid, time.process_time() - processor
    return Plan(*taken, overlaps, padded / numel - 1)


def main() -> int:
    """Prints a line for each tree and granularity; 1 where one took longer than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds")
    options = parser.parse_args()
    print(machine())
    seconds = f"{'keys':>7}{'layouts':>9}{'chunks':>8}{'seconds':>9}{'CPU':>7}"
    print(f"{'tree':12}{'boundaries':12}{seconds}{'overlaps':>10}  padding")
    longest = 0.0
    cases: dict[str, Any] = {"layers": layers(options.leaves), "one bucket": one_bucket(options.leaves)}
    for name, params in cases.items():
        for kind, granularity in {"anywhere": None, "rows": rows}.items():
            done = plan(params, options.ranks, granularity)
            total = sum(done[:3])
            longest = max(longest, total)
            seconds = f"{done.keys:7.2f}{done.layouts:9.2f}{done.chunks:8.2f}{total:9.2f}{done.processor:7.2f}"
            print(f"{name:12}{kind:12}{seconds}{done.overlaps:10,}  {done.padding:.4%}")
    return int(longest > options.limit)


if __name__ == "__main__":
    sys.exit(main())
