"""A GPT of bytes whose training goes on where it was stopped, on the ranks that are left. Kill ranks, hosts, the job.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # see docs/elastic.md
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/elastic.py --folder checkpoints
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from typing import Any

import corpus
import torch
import torch.distributed as dist
from corpus import Batch
from ranks import finish, say
from tiny import SEQ, byte_gpt, next_byte_loss
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import Dataset

import fzero
import fzero.checkpoint
import fzero.data
from fzero import State, optim


class Windows(Dataset[Batch]):
    """The windows of a text, one behind the other."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // SEQ

    def __getitem__(self, i: int) -> Batch:
        span = self.text[i * SEQ : (i + 1) * SEQ + 1].long()
        return {"inputs": span[:-1], "targets": span[1:]}


def start() -> DeviceMesh:
    """The mesh of all ranks that torchrun has started. A rank whose peers are silent for two minutes gives up."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(timeout=timedelta(minutes=2))
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("fsdp",))


def main(mesh: DeviceMesh, folder: str, steps: int, every: int) -> None:
    params, apply = fzero.lower(byte_gpt(mesh))
    params, optimizer = fzero.partition(params, mesh), optim.adamw(1e-3)
    state = State(params, optimizer.init(params), step=torch.tensor(0), seed=torch.tensor(0))

    def train_step(state: State, batch: Batch) -> tuple[State, Tensor]:
        def loss(params: Any) -> Tensor:
            return next_byte_loss(apply(params, batch["inputs"]), batch)

        value, grads = fzero.value_and_grad(loss)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state, step=state.step + 1), value

    sharded = fzero.shard(train_step, mesh)
    fzero.checkpoint.run(
        lambda state, batch: sharded(state, {name: x.to(mesh.device_type) for name, x in batch.items()}),
        fzero.partition(state, mesh),
        fzero.data.loader(Windows(corpus.stdlib().train), 16, mesh, seed=0, drop_last=True),
        folder,
        steps=steps,
        every=every,
        after=lambda number, loss: say(mesh, f"step {number} on {mesh.size()} ranks: loss {loss:.9g}"),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="of checkpoints, on a filesystem that all ranks see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps from checkpoint to checkpoint")
    given = parser.parse_args()
    mesh = start()
    main(mesh, given.folder, given.steps, given.every)
    finish(mesh)
