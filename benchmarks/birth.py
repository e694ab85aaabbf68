"""How much memory a rank needs to bring one large leaf into its shards, and to write it out again.

    torchrun --standalone --nproc-per-node 2 benchmarks/birth.py --mib 1024 --chunk 32

Of each way, the most that a rank's bytes in use rise above what it held before (see `examples/measure.py`), beside the
size of its shard and the bound: shard + 2 chunks + 16 MiB; of `build` the largest parameter more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from machine import machine
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fzero

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from measure import growth

MIB = 1 << 20


class Table(nn.Module):
    """One parameter of so many MiB, in fp32."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(mib, MIB // 4))
        nn.init.normal_(self.table, std=0.02)


class Way(NamedTuple):
    """A way in or out: what is there before, and what is measured, given that."""

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]
    holds: int  # bytes that it is to hold in the end
    extra: int = 0  # bytes that its bound has more


def ways(mesh: DeviceMesh, mib: int, chunk: int, file: Path) -> dict[str, Way]:
    """All ways, in an order in which they can run: `save` makes the file that `load` reads."""
    meta = {"table": torch.empty(mib, MIB // 4, device="meta")}
    shard, first = mib * MIB // mesh.size(), mesh.get_rank() == 0

    def drawn() -> dict[str, torch.Tensor]:
        return {"table": torch.randn(mib, MIB // 4)}

    def init(_: Any = None) -> Any:
        return fzero.init(meta, mesh, lambda path, leaf: fzero.initializers.normal(0.02), chunk=chunk)

    return {
        "from host": Way(drawn, lambda given: fzero.partition(given, mesh, chunk=chunk), shard),
        "from rank 0": Way(
            lambda: drawn() if first else meta,
            lambda given: fzero.partition(given, mesh, chunk=chunk, source_rank=0),
            shard,
        ),
        "init": Way(lambda: None, init, shard),
        "build": Way(lambda: None, lambda _: fzero.build(lambda: Table(mib), mesh), shard, mib * MIB),
        "save": Way(init, lambda given: fzero.save_safetensors(given, file, chunk=chunk), 0),
        "load": Way(lambda: None, lambda _: fzero.load_safetensors(file, meta, mesh, chunk=chunk), shard),
    }


def measured(way: Way, mesh: DeviceMesh) -> int:
    """The largest growth over the ranks, in bytes."""
    given, kept = way.prepare(), []
    dist.barrier()
    grown = torch.tensor(growth(lambda: kept.append(way.run(given)), torch.device(mesh.device_type)))
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    return int(grown)


def main() -> None:
    """Prints a line for each way, and whether it keeps its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="of the leaf")
    parser.add_argument("--chunk", type=int, default=32, help="MiB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("fsdp",))
    file = Path(tempfile.gettempdir()) / f"birth-{os.environ['MASTER_PORT']}.safetensors"
    rows = {}
    for name, way in ways(mesh, options.mib, options.chunk * MIB, file).items():
        bound = way.holds + 2 * options.chunk * MIB + 16 * MIB + way.extra
        rows[name] = {"peak": measured(way, mesh), "shard": way.holds, "bound": bound}
    if dist.get_rank() == 0:
        file.unlink()
        show(rows, options, world)
    dist.barrier()
    dist.destroy_process_group()


def show(rows: dict[str, dict[str, int]], options: argparse.Namespace, world: int) -> None:
    """The table, and the JSON where it is asked for."""
    print(f"a leaf of {options.mib} MiB on {world} ranks, chunks of {options.chunk} MiB; MiB over what was held before")
    print(f"{'':12} {'peak':>8} {'shard':>8} {'bound':>8}")
    for name, row in rows.items():
        verdict = "" if row["peak"] <= row["bound"] else "   above its bound"
        print(f"{name:12} {' '.join(f'{row[key] / MIB:8.1f}' for key in ('peak', 'shard', 'bound'))}{verdict}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "world": world, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
