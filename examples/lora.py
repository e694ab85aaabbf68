"""LoRA: train two small factors a layer, on all ranks, beside a frozen GPT that is sharded as well.

    torchrun --standalone --nproc-per-node 2 examples/lora.py

Frozen leaves get neither gradients nor optimizer state: `fzero.tree.split` takes the trainable half out of the tree,
and only that half is differentiated. Hu et al., https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

from typing import Any

import corpus
import torch
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from train_bytes import finish, start

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


def main(steps: int = 20) -> None:
    """Adapts a GPT and prints the loss and how little is trained."""
    device, mesh = start()
    rank, world = (mesh.get_rank(), mesh.size()) if mesh else (0, 1)
    torch.manual_seed(0)
    model = adapt(GPT(GPTConfig(vocab=256, seq=64, dim=64, layers=2, heads=2)), rank=4)
    params, apply = fzero.lower(model.to(device))
    lora, frozen = fzero.tree.split(params, lambda path, leaf: "lora_" in path)
    optimizer = fzero.optim.adamw(1e-2)

    def loss_fn(lora: Any, frozen: Any, batch: corpus.Batch) -> Tensor:
        logits = apply(fzero.tree.merge(lora, frozen), batch["inputs"])
        return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def train_step(lora: Any, opt_state: Any, frozen: Any, batch: corpus.Batch) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.value_and_grad(loss_fn)(lora, frozen, batch)
        updates, opt_state = optimizer.update(grads, opt_state, lora)
        return fzero.optim.apply_updates(lora, updates), opt_state, loss

    if mesh:
        lora, frozen = fzero.partition(lora, mesh), fzero.partition(frozen, mesh)
    opt_state = optimizer.init(lora)
    step = fzero.shard(train_step, mesh) if mesh else train_step
    text, cut = corpus.stdlib(device), corpus.Cut(8, 64, rank, world)
    losses = []
    for index in range(steps):
        batch = corpus.train_batch(text.train, cut, seed=0, step=index)
        lora, opt_state, loss = step(lora, opt_state, frozen, batch)
        losses.append(loss.item())
    if rank == 0:
        trained, kept = (sum(leaf.numel() for leaf in fzero.tree.leaves(half)) for half in (lora, frozen))
        print(f"trained {trained:,} of {trained + kept:,} parameters: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    finish(mesh)


if __name__ == "__main__":
    main()
