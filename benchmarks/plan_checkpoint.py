"""Seconds of the processor to plan a checkpoint of 100,000 leaves on 4,096 ranks: what one rank saves, and loads.

    python benchmarks/plan_checkpoint.py
    python benchmarks/plan_checkpoint.py --limit 1 --mib 20   # exit status 1 beyond a second, or a manifest of 20 MiB

No rank asks another to plan, so that one process measures one rank: its leaves are real `Sharded` values whose slices
share one piece of memory, and the mesh has no devices. Trees are 1,000 layers, a bucket each, and all leaves in one
bucket. The rank that loads is one of as many ranks, or of fewer.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import add_runs
from plan_layout import layers, one_bucket

from fzero import Sharded, VirtualMesh, tree
from fzero.checkpoint.manifest import FileEntry, Manifest, parse_manifest, render_manifest
from fzero.checkpoint.pieces import plan
from fzero.layout.chunks import rank_overlaps
from fzero.ranks.agreement import digest
from fzero.ranks.virtual import virtual
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
    """Seconds of the processor by name, in the order in which they were taken."""

    def __init__(self) -> None:
        self.by_name: dict[str, float] = {}

    def take(self, name: str, do: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = do()
        self.by_name[name] = time.process_time() - start
        return result


class Found(NamedTuple):
    """Seconds of each part, and what the parts made."""

    seconds: dict[str, float]
    nbytes: dict[str, int]


def measure_save(params: tree.Tree, ranks: int) -> tuple[Found, bytes]:
    """What one rank plans of a save, and the manifest, which the first rank renders."""
    mesh, file, seconds = VirtualMesh(fsdp=ranks), ranks // 2, Seconds()
    state = place(params, Rank(mesh, file))
    planned = seconds.take("plan", lambda: plan(state, virtual(mesh)))
    picked = seconds.take("pick", lambda: planned.pick(file))
    seconds.take("hash", lambda: digest(planned.list_lines()))
    head = seconds.take("header", lambda: render_header(plan_header(picked, {})))
    files = [FileEntry(1 << 30, f"{number:08x}", "") for number in range(ranks)]
    grid, places, values, _ = planned
    known = Manifest(0, "", mesh.sizes, mesh.shard_axis, grid, places, values, files, {}, {"fzero": "0"})
    data = seconds.take("render", lambda: render_manifest(known))
    return Found(seconds.by_name, {"manifest": len(data), "header": len(head)}), data


def measure_load(params: tree.Tree, ranks: int, data: bytes) -> Found:
    """What one rank plans of a load, from the bytes of a manifest."""
    like, seconds = place(params, Rank(VirtualMesh(fsdp=ranks), ranks // 2)), Seconds()
    parsed = seconds.take("parse", lambda: parse_manifest(data, "manifest.json"))
    read = seconds.take("find", lambda: find_files(parsed, tree.leaves(like)))
    assert render_manifest(parsed) == data, "the manifest is not its own inverse"
    return Found(seconds.by_name, {"files": len(read)})


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
    """Prints seconds of the processor for each tree and number of loading ranks; 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds of a save, and of a load")
    parser.add_argument("--mib", type=float, default=math.inf, help="of the manifest")
    parser.add_argument("--json", type=Path, help="adds every figure to a file, with versions and machine")
    flags = parser.parse_args()
    runs, is_beyond = [], False
    print(f"{'':12}{'plan':>7}{'pick':>7}{'hash':>7}{'header':>7}{'save':>7}   render  MiB")
    for make in (layers, one_bucket):
        name = make.__name__.replace("_", " ")
        saved, data = measure_save(make(flags.leaves), flags.ranks)
        total, mib = sum(saved.seconds.values()) - saved.seconds["render"], saved.nbytes["manifest"] / MIB
        *shown, render = (f"{value:7.2f}" for value in saved.seconds.values())
        print(f"{name:12}{''.join(shown)}{total:7.2f}  {render}{mib:5.1f}", flush=True)
        is_beyond |= total > flags.limit or mib > flags.mib
        runs.append(saved._asdict() | {"tree": name, "saved on": flags.ranks})
        for ranks in (flags.ranks, flags.ranks * 3 // 8):
            loaded = measure_load(make(flags.leaves), ranks, data)
            total = sum(loaded.seconds.values())
            shown = [f"{part} {value:.2f}" for part, value in loaded.seconds.items()]
            files = loaded.nbytes["files"]
            print(f"  load on {ranks} ranks: {', '.join(shown)}, together {total:.2f}; {files} files", flush=True)
            is_beyond |= total > flags.limit
            runs.append(loaded._asdict() | {"tree": name, "loaded on": ranks})
    add_runs(flags.json, {"plan": {"trees": runs}})
    return int(is_beyond)


if __name__ == "__main__":
    sys.exit(main())
