"""LoRA: train two small factors a layer, on all ranks, beside a frozen GPT that is sharded as well.

    torchrun --standalone --nproc-per-node 2 examples/lora.py

Frozen leaves get neither gradients nor optimizer state: `fzero.tree.split` takes the trainable half out of the tree,
and only that half is differentiated. Hu et al., https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

from typing import Any

import ranks
import tiny
import torch
from corpus import Batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import linear

import fzero


class LoRA(nn.Module):
    """`linear(x) + x A B`: the product of two factors of rank `rank`, zero at the start."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + linear(linear(x, self.lora_a), self.lora_b)


def adapt(module: nn.Module, rank: int) -> nn.Module:
    """`module` with every `nn.Linear` in it adapted."""
    for name, child in module.named_children():
        setattr(module, name, LoRA(child, rank) if isinstance(child, nn.Linear) else adapt(child, rank))
    return module


def main(mesh: DeviceMesh, steps: int) -> None:
    """Adapts a GPT, prints the loss and how little is trained, and checks that the frozen half stayed."""
    params, apply = fzero.lower(adapt(tiny.byte_gpt(mesh), rank=4).to(mesh.device_type))
    lora, frozen = fzero.tree.split(params, lambda path, leaf: "lora_" in path)
    original = fzero.tree.map(torch.clone, frozen)
    lora, frozen = fzero.partition(lora, mesh), fzero.partition(frozen, mesh)
    optimizer = fzero.optim.adamw(1e-2)
    opt_state = optimizer.init(lora)

    def loss_fn(lora: Any, frozen: Any, batch: Batch) -> Tensor:
        logits = apply(fzero.tree.merge(lora, frozen), batch["inputs"])
        return tiny.next_byte_loss(logits, batch)

    def train_step(lora: Any, opt_state: Any, frozen: Any, batch: Batch) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.value_and_grad(loss_fn)(lora, frozen, batch)
        updates, opt_state = optimizer.update(grads, opt_state, lora)
        return fzero.optim.apply_updates(lora, updates), opt_state, loss

    step = fzero.shard(train_step, mesh)
    losses = []
    for batch in tiny.batches(mesh, steps):
        lora, opt_state, loss = step(lora, opt_state, frozen, batch)
        losses.append(loss.item())

    trained, kept = (sum(leaf.numel() for leaf in fzero.tree.leaves(half)) for half in (lora, frozen))
    ranks.say(mesh, f"trained {trained:,} of {trained + kept:,} parameters: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    same = fzero.tree.map(torch.equal, original, fzero.unpartition(frozen))
    assert all(fzero.tree.leaves(same)), f"frozen leaves moved: {same}"
    assert losses[-1] < 0.8 * losses[0], losses


if __name__ == "__main__":
    ranks.run(main, steps=40)
