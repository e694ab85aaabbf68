"""One rank that times collectives: fzero's transport and torch's own, in turns. `comm.py` starts it under torchrun.

Every call gives its result in new memory, but for torch's all-reduce, which is in place.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runs import Plan
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from worker import start

from fzero.layout.layout import Layout, Leaf
from fzero.layout.wires import wire
from fzero.ranks.exchanges import AllGather, ReduceScatter
from fzero.ranks.live import live

MIB = 2**20
WARM_UP_CALLS = 3

Call = Callable[[], object]


def main(given: dict[str, Any], out: Path) -> None:
    """Writes, for each size in MiB of a full buffer and each call, seconds of every turn on the rank that is last."""
    mesh, device = start(Plan((), "tiny", "time", 0, 0, given["device"]))
    result = {}
    for mib in given["mib"]:
        result[str(mib)] = clock(calls(mesh, mib * MIB // 4, device), given["rounds"], device)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def calls(mesh: DeviceMesh, numel: int, device: torch.device) -> dict[str, Call]:
    """Name -> a collective on a full buffer of so many fp32 elements, started and waited for."""
    on, ranks = live(mesh), mesh.size()
    axis = on.mesh.shard_axis
    layout = Layout("bandwidth", (Leaf("", (numel,)),), on.mesh)
    numel = layout.padded
    full, block = torch.randn(numel, device=device), torch.randn(numel // ranks, device=device)

    def into_new(collective: Callable[..., Any], size: int, given: Tensor) -> None:
        collective(given.new_empty(size), given)

    return {
        "fzero all_gather": lambda: on.begin(AllGather("bandwidth", axis, block)).wait(),
        "torch all_gather_into_tensor": partial(into_new, dist.all_gather_into_tensor, numel, block),
        "fzero reduce_scatter": lambda: on.begin(ReduceScatter("bandwidth", axis, [full], wire(layout, (0,)))).wait(),
        "torch reduce_scatter_tensor": partial(into_new, dist.reduce_scatter_tensor, numel // ranks, full),
        "torch all_to_all_single": partial(into_new, dist.all_to_all_single, numel, full),
        "torch all_reduce": partial(dist.all_reduce, full),
    }


def clock(calls: dict[str, Call], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each round, from when all ranks are there until the last of them is done."""
    for call in calls.values():
        for _ in range(WARM_UP_CALLS):
            call()
    seconds = torch.zeros(len(calls), rounds, device=device)
    for turn in range(rounds):
        for row, call in zip(seconds, calls.values()):
            dist.barrier()
            begin = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            row[turn] = time.perf_counter() - begin
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return dict(zip(calls, seconds.tolist()))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
