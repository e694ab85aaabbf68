"""The ways to train whose losses `parity.py` compares: one step each, in one of three precisions.

Weights, moments and averages are float32. Weights are cast to `compute`, and float16 has a dynamic loss scale. Betas,
eps and decay of AdamW are those of `training`; gradients are clipped as torch clips.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed_steps import config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import B1, B2, DECAY, EPS, Batch, loss_of

import fzero
from fzero import optim

RATE, MAX_NORM = 1e-3, 1.0
SCALE, GROWTH_INTERVAL = 2.0**10, 25
"""The first loss scale; doubled after so many clean steps, halved by an overflow."""

Step = Callable[[Batch, float], Tensor]
"""(batch, factor) -> the loss of the batch, which is multiplied by `factor` before it is differentiated."""
Setup = Callable[[Callable[[], nn.Module], DeviceMesh, torch.dtype], Step]
"""`(build, mesh, compute) -> Step`: `build()` is the module to train."""


def one_device(build: Callable[[], nn.Module], mesh: DeviceMesh, compute: torch.dtype, parts: int) -> Step:
    """torch.optim on plain tensors. A batch of several parts has the mean of the parts' gradients, as ranks do."""
    model = build()
    optimizer, scaler = adamw(model), grad_scaler(compute)

    def step(batch: Batch, factor: float) -> Tensor:
        losses = []
        for i in range(parts):
            part = {name: rows.chunk(parts)[i] for name, rows in batch.items()}
            weights = {name: parameter.to(compute) for name, parameter in model.named_parameters()}
            loss = loss_of(torch.func.functional_call(model, weights, (part["inputs"],)), part)
            scaler.scale(loss * factor).backward()
            losses.append(loss.detach())
        for parameter in model.parameters():
            parameter.grad.div_(parts)
        move(model, optimizer, scaler)
        return torch.stack(losses).mean()

    return step


def fsdp2(build: Callable[[], nn.Module], mesh: DeviceMesh, compute: torch.dtype) -> Step:
    """`fully_shard` of each block and of the rest."""
    model, policy = build(), MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer, scaler = adamw(model), grad_scaler(compute)

    def step(batch: Batch, factor: float) -> Tensor:
        loss = loss_of(model(batch["inputs"]), batch)
        scaler.scale(loss * factor).backward()
        move(model, optimizer, scaler)
        return loss.detach()

    return step


def sharded(build: Callable[[], nn.Module], mesh: DeviceMesh, compute: torch.dtype, stage: int) -> Step:
    """`fzero.shard` at a stage."""
    params, apply = fzero.lower(build())
    params = fzero.partition(params, mesh)
    optimizer = optim.chain(
        optim.clip_by_global_norm(MAX_NORM, "torch"), optim.adamw(RATE, B1, B2, EPS, weight_decay=DECAY)
    )
    scaler = optim.loss_scale.standard(SCALE, growth_interval=GROWTH_INTERVAL)
    if compute == torch.float16:
        optimizer = optim.apply_if_finite(optimizer, max_consecutive_errors=10)
    opt_state, scale = optimizer.init(params), scaler.init(params)

    @fzero.precision(compute, reduce=torch.float32, output=torch.float32)
    def loss_fn(params: Any, batch: Batch) -> Tensor:
        return loss_of(apply(params, batch["inputs"]), batch)

    def train_step(params: Any, opt_state: Any, scale: Any, batch: Batch, factor: Tensor) -> tuple[Any, ...]:
        def scaled(params: Any) -> tuple[Tensor, Tensor]:
            loss = loss_fn(params, batch)
            return loss * factor * scale.scale, loss

        if compute == torch.float16:
            (_, loss), grads = fzero.value_and_grad(scaled, has_aux=True)(params)
            grads = optim.loss_scale.unscale(grads, scale)
        else:
            loss, grads = fzero.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        if compute == torch.float16:
            scale = scaler.update(scale, opt_state.last_finite)
        return optim.apply_updates(params, updates), opt_state, scale, fzero.pmean(loss, "fsdp")

    run = fzero.shard(train_step, mesh, stage=stage)

    def step(batch: Batch, factor: float) -> Tensor:
        nonlocal params, opt_state, scale
        params, opt_state, scale, loss = run(params, opt_state, scale, batch, torch.tensor(factor))
        return loss

    return step


def zero(build: Callable[[], nn.Module], mesh: DeviceMesh, compute: torch.dtype, stage: int) -> Step:
    """`deepspeed.initialize` with torch's AdamW and DeepSpeed's clipping."""
    import deepspeed  # here: where fzero's ranks run it is not installed

    model = build()
    block = sum(parameter.numel() for parameter in model.get_submodule("blocks.0").parameters())
    given = config(stage, compute == torch.bfloat16, block) | {
        "gradient_clipping": MAX_NORM,
        "communication_data_type": "fp32",
        "fp16": {
            "enabled": compute == torch.float16,
            "initial_scale_power": int(SCALE).bit_length() - 1,
            "loss_scale_window": GROWTH_INTERVAL,
            "hysteresis": 1,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=given, dist_init_required=False)

    def step(batch: Batch, factor: float) -> Tensor:
        loss = loss_of(engine(batch["inputs"]), batch)
        engine.backward(loss * factor)
        engine.step()
        return loss.detach()

    return step


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(B1, B2), eps=EPS, weight_decay=DECAY)


def grad_scaler(compute: torch.dtype) -> torch.amp.GradScaler:
    enabled = compute == torch.float16
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWTH_INTERVAL, enabled=enabled)


def move(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Clips, steps and drops the gradients, in place. A step whose gradients are not finite is skipped."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


REFERENCE = "torch, one device"
CONTENDERS: dict[str, Setup] = {
    REFERENCE: partial(one_device, parts=1),
    "torch, one device, two halves": partial(one_device, parts=2),
    "FSDP2": fsdp2,
    **{f"fzero, stage {stage}": partial(sharded, stage=stage) for stage in (1, 2, 3)},
    **{f"DeepSpeed, stage {stage}": partial(zero, stage=stage) for stage in (1, 2, 3)},
}
"""Those of "one device" get the whole batch on every rank, others their rows of it."""
