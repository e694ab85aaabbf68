"""Distillation: a small student learns the predictions of a larger teacher; both are sharded, and meet in one step.

    torchrun --standalone --nproc-per-node 2 examples/distill.py

The teacher is trained first, by an ordinary step. Then it is an argument of the student's step, which returns only the
student. Hinton et al., https://arxiv.org/abs/1503.02531.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ranks
import tiny
import torch
from corpus import Batch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import kl_div, log_softmax

import fzero

TEMPERATURE = 2.0
OPTIMIZER = fzero.optim.chain(fzero.optim.clip_by_global_norm(1.0), fzero.optim.adamw(5e-3, weight_decay=0.1))


def main(mesh: DeviceMesh, steps: int) -> None:
    """Trains a teacher, distills it, prints both losses, and checks that the student comes nearer."""
    big, teach = fzero.lower(tiny.byte_gpt(mesh, dim=96, layers=3))
    small, learn = fzero.lower(tiny.byte_gpt(mesh, dim=32, layers=1, seed=1))
    teacher, student = fzero.partition(big, mesh), fzero.partition(small, mesh)

    def next_byte_loss(teacher: Any, batch: Batch) -> Tensor:
        return tiny.next_byte_loss(teach(teacher, batch["inputs"]), batch)

    def divergence(student: Any, teacher: Any, batch: Batch) -> Tensor:
        """Kullback and Leibler's, in nats a byte."""
        with torch.no_grad():
            target = log_softmax(teach(teacher, batch["inputs"]) / TEMPERATURE, dim=-1)
        given = log_softmax(learn(student, batch["inputs"]) / TEMPERATURE, dim=-1)
        return kl_div(given.flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean")

    teacher, losses = train(mesh, next_byte_loss, teacher, (), tiny.batches(mesh, steps))
    taught = fzero.unpartition(teacher)
    student, gaps = train(mesh, divergence, student, (teacher,), tiny.batches(mesh, steps))

    ranks.say(mesh, f"teacher: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    ranks.say(mesh, f"student: divergence from the teacher {gaps[0]:.3f} -> {gaps[-1]:.3f}")
    same = fzero.tree.map(torch.equal, taught, fzero.unpartition(teacher))
    assert all(fzero.tree.leaves(same)), f"the teacher moved: {same}"
    assert losses[-1] < 0.75 * losses[0] and gaps[-1] < 0.5 * gaps[0], (losses, gaps)


def train(
    mesh: DeviceMesh, loss_fn: Callable[..., Tensor], params: Any, others: tuple[Any, ...], batches: Any
) -> tuple[Any, list[float]]:
    """Parameters that minimize `loss_fn(params, *others, batch)`, and the loss of each step."""
    opt_state = OPTIMIZER.init(params)

    def train_step(params: Any, opt_state: Any, others: tuple[Any, ...], batch: Batch) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.value_and_grad(loss_fn)(params, *others, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    step, losses = fzero.shard(train_step, mesh), []
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, others, batch)
        losses.append(loss.item())
    return params, losses


if __name__ == "__main__":
    ranks.run(main, steps=60)
