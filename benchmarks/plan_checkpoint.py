"""Seconds to plan a checkpoint of 100,000 leaves on 4,096 ranks: what one rank saves, the manifest, what a rank loads.

    python benchmarks/plan_checkpoint.py
    python benchmarks/plan_checkpoint.py --limit 1 --mib 20   # exit status 1 beyond a second, or a manifest of 20 MiB

No rank asks another to plan, so that one process measures one rank: its leaves are real `Sharded` values whose slices
share one piece of memory, and the mesh has no devices. Trees are 1,000 layers, a bucket each, and all leaves in one
bucket. The rank that loads is one of as many ranks, or of fewer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import machine
from plan_layout import layers, one_bucket

from fzero import Sharded, VirtualMesh, tree
from fzero.checkpoint.manifest import File, Manifest, parse_manifest, render_manifest
from fzero.checkpoint.pieces import hash_lines, plan
from fzero.layout.chunks import rank_overlaps
from fzero.state.fill import CHUNK_NBYTES
from fzero.state.grouping import plan_buckets
from fzero.state.safetensors.header import plan_header, render_header
from fzero.values.origin import UNKNOWN

MIB = 1 << 20


class Rank(NamedTuple):
    """What a `Sharded` asks of the rank that holds it."""

    mesh: VirtualMesh
    rank: int
    is_tracing: bool = False


def place(params: tree.Tree, on: Rank) -> tree.Tree:
    """The leaves as one rank holds them. Slices are views of one piece of memory that nobody touches."""
    leaves, treedef = tree.flatten(params)
    found: dict[int, Sharded] = {}
    buckets = plan_buckets(tree.keys(treedef), leaves, on.mesh)
    memory = torch.empty(max(layout.shard for layout, _ in buckets), device="cpu")
    for layout, members in buckets:
        for index, i in enumerate(members):
            found[i] = Sharded(memory[: len(layout.part(index, on.rank))], layout, index, on)
            found[i].origin = UNKNOWN
    return tree.unflatten(treedef, [found[i] for i in range(len(leaves))])


class Seconds:
    """Seconds by name, in the order in which they were taken."""

    def __init__(self) -> None:
        self.by_name: dict[str, float] = {}

    def take(self, name: str, do: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = do()
        self.by_name[name] = time.process_time() - start
        return result


def measure(params: tree.Tree, ranks: int, loading: int) -> dict[str, Any]:
    """Seconds of each part, bytes of the manifest and of one header, and the files that the loading rank reads."""
    mesh, file, seconds = VirtualMesh(fsdp=ranks), ranks // 2, Seconds()
    state, like = place(params, Rank(mesh, file)), place(params, Rank(VirtualMesh(fsdp=loading), loading // 2))
    planned = seconds.take("plan", lambda: plan(state, mesh))
    picked = seconds.take("pick", lambda: planned.pick(file))
    seconds.take("hash", lambda: hash_lines(planned.list_lines()))
    head = seconds.take("header", lambda: render_header(plan_header(picked, {})))
    files = [File(1 << 30, f"{number:08x}", "") for number in range(ranks)]
    known = Manifest(
        0, mesh.sizes, mesh.shard_axis, planned.grid, planned.places, planned.values, files, {}, {"fzero": "0"}
    )
    data = seconds.take("render", lambda: render_manifest(known))
    parsed = seconds.take("parse", lambda: parse_manifest(data, "manifest.json"))
    assert parsed == known, "the manifest is not its own inverse"
    read = seconds.take("load", lambda: find_files(parsed, tree.leaves(like)))
    return {"seconds": seconds.by_name, "manifest": len(data), "header": len(head), "files": len(read)}


def find_files(manifest: Manifest, leaves: list[Sharded]) -> set[int]:
    """The files that a rank reads, and of each leaf the elements: as `load` finds them."""
    numel, found = CHUNK_NBYTES // 4, set[int]()
    for leaf in leaves:
        saved = manifest.places[leaf.path]
        assert (saved.shape, saved.dtype) == (leaf.leaf.shape, leaf.dtype)
        for piece in rank_overlaps(leaf.form.layout, leaf.index, leaf.on.rank, numel):
            for number, elements in manifest.grid.iter_files(saved, piece.source):
                assert len(manifest.grid.find_part(saved, number)) >= len(elements)
                found.add(number)
    return found


def main() -> int:
    """Prints a line for each tree and number of loading ranks; 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of a save, and of a load")
    parser.add_argument("--mib", type=float, default=math.inf, help="of the manifest")
    parser.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    flags = parser.parse_args()
    trees = {"layers": layers, "one bucket": one_bucket}
    runs, is_beyond, first = [], False, True
    for name, make in trees.items():
        for loading in (flags.ranks, flags.ranks * 3 // 8):
            found = measure(make(flags.leaves), flags.ranks, loading)
            seconds = found["seconds"]
            saving = sum(seconds[part] for part in ("plan", "pick", "hash", "header"))
            reading = seconds["parse"] + seconds["load"]
            if first:
                parts = "".join(f"{part:>8}" for part in seconds)
                print(f"{'tree':12}{'loaded on':>9}{parts}{'save':>8}{'load':>8}{'MiB':>7}{'files':>7}")
            shown = "".join(f"{value:8.2f}" for value in seconds.values())
            mib = found["manifest"] / MIB
            print(f"{name:12}{loading:9}{shown}{saving:8.2f}{reading:8.2f}{mib:7.1f}{found['files']:7}", flush=True)
            is_beyond |= max(saving, reading) > flags.limit or mib > flags.mib
            runs.append(found | {"tree": name, "ranks": flags.ranks, "loading": loading})
            first = False
    if flags.json:
        flags.json.write_text(json.dumps(machine() | {"runs": runs}, indent=1) + "\n")
    return int(is_beyond)


if __name__ == "__main__":
    sys.exit(main())
