"""fp16 compute with a loss scale: gradients overflow twice, both steps are skipped, the second halves the scale.

    torchrun --standalone --nproc-per-node 2 examples/fp16_overflow.py

The scale is DeepSpeed's: with a hysteresis of 2 the first overflow only spends the hysteresis.
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
from fzero import optim

OVERFLOWS = {3, 6}
"""Steps whose loss is a million times larger."""


def main(mesh: DeviceMesh, steps: int) -> None:
    """Trains a GPT, prints each step that is skipped, and checks that such a step changes no weight."""
    params, apply = fzero.lower(tiny.byte_gpt(mesh))
    params = fzero.partition(params, mesh)
    scaler = optim.loss_scale.dynamic(init_scale=2.0**14)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    optimizer = optim.apply_if_finite(optimizer, max_consecutive_errors=10)
    opt_state, scale = optimizer.init(params), scaler.init(params)

    @fzero.precision(torch.float16, reduce=torch.float32, output=torch.float32)
    def loss_fn(params: Any, batch: Batch) -> Tensor:
        return tiny.next_byte_loss(apply(params, batch["inputs"]), batch)

    def train_step(params: Any, opt_state: Any, scale: Any, batch: Batch, factor: Tensor) -> tuple[Any, ...]:
        def scaled_loss(params: Any) -> tuple[Tensor, Tensor]:
            loss = loss_fn(params, batch)
            return loss * scale.scale * factor, loss

        (_, loss), grads = fzero.value_and_grad(scaled_loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(optim.loss_scale.unscale(grads, scale), opt_state, params)
        scale = scaler.update(scale, opt_state.last_finite)
        return optim.apply_updates(params, updates), opt_state, scale, fzero.pmean(loss, "fsdp")

    step = fzero.shard(train_step, mesh)
    losses, scales, skipped = [], [], set()
    for index, batch in enumerate(tiny.batches(mesh, steps)):
        before, scale_before = fzero.unpartition(params), scale.scale.full_tensor().item()
        factor = torch.tensor(1e6 if index in OVERFLOWS else 1.0, device=mesh.device_type)
        params, opt_state, scale, loss = step(params, opt_state, scale, batch, factor)
        losses.append(loss.item())
        scales.append(scale.scale.full_tensor().item())
        if not opt_state.last_finite.full_tensor():
            skipped.add(index)
            ranks.say(mesh, f"step {index}: overflow, skipped; scale {scale_before:.0f} -> {scales[-1]:.0f}")
            same = fzero.tree.map(torch.equal, before, fzero.unpartition(params))
            assert all(fzero.tree.leaves(same)), f"a skipped step moved {same}"

    ranks.say(mesh, f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, scale {scales[-1]:.0f}, skipped {sorted(skipped)}")
    assert skipped == OVERFLOWS, skipped
    assert scales[3] == 2.0**14 and scales[6] == 2.0**13, scales
    assert losses[-1] < 0.75 * losses[0], losses


if __name__ == "__main__":
    ranks.run(main, steps=40)
