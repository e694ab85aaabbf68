"""Each optimizer against its reference: torch.optim where torch has it, else the paper's formula by hand.

Every reference is run on the whole leaves. The optimizer is run on plain tensors, and on 1 and 8 virtual ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.base.mesh import VirtualMesh

STEPS = 25
ROUNDINGS = 10
"""In each step a parameter of size |p| is rounded once, by eps / 2 of it, on both sides. The movement is the result of
some 20 operations in another order on each side, and of as many more for the history of the moments. Each is off by
eps / 2, mostly not in one direction. So results differ by ROUNDINGS * eps * STEPS * (|p| / 10 + movement)."""

Reference = Callable[[dict[str, Tensor], list[dict[str, Tensor]]], dict[str, Tensor]]


def first_params(dtype: torch.dtype) -> dict[str, Tensor]:
    """A matrix, whose rows 8 ranks cut; a bias; a stack of two matrices; a number; and nothing."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"weight": (9, 7), "bias": (7,), "experts": (2, 5, 6), "scale": (), "empty": (0, 3)}
    return {key: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for key, shape in shapes.items()}


def gradients(dtype: torch.dtype) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    one = first_params(dtype)
    return [
        {key: torch.randn(p.shape, generator=draw, dtype=torch.float64).to(dtype) for key, p in one.items()}
        for _ in range(STEPS)
    ]


