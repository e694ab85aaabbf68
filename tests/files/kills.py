"""Kills: processes that are killed while their state is on a disk, and what the next process finds.

    python tests/files/kills.py --kills 100 --seed 0

A process loads the last checkpoint to a disk, compares it with what is known of its step, and goes on: each step makes
new state on the disk and writes over other state in place. Now and then it saves. It is killed after a random time. The
next process has to find a checkpoint that is whole, and no folder of a dead run once it has made its own.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import checkpoint, tree

MESH = fzero.VirtualMesh(fsdp=2)
SHAPES = {"up": (70, 41), "down": (3000,), "head": (513, 7)}
ERROR = 3


def start_state(to: Any) -> Any:
    """The state before the first step."""
    whole = {name: torch.arange(float(torch.Size(shape).numel())).view(shape) for name, shape in SHAPES.items()}
    params = fzero.partition(whole, MESH, to=to)
    return {"params": params, "sums": tree.map(torch.zeros_like, params), "step": 0}


def advance(state: Any) -> Any:
    """The state behind one more step: new parameters, and sums that are written in place."""
    step = state["step"] + 1
    params = tree.map(lambda x: x * 0.75 + step, state["params"])
    tree.map(lambda total, x: total.local.copy_(total.local + x.local), state["sums"], params)
    return {"params": params, "sums": state["sums"], "step": step}


def check(state: Any, to: Any) -> None:
    """Assert that a state is what its step leaves, bit for bit. Nothing of `to` is read for what is expected."""
    expected = start_state(None)
    for _ in range(state["step"]):
        expected = advance(expected)
    names = tree.paths(state)
    pairs = zip(names, tree.leaves(fzero.unpartition(state)), tree.leaves(fzero.unpartition(expected)), strict=True)
    for path, got, known in pairs:
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(known)), f"{path} of step {state['step']}"


def run(path: Path, steps: int, begun: Callable[[], Any]) -> None:
    """Go on from the last checkpoint for some steps."""
    place = fzero.disk(path / "disk")
    state = start_state(place)
    found = os.listdir(place.path)
    assert len(found) == 1, f"folders of dead runs: {found}"
    if checkpoint.latest(path / "run") is not None:
        state = checkpoint.load(path / "run", state, donate=True)
    begun()
    check(state, place)
    for _ in range(steps):
        state = advance(state)
        if state["step"] % 3 == 0:
            checkpoint.save(path / "run", state, step=state["step"], keep=2, wait=state["step"] % 2 == 0)


def fork(path: Path, steps: int) -> tuple[int, int]:
    """`(process, pipe)` of a child that runs. The pipe says when its state is on the disk."""
    receive, send = os.pipe()
    child = os.fork()
    if child:
        os.close(send)
        return child, receive
    try:
        run(path, steps, lambda: os.write(send, b"."))
        code = 0
    except BaseException:
        traceback.print_exc()
        code = ERROR
    os._exit(code)  # what ends a process without a kill is tested elsewhere


def kill_rounds(path: Path, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    (path / "disk").mkdir()
    checkpoint.save(path / "warm", start_state(None), step=0)  # what torch and fzero do once, children need not do
    checkpoint.load(path / "warm", start_state(None))
    steps = list[int]()
    for _ in range(kills):
        child, pipe = fork(path, 10**6)
        assert os.read(pipe, 1), "a run failed before its first step"
        time.sleep(draw.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(pipe)
        assert os.WIFSIGNALED(status), f"a run ended by itself, with status {status}"
        steps.append(checkpoint.latest(path / "run") or 0)
    child, pipe = fork(path, 3)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert steps == sorted(steps) and steps[-1] > 0, steps
    print(f"{kills} kills: {len(set(steps))} different checkpoints went on, the last of step {steps[-1]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", help="a folder for the files, by default in memory: to sync takes no time there")
    given = parser.parse_args()
    torch.set_num_threads(1)  # threads of kernels do not outlive a fork
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=given.scratch or memory) as folder:
        kill_rounds(Path(folder), given.kills, given.seed)
