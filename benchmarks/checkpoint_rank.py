"""One rank of `checkpoint.py`, started by `launch.py`: saves and loads beside `dd` and torch.distributed.checkpoint."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fzero_steps import ADAMW, training_step
from gpt import GPT, GPTConfig
from measure import growth
from runs import SIZES
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fzero
import fzero.checkpoint
from fzero import tree

DIM, SPARE_ROWS, MOMENTS = 1024, 1024, ("params", "exp_avg", "exp_avg_sq")
STEPS = 3
"""Training steps in a row that are timed, with a save under way and without."""
Ways = dict[str, Callable[[], Any]]


def shapes(nbytes: int) -> dict[str, Any]:
    """Layers of a GPT of width 1,024 and an embedding that fills up about so many bytes of fp32, three times, as of
    AdamW. On the meta device."""
    layer = {"qkv": (3 * DIM, DIM), "out": (DIM, DIM), "up": (4 * DIM, DIM), "down": (DIM, 4 * DIM), "norm": (DIM,)}
    each, numel = sum(torch.Size(shape).numel() for shape in layer.values()), nbytes // 4 // len(MOMENTS)
    layers = (numel - SPARE_ROWS * DIM) // each
    rows = (numel - layers * each) // DIM // 64 * 64  # no padding on up to 64 ranks
    blocks = [{name: torch.empty(shape, device="meta") for name, shape in layer.items()} for _ in range(layers)]
    return {name: {"blocks": blocks, "embedding": torch.empty(rows, DIM, device="meta")} for name in MOMENTS}


class State:
    """A rank's share of the tree in one piece of memory, as fzero has it and as FSDP2 would: the same bytes in both.
    FSDP2 cuts each leaf along the first dimension."""

    def __init__(self, nbytes: int, mesh: DeviceMesh) -> None:
        self.like = fzero.partition(shapes(nbytes), mesh, device="meta")
        leaves = tree.leaves(self.like)
        self.memory = torch.zeros(sum(leaf.local.numel() for leaf in leaves))
        left = iter(self.memory.split([leaf.local.numel() for leaf in leaves]))
        self.values = tree.map(lambda leaf: leaf.with_local(next(left)), self.like)
        shares = [(leaf.shape[0] // mesh.size(), *leaf.shape[1:]) for leaf in leaves]
        parts = self.memory.split([torch.Size(share).numel() for share in shares])
        self.dtensors = {
            path: DTensor.from_local(alone(part).view(share), mesh, [Shard(0)])
            for path, part, share in zip(tree.paths(self.like), parts, shares)
        }

    def draw(self) -> None:
        """Random values, which nothing on the way to the disk can compress."""
        self.memory.normal_(generator=torch.Generator().manual_seed(dist.get_rank()))


def alone(part: Tensor) -> Tensor:
    """The same memory as a storage of its own, as an FSDP2 parameter has: DCP copies what is a view of a larger one."""
    return torch.frombuffer((ctypes.c_char * part.nbytes).from_address(part.data_ptr()), dtype=part.dtype)


def sums(locals_: list[Tensor]) -> list[int]:
    """The sum of the bits of each leaf over all ranks: of any cut the same."""
    found = torch.stack([x.view(torch.int32).sum(dtype=torch.int64) for x in locals_])
    dist.all_reduce(found)
    return found.tolist()


def sums_of(values: tree.Tree) -> list[int]:
    """`sums` of the leaves of a partitioned tree, or of a state dict."""
    return sums([leaf.to_local() if isinstance(leaf, DTensor) else leaf.local for leaf in tree.leaves(values)])


def clock(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the last rank is done, and this rank's result."""
    if dist.get_rank() == 0:
        os.sync()  # what an earlier way left to the disk
    dist.barrier()
    start = time.perf_counter()
    result = run()
    dist.barrier()
    return time.perf_counter() - start, result