def of_torch(name: str, **options: Any) -> Reference:
    """The parameters after all steps of an optimizer of torch."""

    def run(params: dict[str, Tensor], grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        params = {key: p.clone().requires_grad_() for key, p in params.items() if p.numel()}  # Adafactor divides by it
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(params["weight"].dtype)  # that of torch's own numbers, such as NAdam's product
        try:
            optimizer = getattr(torch.optim, name)(list(params.values()), foreach=False, **options)
            for grad in grads:
                for key, p in params.items():
                    p.grad = grad[key].clone()
                optimizer.step()
        finally:
            torch.set_default_dtype(dtype)
        return {key: p.detach() for key, p in params.items()}

    return run


def leaf_by_leaf(rule: Callable[..., tuple[Tensor, Any]]) -> Reference:
    """The parameters after all steps of `rule(p, g, state, t) -> (p, state)`, whose first state is None."""

    def run(params: dict[str, Tensor], grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        new = {}
        for key, p in params.items():
            state = None
            for t, grad in enumerate(grads, 1):
                p, state = rule(p, grad[key], state, t)
            new[key] = p
        return new

    return run


def lion(p: Tensor, g: Tensor, m: Tensor | None, t: int) -> tuple[Tensor, Tensor]:
    """Algorithm 2 of the paper."""
    m = torch.zeros_like(p) if m is None else m
    return p - 0.01 * ((0.9 * m + 0.1 * g).sign() + 0.1 * p), 0.99 * m + 0.01 * g


def lamb(p: Tensor, g: Tensor, state: Any, t: int) -> tuple[Tensor, Any]:
    """Algorithm 2 of the paper, with the identity for its function of norms."""
    m, v = state or (torch.zeros_like(p), torch.zeros_like(p))
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * p
    ratio = p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0
    return p - 0.01 * ratio * u, (m, v)


def schedule_free(p: Tensor, g: Tensor, state: Any, t: int) -> tuple[Tensor, Any]:
    """The paper's three sequences, with a warmup of four steps: x and z, whose mixture y the step is given as `p`."""
    x, z, total, most = state or (p, p, 0.0, 0.0)
    rate = 0.1 * min(1.0, t / 4)
    most = max(most, rate)
    total += most**2
    z = z - rate * g
    x = x + most**2 / total * (z - x)
    return 0.9 * x + 0.1 * z, (x, z, total, most)


def warm_up(count: Any) -> Any:
    return 0.1 * torch.clamp((count + 1.0) / 4, max=1.0).to(torch.float64)


class Case(NamedTuple):
    optimizer: optim.GradientTransformation
    reference: Reference


CASES = {
    "sgd": Case(optim.sgd(), of_torch("SGD")),
    "sgd, momentum and decay": Case(
        optim.sgd(0.1, 0.9, weight_decay=0.1), of_torch("SGD", lr=0.1, momentum=0.9, weight_decay=0.1)
    ),
    "sgd, nesterov": Case(
        optim.sgd(0.1, 0.9, True, 0.1), of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    ),
    "adam": Case(optim.adam(), of_torch("Adam")),
    "adam, decay": Case(optim.adam(0.01, weight_decay=0.1), of_torch("Adam", lr=0.01, weight_decay=0.1)),
    "adamw": Case(optim.adamw(), of_torch("AdamW")),
    "nadam": Case(optim.nadam(), of_torch("NAdam")),
    "nadam, decay": Case(
        optim.nadam(0.01, 0.8, 0.99, 1e-4, 0.1, 0.1),
        of_torch("NAdam", lr=0.01, betas=(0.8, 0.99), eps=1e-4, momentum_decay=0.1, weight_decay=0.1),
    ),
    "nadam, decoupled decay": Case(
        optim.nadam(weight_decay=0.1, decoupled=True),
        of_torch("NAdam", weight_decay=0.1, decoupled_weight_decay=True),
    ),
    "adagrad": Case(optim.adagrad(), of_torch("Adagrad")),
    "adagrad, decays": Case(
        optim.adagrad(0.1, 0.2, 0.5, 1e-3, 0.1),
        of_torch("Adagrad", lr=0.1, lr_decay=0.2, initial_accumulator_value=0.5, eps=1e-3, weight_decay=0.1),
    ),
    "rmsprop": Case(optim.rmsprop(), of_torch("RMSprop")),
    "rmsprop, momentum and decay": Case(
        optim.rmsprop(0.01, 0.9, 1e-3, momentum=0.9, weight_decay=0.1),
        of_torch("RMSprop", lr=0.01, alpha=0.9, eps=1e-3, momentum=0.9, weight_decay=0.1),
    ),
    "rmsprop, centered": Case(optim.rmsprop(0.01, centered=True), of_torch("RMSprop", lr=0.01, centered=True)),
    "adafactor": Case(optim.adafactor(), of_torch("Adafactor")),
    "adafactor, decay": Case(
        optim.adafactor(0.3, 0.6, (1e-4, 1e-2), 1.5, 0.1),
        of_torch("Adafactor", lr=0.3, beta2_decay=-0.6, eps=(1e-4, 1e-2), d=1.5, weight_decay=0.1),
    ),
    "lion": Case(optim.lion(0.01, weight_decay=0.1), leaf_by_leaf(lion)),
    "lamb": Case(optim.lamb(0.01), leaf_by_leaf(lamb)),
    "schedule_free": Case(optim.schedule_free(optim.sgd(warm_up), warm_up), leaf_by_leaf(schedule_free)),
}


@functools.cache
def expected(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return CASES[name].reference(first_params(dtype), gradients(dtype))


def train(name: str, dtype: torch.dtype, world: int) -> tuple[tree.Tree, tree.Tree]:
    """Parameters and state after all steps, in full: on plain tensors where `world` is 0, else on so many virtual
    ranks."""
    optimizer, params, mesh = CASES[name].optimizer, first_params(dtype), VirtualMesh(fsdp=world or 1)

    def step(params: tree.Tree, state: Any, grads: tree.Tree) -> tuple[tree.Tree, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    if world:
        step, params = fzero.simulate(step, mesh), fzero.partition(params, mesh)
    state = optimizer.init(params)
    for grad in gradients(dtype):
        params, state = step(params, state, fzero.partition(grad, mesh, like=params) if world else grad)
    return fzero.unpartition((params, state)) if world else (params, state)


@pytest.mark.parametrize(
    ("world", "dtype"), [(0, torch.float64), (0, torch.float32), (1, torch.float32), (8, torch.float64)]
)
@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_is_its_reference(name: str, dtype: torch.dtype, world: int) -> None:
    params, _ = train(name, dtype, world)
    for key, want in expected(name, dtype).items():
        before = first_params(dtype)[key]
        if want.numel():
            moved, size = (want - before).abs().max().item(), want.abs().max().item()
            atol = ROUNDINGS * torch.finfo(dtype).eps * STEPS * (size / 10 + moved)
            assert moved > 20 * atol, key
            torch.testing.assert_close(params[key], want, rtol=0, atol=atol, msg=lambda m: f"{key}: {m}")  # noqa: B023
