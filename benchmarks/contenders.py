"""The ways to train that are compared. Each takes the same module on the same mesh, AdamW with the same numbers.

A contender is a function of `Setup`'s type; to add one, write it and name it in `CONTENDERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import fzero

Batch = dict[str, Tensor]

RATE, B1, B2, EPS, DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1


class Contender(NamedTuple):
    """Ready to train: a step on this rank's batch, which returns its loss, and the tensors held between steps.

    One that can tell before it runs predicts the peak bytes of a step.
    """

    step: Callable[[Batch], Tensor]
    state: Callable[[], Any]
    predict: Callable[[Batch], int] | None = None


Setup = Callable[[nn.Module, DeviceMesh, bool], Contender]
"""`(model, mesh, bf16) -> Contender`: takes the model over. With `bf16`, weights are cast for compute and gathers."""


def fzero_stage3(model: nn.Module, mesh: DeviceMesh, bf16: bool) -> Contender:
    """fzero, every bucket released after each use."""
    params, apply = fzero.lower(model)
    optimizer = fzero.optim.adamw(RATE, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        used = fzero.tree.map(lambda leaf: leaf.to(torch.bfloat16), params) if bf16 else params
        return _loss(apply(used, batch["inputs"]), batch)

    def train_step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    params = fzero.partition(params, mesh)
    opt_state = optimizer.init(params)
    sharded_step = fzero.shard(train_step, mesh, stage=3)

    def step(batch: Batch) -> Tensor:
        nonlocal params, opt_state
        params, opt_state, loss = sharded_step(params, opt_state, batch)
        return loss

    def predict(batch: Batch) -> int:
        return sharded_step.trace(params, opt_state, batch).memory().peak

    return Contender(step, lambda: (params, opt_state), predict)


def fsdp2(model: nn.Module, mesh: DeviceMesh, bf16: bool) -> Contender:
    """torch's `fully_shard`: a group for each block, resharded after forward, and one for the rest.

    The rest keeps torch's default, which is to stay gathered: its head is used last in forward and first in backward.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _module_loop(model, bf16=False)


def floor(model: nn.Module, mesh: DeviceMesh, bf16: bool) -> Contender:
    """Every rank trains its own copy and none communicates: not a way to train, but no way can be faster."""
    return _module_loop(model, bf16)


CONTENDERS: dict[str, Setup] = {"fzero": fzero_stage3, "fsdp2": fsdp2, "floor": floor}


def _module_loop(model: nn.Module, bf16: bool) -> Contender:
    """The loop that everyone writes around a module."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(B1, B2), eps=EPS, weight_decay=DECAY, fused=True)

    def step(batch: Batch) -> Tensor:
        with torch.autocast(batch["inputs"].device.type, torch.bfloat16, enabled=bf16):
            loss = _loss(model(batch["inputs"]), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def state() -> list[Tensor]:
        moments = [value for entry in optimizer.state.values() for value in entry.values()]
        tensors = [*model.parameters(), *model.buffers(), *moments]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    return Contender(step, state)


def _loss(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), batch["targets"].flatten())
