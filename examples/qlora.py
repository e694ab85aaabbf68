"""QLoRA: train two small factors a layer, on all ranks, beside a frozen GPT that is held as 4-bit codes.

    torchrun --standalone --nproc-per-node 2 examples/qlora.py

The frozen weights lie in slices of codes, are gathered as codes, and are dequantized where a layer uses them: in the
backward pass once more. Dettmers et al., https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

from typing import Any

import ranks
import tiny
import torch
from corpus import Batch
from lora import adapt
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero


def list_codes(params: Any) -> list[fzero.Sharded]:
    """The leaves that hold codes and scales."""
    return [leaf for leaf in fzero.tree.leaves(params) if leaf.dtype == torch.uint8]


def main(mesh: DeviceMesh, steps: int) -> None:
    """Adapts a quantized GPT, prints its bytes and the loss, and checks that the codes stayed."""
    model = adapt(tiny.byte_gpt(mesh), rank=4).to(mesh.device_type)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    whole, apply = fzero.lower(model)
    params = fzero.quantize(whole, bits=4, block=64, levels="nf4")
    sizes = [sum(leaf.nbytes for leaf in fzero.tree.leaves(each)) for each in (whole, params)]
    params = fzero.partition(params, mesh)
    before = [leaf.local.clone() for leaf in list_codes(params)]
    optimizer = fzero.optim.adamw(1e-2)
    opt_state = optimizer.init(params)

    def train_step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.value_and_grad(lambda p: tiny.next_byte_loss(apply(p, batch["inputs"]), batch))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    step = fzero.shard(train_step, mesh)
    losses = []
    for batch in tiny.batches(mesh, steps):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss.item())

    ranks.say(mesh, f"{sizes[0]:,} bytes held as {sizes[1]:,}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert all(torch.equal(old, leaf.local) for old, leaf in zip(before, list_codes(params))), "codes moved"
    assert losses[-1] < 0.8 * losses[0], losses


if __name__ == "__main__":
    ranks.run(main, steps=40)
