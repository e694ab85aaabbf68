"""A model whose state is several times the address space of its ranks, trained from files and in memory.

    python benchmarks/disk.py                                   # 5 GiB of state, 2 ranks with 1.25 GiB each
    python benchmarks/disk.py --layers 8 --width 256 --limit 0  # a quick try, without a limit
    python benchmarks/disk.py --path /mnt/nvme                  # the folder of the files

The model is a chain of equal layers, `x + tanh(x @ w + b)`. Parameters and AdamW's state lie in files. Each rank sets
`RLIMIT_AS` on itself once it has imported torch, before there is any state. The same steps then run in memory, without
a limit. The table has the bytes that were read and written, beside those that the program predicts, and says whether
all losses are equal to the bit.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import re
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import flags
import torch
import torch.distributed as dist
from machine import machine
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fzero
from fzero import initializers

GIB = 1 << 30
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
ADAMW = fzero.optim.adamw(1e-3)


def main(given: argparse.Namespace) -> None:
    """Trains twice, prints the table and writes the record."""
    with tempfile.TemporaryDirectory(dir=given.path) as folder:
        from_files = launch(given, folder)
    rows = {"files": from_files, "memory": None if given.only_files else launch(given, None)}
    state = sum(each["state"] for each in from_files)
    print(f"{given.layers} layers of width {given.width}: {state / GIB:.2f} GiB of state on {given.ranks} ranks")
    heads = ("state in", 9), ("address space GiB", 19), ("resident GiB", 14), ("s a step", 10), ("read GB", 9)
    print("".join(f"{name:>{width}}" for name, width in (*heads, ("written GB", 12), ("GB/s", 7))))
    for name, ranks in rows.items():
        for each in ranks or ():
            moved = [each["read"] / 1e9, each["written"] / 1e9]
            rate = sum(moved) / sum(each["seconds"])
            space = f"{each['space'] / GIB:>19.2f}{each['resident'] / GIB:>14.2f}{each['step']:>10.2f}"
            print(f"{name:>9}{space}{moved[0]:>9.2f}{moved[1]:>12.2f}{rate:>7.2f}")
    for each in from_files:
        assert [each["read"], each["written"]] == each["predicted"], "other bytes than predicted"
    print("bytes read and written as predicted")
    if rows["memory"] is not None:
        equal = all(a["losses"] == b["losses"] for a, b in zip(from_files, rows["memory"], strict=True))
        print(f"{given.steps} losses {'equal' if equal else 'NOT equal'} to the bit: {from_files[0]['losses']}")
    flags.write(given.json, {"runs": rows, "flags": {k: str(v) for k, v in vars(given).items()}} | machine())


def launch(given: argparse.Namespace, folder: str | None) -> list[dict[str, Any]]:
    """What each rank found, with state in files below a folder, or in memory."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # takes a free port itself
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(given.ranks)]
    processes = [
        context.Process(target=run_rank, args=(rank, store.port, given, folder, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes):
        process.start()
        theirs.close()
    found = [ours.recv() if ours.poll(given.timeout) else None for ours, _ in pipes]
    for process in processes:
        process.join(10)
        process.kill()
    if None in found:
        raise SystemExit(f"a rank did not report within {given.timeout} s")
    return found


def run_rank(rank: int, port: int, given: argparse.Namespace, folder: str | None, pipe: Connection) -> None:
    """Trains on one rank, and sends what it found."""
    libc = ctypes.CDLL(None)  # else glibc keeps freed memory of tensors, and 64 MiB of addresses for each thread
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    libc.mallopt(M_ARENA_MAX, 1)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=given.ranks)
    mesh = init_device_mesh("cpu", (given.ranks,), mesh_dim_names=("fsdp",))
    if folder is not None and given.limit:
        resource.setrlimit(resource.RLIMIT_AS, (int(given.limit * GIB), resource.RLIM_INFINITY))
    pipe.send(train(mesh, given, None if folder is None else fzero.disk(folder)))
    dist.barrier()
    dist.destroy_process_group()


def train(mesh: Any, given: argparse.Namespace, place: Any) -> dict[str, Any]:
    """Losses, times and bytes of some steps."""
    width = given.width
    with torch.device("meta"):
        shapes = {"layers": [{"w": torch.empty(width, width), "b": torch.empty(width)} for _ in range(given.layers)]}
    weights, biases = initializers.normal(width**-0.5), initializers.zeros()
    params = fzero.init(shapes, mesh, lambda path, leaf: weights if leaf.ndim > 1 else biases, to=place)
    state: Any = (params, ADAMW.init(params))
    batch = torch.randn(given.batch, width, generator=torch.Generator().manual_seed(mesh.get_rank()))
    step, leaves = fzero.shard(train_step, mesh), fzero.tree.leaves(state)
    nbytes = sum(leaf.local.nbytes for leaf in leaves if not leaf.is_replicated)
    store = next(leaf for leaf in leaves if not leaf.is_replicated).local.extent.store if place else None
    copies, before = step.report(*state, batch).copies, store.counts if store else None
    del params, leaves
    losses, seconds = [], []
    for _ in range(given.steps):
        begin = time.perf_counter()
        *state, loss = step(*state, batch)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    counted = [store.counts.read - before.read, store.counts.written - before.written] if store else [0, 0]
    return {
        "losses": losses, "seconds": seconds, "step": sum(seconds[1:]) / len(seconds[1:]), "state": nbytes,
        "read": counted[0], "written": counted[1], "space": find_peak("VmPeak"), "resident": find_peak("VmHWM"),
        "predicted": [given.steps * copies.get(name, 0) for name in ("read", "write")],
    }  # fmt: skip


def train_step(params: Any, opt_state: Any, x: Tensor) -> tuple[Any, Any, Tensor]:
    """A step as anyone would write it."""

    def loss_of(params: Any) -> Tensor:
        h = x
        for layer in params["layers"]:
            h = h + torch.tanh(h @ layer["w"] + layer["b"])
        return h.square().mean()

    loss, grads = fzero.value_and_grad(loss_of)(params)
    updates, opt_state = ADAMW.update(grads, opt_state, params)
    return fzero.optim.apply_updates(params, updates), opt_state, loss


def find_peak(name: str) -> int:
    """Bytes of the most that this process had, by its name in /proc."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=124)
    parser.add_argument("--width", type=int, default=1900)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="rows a rank")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", type=float, default=1.25, help="GiB of addresses of each rank; 0 for none")
    parser.add_argument("--path", help="the folder of the files")
    parser.add_argument("--only-files", action="store_true", help="leave the run in memory out")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a run")
    parser.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
