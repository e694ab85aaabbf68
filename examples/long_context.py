"""Training on long sequences: logits in parts, layers computed again from inputs on the host: docs/finetune.md.

torchrun --standalone --nproc-per-node 2 examples/long_context.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from documents import make_model, read_blocks
from torch.distributed.device_mesh import init_device_mesh

import fzero


def make_step(mesh: Any, apply: Any, optimizer: Any, is_long: bool) -> Any:
    """A step of a Llama. For long sequences no rank holds logits of all tokens, or what layers computed."""

    def loss_fn(params: Any, ids: torch.Tensor) -> torch.Tensor:
        if not is_long:
            return apply(params, input_ids=ids, labels=ids, use_cache=False).loss
        body = fzero.remat(apply, policy="offload")  # what it saves waits in the memory of the host
        output = body(params, input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        hidden = output.hidden_states[-1][:, :-1]
        return fzero.tiled_cross_entropy(hidden, params["lm_head"]["weight"], ids[:, 1:], chunks=16)

    def train_step(params: Any, opt_state: Any, ids: torch.Tensor) -> Any:
        loss, grads = fzero.value_and_grad(loss_fn)(params, ids)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    return (fzero.simulate if isinstance(mesh, fzero.VirtualMesh) else fzero.shard)(train_step, mesh)


def main(mesh: Any = None, steps: int = 20, length: int = 2048) -> list[float]:
    if mesh is None:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    params, apply = fzero.lower(make_model(length))
    optimizer, losses = fzero.optim.adamw(1e-2), []
    params = fzero.partition(params, mesh)
    opt_state = optimizer.init(params)
    batches = torch.tensor([row["input_ids"] for row in read_blocks(length)[: 2 * steps]]).split(2)
    plain, step = (make_step(mesh, apply, optimizer, is_long) for is_long in (False, True))
    whole, parts = (each.trace(params, opt_state, batches[0]).memory() for each in (plain, step))
    print(f"peak of a plain step {whole.peak} bytes; of this step {parts.peak}, and {parts.host} on the host")
    for ids in batches:
        params, opt_state, loss = step(params, opt_state, ids)
        losses.append(float(loss))
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    main(steps=parser.parse_args().steps)
