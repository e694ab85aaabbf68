"""fzero's ways to train: stages 1 to 3, as they are, compiled, or with state on the host; stage 3 as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from training import B1, B2, DECAY, EPS, RATE, Batch, Contender, Setup, loss_of

import fzero

ADAMW = fzero.optim.adamw(RATE, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)


def training_step(apply: Any, optimizer: Any = ADAMW, bf16: bool = False) -> Callable[..., tuple[Any, Any, Tensor]]:
    """`train_step(params, opt_state, batch)` as anyone would write it."""

    def loss_fn(params: Any, batch: Batch) -> Tensor:
        used = fzero.tree.map(lambda leaf: leaf.to(torch.bfloat16), params) if bf16 else params
        return loss_of(apply(used, batch["inputs"]), batch)

    def train_step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, Tensor]:
        loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return fzero.optim.apply_updates(params, updates), opt_state, loss

    return train_step


def sharded(
    build: Callable[[], nn.Module],
    mesh: DeviceMesh,
    bf16: bool,
    calibrate: bool = False,
    places: tuple[Any, Any] = (None, None),
    **how: Any,
) -> Contender:
    """`fzero.shard(train_step, mesh, **how)`, calibrated in front of its first step or not. Parameters and optimizer
    state lie in these places."""
    params, apply = fzero.lower(build())
    params = fzero.partition(params, mesh, to=places[0])
    opt_state = ADAMW.init(params, to=places[1])
    sharded_step = fzero.shard(training_step(apply, bf16=bf16), mesh, **how)

    def step(batch: Batch) -> Tensor:
        nonlocal params, opt_state, calibrate
        if calibrate:
            sharded_step.calibrate(params, opt_state, batch)
            calibrate = False
        params, opt_state, loss = sharded_step(params, opt_state, batch)
        return loss

    return Contender(step, lambda batch: sharded_step.trace(params, opt_state, batch))


CONTENDERS: dict[str, Setup] = {
    **{f"fzero-{stage}": partial(sharded, stage=stage) for stage in (1, 2, 3)},
    **{f"fzero-{stage}-compiled": partial(sharded, stage=stage, compile=True) for stage in (1, 2, 3)},
    "fzero-2-offload": partial(sharded, stage=2, places=(None, fzero.host())),
    "fzero-3-offload": partial(sharded, stage=3, places=(fzero.host(), fzero.host())),
    "fzero-3-graph": partial(sharded, stage=3, compile="graph"),
}
