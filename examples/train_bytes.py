"""Train a byte-level GPT on the text of Python's standard library, sharded over all ranks that torchrun starts.

    torchrun --standalone --nproc-per-node 2 examples/train_bytes.py --stage 3
    python examples/train_bytes.py                 # the same step, unsharded, in one process

It runs on GPUs when there are any, else on CPU cores. `--batch` counts the windows of all ranks together and the data
depends on the seed alone, so the losses are the same on any number of ranks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import bigram
import corpus
import report
import torch
from corpus import Batch, Cut
from gpt import GPT, GPTConfig
from measure import measure
from ranks import finish, start
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import fzero

MEASURED_STEPS = 5


def main(flags: argparse.Namespace) -> None:
    """Trains, evaluates, and reports what a step cost."""
    device, mesh = start()
    rank, world = (mesh.get_rank(), mesh.size()) if mesh else (0, 1)
    text, cut = corpus.stdlib(device), Cut(flags.batch, flags.seq, rank, world)

    torch.manual_seed(flags.seed)
    config = GPTConfig(vocab=256, seq=flags.seq, dim=flags.dim, layers=flags.layers, heads=flags.heads)
    params, apply = fzero.lower(GPT(config).to(device))
    rate = fzero.optim.warmup_cosine_decay_schedule(0.0, flags.lr, flags.steps // 10, flags.steps, flags.lr / 10)
    optimizer = fzero.optim.chain(
        fzero.optim.clip_by_global_norm(1.0),
        fzero.optim.adamw(rate, b2=0.95, weight_decay=0.1, mask=lambda path, leaf: leaf.ndim > 1),
    )

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        logits = apply(params, batch["inputs"])
        return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def train_step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    def shard(fn: Callable[..., Any]) -> Any:
        return fzero.shard(fn, mesh, stage=flags.stage) if mesh else fn

    params = fzero.partition(params, mesh) if mesh else params
    opt_state = optimizer.init(params)
    step, evaluate = shard(train_step), shard(torch.no_grad()(loss_fn))

    if rank == 0:
        numel = sum(leaf.numel() for leaf in fzero.tree.leaves(params))
        print(report.heading(numel, world, flags.stage), flush=True)
    with progress(flags.steps * flags.batch * flags.seq, rank) as bar:
        for index in range(flags.steps):
            batch = corpus.train_batch(text.train, cut, seed=flags.seed, step=index)
            params, opt_state, loss = step(params, opt_state, batch)
            bar.update(flags.batch * flags.seq)
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)

    losses = [evaluate(params, part) for part in corpus.heldout_batches(text.heldout, cut, flags.heldout)]
    program = step.trace(params, opt_state, batch) if mesh else None

    def steady_steps() -> None:
        nonlocal params, opt_state
        for _ in range(MEASURED_STEPS):
            params, opt_state, _ = step(params, opt_state, batch)

    cost = measure(steady_steps, (params, opt_state, batch), device)
    if rank == 0:
        whole = corpus.heldout_batches(text.heldout, cut._replace(rank=0, world=1), flags.heldout)
        baseline = bigram.bits_per_byte(bigram.count(text.train), whole)
        print(report.quality(torch.stack(losses).mean().item() / math.log(2), baseline))
        print(report.costs(cost, MEASURED_STEPS, program, world))
        if flags.program:
            print(f"\n{program}")
    finish(mesh)


def progress(tokens: int, rank: int) -> tqdm[Any]:
    """The bar, on rank 0 only."""
    return tqdm(total=tokens, unit=" tokens", unit_scale=True, disable=rank > 0, mininterval=0.5)


def parse() -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128, help="bytes that the model sees at once")
    parser.add_argument("--batch", type=int, default=16, help="windows a step, of all ranks together")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3), help="ZeRO stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", action="store_true", help="also print the step's program")
    parser.add_argument("--heldout", type=int, default=48, help="held-out batches to evaluate on")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
