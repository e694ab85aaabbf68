"""Kills: processes that are killed while they train state on a disk, and what the next process finds.

    python tests/files/kills.py --kills 100 --seed 0

A process loads the last checkpoint to a disk, compares it with the same training in memory, goes on, and saves every
third step. It is killed after a random time. The next process has to find a checkpoint that is whole, and no file of a
dead run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import checkpoint, optim, tree

MESH = fzero.VirtualMesh(fsdp=2)
OPTIMIZER = optim.adamw(0.1)
BATCH = torch.linspace(-1, 1, 4 * 7).view(4, 7)


def train_step(params: Any, state: Any, x: Any) -> Any:
    grads = fzero.grad(lambda p: (torch.tanh(x @ p["up"]) @ p["down"]).square().mean())(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optim.apply_updates(params, updates), state


STEP = fzero.simulate(train_step, MESH)


def start_training(to: Any) -> Any:
    """Parameters and Adam's state before the first step."""
    whole = {"up": torch.linspace(-1, 1, 7 * 600).view(7, 600), "down": torch.linspace(1, 2, 600 * 5).view(600, 5)}
    params = fzero.partition(whole, MESH, to=to)
    return params, OPTIMIZER.init(params, to=to)


def train(params: Any, state: Any, steps: int) -> Any:
    for _ in range(steps):
        params, state = STEP(params, state, BATCH)
    return params, state


def check(got: Any, expected: Any) -> None:
    """Assert that two trees hold the same values, bit for bit."""
    pairs = zip(tree.paths(got), tree.leaves(fzero.unpartition(got)), tree.leaves(fzero.unpartition(expected)))
    for path, x, known in pairs:
        assert torch.equal(x, known), path


def run(path: Path, known: Any, steps: int, begun: Callable[[], Any]) -> None:
    """Go on for some steps from the last checkpoint, which has to hold what is `known`."""
    place = fzero.disk(path / "disk")
    params, state = start_training(place)
    assert os.listdir(place.path) == [], "files of dead runs"
    done = checkpoint.latest(path / "run") or 0
    if done:
        params, state = checkpoint.load(path / "run", (params, state), donate=True)
    check((params, state), known)
    for number in range(done + 1, done + steps + 1):
        params, state = train(params, state, 1)
        if number == done + 1:
            begun()  # the first step traces
        if number % 3 == 0:
            checkpoint.save(path / "run", (params, state), step=number, keep=2, wait=number % 2 == 0)


def start(path: Path, known: Any, steps: int) -> tuple[BaseProcess, Connection]:
    """A child that runs, and the end of a pipe that gets a word when the first step is done."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=run, args=(path, known, steps, lambda: send.send("begun")))
    child.start()
    send.close()
    return child, receive


def kill_rounds(path: Path, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    (path / "disk").mkdir()
    known, found = start_training(None), [0]
    checkpoint.save(path / "warm", known, step=0)  # what torch and fzero do once, children need not do
    checkpoint.load(path / "warm", known)
    for _ in range(kills):
        child, pipe = start(path, known, 10**6)
        pipe.recv()  # EOFError where the run failed in its first step
        time.sleep(draw.uniform(0, 0.3))
        child.kill()
        child.join()
        pipe.close()
        assert child.exitcode == -signal.SIGKILL, f"a run ended by itself, with status {child.exitcode}"
        done = checkpoint.latest(path / "run") or 0
        assert done >= found[-1], f"the checkpoint of step {found[-1]} was lost"
        known = train(*known, done - found[-1])
        found.append(done)
    child, _ = start(path, known, 3)
    child.join()
    assert child.exitcode == 0, f"the last run ended with status {child.exitcode}"
    print(f"{kills} kills: {len(set(found))} checkpoints went on, the last of step {found[-1]}")


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
