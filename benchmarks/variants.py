"""What the variants cost in loss and save in bytes: a byte-level GPT on virtual ranks, exact and with each variant.

python benchmarks/variants.py --json benchmarks/results/variants.json

All runs of a seed have the same batches and optimizer, and the same initial weights but for the control. The control is
exact, and begins with weights that are off by a hundredth, which is about what int8 rounding takes: its gap says how
far apart two exact runs end. The table has the mean loss of the last 20 steps, its gap to that of the exact run, and
the bytes that a step moves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from machine import machine
from torch import Tensor
from torch.nn.functional import cross_entropy

import fzero
from fzero import passes
from fzero.passes.run import Pass
from fzero.variants.int8_gather import int8_gather
from fzero.variants.int8_scatter import int8_scatter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import corpus
from gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab=256, seq=64, dim=64, layers=2, heads=2)
WINDOWS = 16  # a step, of all ranks together
LAST = 20  # steps whose losses are averaged
RATE = 1e-3  # at 4e-3, the main job's, two exact runs end up to 4 % apart
NOISE = 1e-2  # of each initial weight of the control
VARIANTS: dict[str, Pass | None] = {
    "exact": None,
    "control": None,
    "int8_gather": int8_gather,
    "int8_scatter": int8_scatter,
}


class Outcome(NamedTuple):
    """The loss of each step, and the bytes that a step moves by kind of collective."""

    losses: list[float]
    moved: dict[str, int]

    @property
    def loss(self) -> float:
        """The mean loss of the last steps."""
        return fmean(self.losses[-LAST:])


def train(variant: Pass | None, ranks: int, steps: int, stage: int, seed: int, noise: float, text: Tensor) -> Outcome:
    """Train the GPT for some steps on virtual ranks, with a variant among the default passes or without.

    `noise` disturbs each initial weight by about this part of its size.
    """
    torch.manual_seed(seed)
    mesh = fzero.VirtualMesh(fsdp=ranks)
    params, apply = fzero.lower(GPT(CONFIG))
    params = fzero.tree.map(lambda p: p * (1 + noise * torch.randn(p.shape)), params)
    rate = fzero.optim.warmup_cosine_decay_schedule(0.0, RATE, steps // 10, steps, RATE / 10)
    optimizer = fzero.optim.adamw(rate, b2=0.95, weight_decay=0.1, mask=lambda path, leaf: leaf.ndim > 1)

    def loss_fn(params: Any, batch: corpus.Batch) -> Tensor:
        return cross_entropy(apply(params, batch["inputs"]).flatten(0, 1), batch["targets"].flatten())

    def train_step(params: Any, opt_state: Any, batch: corpus.Batch) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    rewrites = passes.defaults(stage=stage)
    rewrites = rewrites if variant is None else passes.insert(rewrites, variant, before="prefetch")
    step = fzero.simulate(train_step, mesh, passes=rewrites)
    params = fzero.partition(params, mesh)
    opt_state, cut, losses = optimizer.init(params), corpus.Cut(WINDOWS, CONFIG.seq), []
    first = corpus.train_batch(text, cut, seed=seed, step=0)
    state, moved = step.init_pass_state(params, opt_state, first), Counter[str]()
    for comm in step.trace(params, opt_state, first).comm():
        moved[comm.op] += comm.nbytes
    for index in range(steps):
        batch = corpus.train_batch(text, cut, seed=seed, step=index)
        result = step(params, opt_state, batch, pass_state=state)
        (params, opt_state, loss), state = result if state else (result, state)
        losses.append(loss.item())
    return Outcome(losses, dict(moved))


def main() -> None:
    """Prints a line for each seed and variant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of weights and batches")
    parser.add_argument("--json", type=Path, help="a file for every figure, the versions and the machine")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    text, runs = corpus.stdlib().train, dict[str, dict[str, Any]]()
    print(f"{'seed':<6}{'':<14}{'loss':>10}{'gap':>10}   KiB a step")
    for seed in flags.seeds:
        exact: Outcome | None = None
        for name, variant in VARIANTS.items():
            noise = NOISE if name == "control" else 0.0
            found = train(variant, flags.ranks, flags.steps, flags.stage, seed, noise, text)
            exact = exact or found
            moved = ", ".join(f"{op} {nbytes / 1024:.1f}" for op, nbytes in found.moved.items())
            print(f"{seed:<6}{name:<14}{found.loss:>10.5f}{found.loss / exact.loss - 1:>+10.3%}   {moved}", flush=True)
            runs.setdefault(str(seed), {})[name] = {"loss": found.loss, **found._asdict()}
    if flags.json:
        options = {key: value for key, value in vars(flags).items() if key != "json"}
        flags.json.write_text(json.dumps(options | machine() | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