def drop(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    if dist.get_rank() == 0:
        for file in folder.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
    dist.barrier()


def clear(*folders: Path) -> None:
    """Remove folders, on all ranks together."""
    if dist.get_rank() == 0:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


class Saves:
    """Saves of one state in turns. What a way wrote is removed before its next turn, outside of the time."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state, self.folder = state, folder
        self.parts: list[dict[str, float]] = []
        self.ways: Ways = {"fzero": self.fzero, "dd": self.dd, "dcp": self.dcp}

    def fzero(self) -> None:
        self.parts.append(dict(fzero.checkpoint.save(self.folder / "fzero", self.state.values, step=1).seconds))

    def dd(self) -> None:
        """Copy this rank's file of fzero's checkpoint, which the page cache has."""
        source, target = self.folder / "fzero" / "step-1", self.folder / "dd"
        target.mkdir(exist_ok=True)
        name = f"rank-{dist.get_rank():05}.safetensors"
        subprocess.run(
            ["dd", f"if={source / name}", f"of={target / name}", "bs=32M", "conv=fsync", "status=none"], check=True
        )

    def dcp(self) -> None:
        """With the defaults of `FileSystemWriter`: a file a rank, `sync_files=True`, one thread."""
        dcp.save(self.state.dtensors, storage_writer=FileSystemWriter(self.folder / "dcp"))

    def run(self, rounds: int) -> dict[str, Any]:
        """Seconds of each way and of the parts of fzero's, after a round that does not count."""
        found: dict[str, list[float]] = {name: [] for name in self.ways}
        order = list(self.ways)
        for turn in range(rounds + 1):
            for name in order:
                clear(self.folder / name)  # of each way as much: memory that was just freed is quick to get
                seconds, _ = clock(self.ways[name])
                if turn:
                    found[name].append(seconds)
            order = order[1:] + order[:1]
        clear(self.folder / "dd")
        return {"save": found, "parts": self.parts[1:]}

    def beside(self) -> dict[str, list[float]]:
        """Seconds of `save(..., wait=False)` until it returns, and until the checkpoint is there."""
        found: dict[str, list[float]] = {"returned": [], "done": []}
        for _ in range(2):
            clear(self.folder / "beside")
            start = time.perf_counter()
            saving = fzero.checkpoint.save(self.folder / "beside", self.state.values, step=1, wait=False)
            found["returned"].append(time.perf_counter() - start)
            saving.wait()
            found["done"].append(time.perf_counter() - start)
        clear(self.folder / "beside")
        return found


class Loads:
    """Loads of both checkpoints in turns. The first values that each loads are compared with what was saved."""

    def __init__(self, state: State, folder: Path, saved: dict[str, list[int]]) -> None:
        self.state, self.folder, self.saved = state, folder, saved
        self.ways: Ways = {"fzero": self.fzero, "donated": self.donated, "dcp": self.dcp}

    def fzero(self) -> tree.Tree:
        """Into new memory."""
        return fzero.checkpoint.load(self.folder / "fzero", self.state.like)

    def donated(self) -> tree.Tree:
        """Into the memory of the state."""
        like = tree.map(lambda leaf: leaf.with_local(leaf.local), self.state.values)
        return fzero.checkpoint.load(self.folder / "fzero", like, donate=True)

    def dcp(self) -> dict[str, DTensor]:
        """Into the memory of the state, as DCP does."""
        dcp.load(self.state.dtensors, storage_reader=FileSystemReader(self.folder / "dcp"))
        return self.state.dtensors

    def run(self, rounds: int) -> dict[str, Any]:
        """Seconds of each way, with the files dropped from the page cache and with them in it."""
        found: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in self.ways} for kind in ("cold", "warm")}
        order = list(self.ways)
        for turn in range(rounds):
            for name in order:
                for kind, seconds in found.items():
                    if kind == "cold":
                        drop(self.folder)
                    if name != "fzero":
                        self.state.memory.zero_()
                    taken, loaded = clock(self.ways[name])
                    seconds[name].append(taken)
                    if turn == 0:
                        expected = self.saved["dcp" if name == "dcp" else "fzero"]
                        assert sums_of(loaded) == expected, f"{name} loaded other values"
                    del loaded
            order.reverse()
        return found


