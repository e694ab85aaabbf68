"""Seconds a step of a small GPT takes on virtual ranks, in one process.

python benchmarks/simulate.py --ranks 1 8 64
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor
from torch.nn.functional import cross_entropy

import fzero

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=256, seq=32, dim=64, layers=2, heads=2)


def seconds(ranks: int, steps: int) -> tuple[float, list[float]]:
    """Of tracing with the first step, and of each step after it, on one sequence a rank."""
    torch.manual_seed(0)
    mesh = fzero.VirtualMesh(fsdp=ranks)
    params, apply = fzero.lower(GPT(CONFIG))
    optimizer = fzero.optim.adamw(1e-3)

    def train_step(params: Any, opt_state: Any, tokens: Tensor) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.value_and_grad(lambda p: cross_entropy(apply(p, tokens).flatten(0, 1), tokens.flatten()))(
            params
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    params = fzero.partition(params, mesh)
    step, opt_state = fzero.simulate(train_step, mesh), optimizer.init(params)
    tokens, taken = torch.randint(256, (ranks, CONFIG.seq)), []
    for _ in range(steps + 1):
        start = time.perf_counter()
        params, opt_state, _ = step(params, opt_state, tokens)
        taken.append(time.perf_counter() - start)
    return taken[0], taken[1:]


def main() -> None:
    """Prints a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    print(f"{'ranks':>6} {'first step':>11} {'then, median':>13}   seconds")
    for ranks in options.ranks:
        first, then = seconds(ranks, options.steps)
        print(f"{ranks:6d} {first:11.2f} {statistics.median(then):13.3f}")


if __name__ == "__main__":
    main()
