"""A step as language models are trained: bf16 compute, microbatches, clipping, a warmup and a cosine.

    torchrun --standalone --nproc-per-node 2 examples/bf16_accumulate.py

Weights, gradients' averages and moments stay in float32. Weights are cast slice by slice, so bf16 is what is gathered.
"""

from __future__ import annotations

from typing import Any

import ranks
import tiny
import torch
from corpus import Batch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero

MICROBATCHES = 4


def main(mesh: DeviceMesh, steps: int) -> None:
    """Trains a GPT, prints its loss and what a step moves, and checks both."""
    params, apply = fzero.lower(tiny.byte_gpt(mesh))
    params = fzero.partition(params, mesh)
    rate = fzero.optim.warmup_cosine_decay_schedule(0.0, 1e-2, max(1, steps // 10), steps, 1e-3)
    optimizer = fzero.optim.chain(
        fzero.optim.clip_by_global_norm(1.0),
        fzero.optim.adamw(rate, b2=0.95, weight_decay=0.1, mask=lambda path, leaf: leaf.ndim > 1),
    )
    opt_state = optimizer.init(params)

    @fzero.precision(torch.bfloat16, reduce=torch.float32, output=torch.float32)
    def sums(params: Any, batch: Batch) -> tuple[Tensor, int]:
        losses = tiny.next_byte_loss(apply(params, batch["inputs"]), batch, reduction="sum")
        return losses, batch["targets"].numel()

    def train_step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.accumulate(sums, MICROBATCHES)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    step = fzero.shard(train_step, mesh)
    losses = []
    for batch in tiny.batches(mesh, steps, size=32):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss.item())

    moved = {(entry.op, entry.dtype) for entry in step.trace(params, opt_state, batch).comm()}
    ranks.say(mesh, f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps of {MICROBATCHES} microbatches")
    ranks.say(mesh, "moves " + ", ".join(sorted(f"{op} in {dtype}" for op, dtype in moved)))
    assert losses[-1] < 0.75 * losses[0], losses
    assert ("all_gather", torch.bfloat16) in moved and ("reduce_scatter", torch.float32) in moved, moved
    assert {leaf.dtype for leaf in fzero.tree.leaves(params)} == {torch.float32}


if __name__ == "__main__":
    ranks.run(main, steps=60)