def grow(ways: Ways) -> dict[str, int]:
    """How far each way raises the bytes in use, on the rank where it does most."""
    found = {}
    for name, way in ways.items():
        dist.barrier()
        grown = torch.tensor(growth(functools.partial(keep, way, []), torch.device("cpu")))
        dist.all_reduce(grown, dist.ReduceOp.MAX)
        found[name] = int(grown)
    return found


def keep(way: Callable[[], Any], kept: list[Any]) -> None:
    """Run it, and hold what it returns."""
    kept.append(way())


def save_and_load(mesh: DeviceMesh, given: dict[str, Any]) -> dict[str, Any]:
    """Saves of a share of `mib` a rank, and loads at the same world size. Leaves both checkpoints in the folder."""
    folder, state = Path(given["folder"]), State(given["nbytes"], mesh)
    state.draw()
    saves, saved = Saves(state, folder), {"fzero": sums_of(state.values), "dcp": sums_of(state.dtensors)}
    found = saves.run(given["rounds"]) | {"nbytes": state.memory.nbytes, "saved": saved}
    clear(folder / "fzero", folder / "dcp")
    found["memory of save"] = grow({"fzero": saves.fzero, "dcp": saves.dcp})  # these files stay
    loads = Loads(state, folder, saved)
    found["load"] = loads.run(given["rounds"])
    found["memory of load"] = grow(loads.ways)
    return found | {"beside": saves.beside()}  # at last: the copy's memory stays


def load_elsewhere(mesh: DeviceMesh, given: dict[str, Any]) -> dict[str, Any]:
    """Loads, on these ranks, of what other ranks saved."""
    state = State(given["nbytes"], mesh)
    loads = Loads(state, Path(given["folder"]), given["saved"])
    found = {"load": loads.run(given["rounds"]), "nbytes": state.memory.nbytes}
    return found | {"memory of load": grow(loads.ways)}


def train(mesh: DeviceMesh, given: dict[str, Any]) -> dict[str, Any]:
    """Seconds of training steps, with a save under way and without."""
    size = SIZES[given["size"]]
    torch.manual_seed(0)
    model = GPT(GPTConfig(size.vocab, size.seq, size.dim, size.layers, size.dim // 64))
    params, apply = fzero.lower(model)
    params = fzero.partition(params, mesh)
    state = params, ADAMW.init(params)
    step = fzero.shard(training_step(apply), mesh)
    tokens = torch.randint(size.vocab, (size.batch, size.seq + 1))
    batch = {"inputs": tokens[:, :-1].clone(), "targets": tokens[:, 1:].clone()}

    def take() -> None:
        nonlocal state
        *state, _ = step(*state, batch)  # type: ignore[assignment]

    take()
    take()
    found: dict[str, list[float]] = {"without": [], "returned": [], "beside": [], "done": []}
    for turn in range(given["rounds"] + 1):
        clear(Path(given["folder"]) / "training")
        without = sum(clock(take)[0] for _ in range(STEPS))
        dist.barrier()
        start = time.perf_counter()
        saving = fzero.checkpoint.save(Path(given["folder"]) / "training", state, step=turn, wait=False)
        returned = time.perf_counter() - start
        beside = sum(clock_plain(take) for _ in range(STEPS))
        saving.wait()
        if turn:  # the first one makes the copy's memory and a process group
            found["without"].append(without)
            found["returned"].append(returned)
            found["beside"].append(beside)
            found["done"].append(sum(saving.seconds.values()))
    clear(Path(given["folder"]) / "training")
    nbytes = sum(leaf.local.nbytes for leaf in tree.leaves(state))
    return found | {"nbytes": nbytes, "steps": STEPS}


def clock_plain(run: Callable[[], Any]) -> float:
    """As `clock`, without a sync, which would wait for the save."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


TASKS = {"save_and_load": save_and_load, "load_elsewhere": load_elsewhere, "train": train}


def main(given: dict[str, Any], out: Path) -> None:
    """Writes what the task found on rank 0, with the parts of fzero's saves on each rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    found = TASKS[given["task"]](mesh, given)
    if "parts" in found:
        told: list[Any] = [None] * mesh.size()
        dist.all_gather_object(told, found["parts"])
        found["parts"] = told
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
