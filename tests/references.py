"""References of optimizers: torch.optim where torch has the optimizer, else the paper's formula by hand.

`tests/optim/test_reference.py` holds `fzero.optim` to them. `benchmarks/parity.py` prints how far results are apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.base.mesh import VirtualMesh

Leaves = dict[str, Tensor]
Reference = Callable[[Leaves, list[Leaves]], Leaves]
"""(first parameters, the gradients of each step) -> the parameters after all steps."""


class Case(NamedTuple):
    """An optimizer, the reference of it, and the reference in words."""

    optimizer: optim.GradientTransformation
    reference: Reference
    source: str


def first_params(dtype: torch.dtype) -> Leaves:
    """A matrix, whose rows 8 ranks cut; a bias; a stack of two matrices; a number; and nothing."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"weight": (9, 7), "bias": (7,), "experts": (2, 5, 6), "scale": (), "empty": (0, 3)}
    return {key: torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for key, shape in shapes.items()}


def draw_gradients(dtype: torch.dtype, steps: int) -> list[Leaves]:
    """Gradients of `first_params`, other ones at each step."""
    draw = torch.Generator().manual_seed(1)
    one = first_params(dtype)
    return [
        {key: torch.randn(p.shape, generator=draw, dtype=torch.float64).to(dtype) for key, p in one.items()}
        for _ in range(steps)
    ]


def train(
    optimizer: optim.GradientTransformation, params: Leaves, grads: list[Leaves], world: int
) -> tuple[tree.Tree, tree.Tree]:
    """Parameters and state after all steps, in full: on plain tensors where `world` is 0, else on so many virtual
    ranks."""
    mesh = VirtualMesh(fsdp=world or 1)

    def step(params: tree.Tree, state: Any, grads: tree.Tree) -> tuple[tree.Tree, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    run, held = (fzero.simulate(step, mesh), fzero.partition(params, mesh)) if world else (step, params)
    state = optimizer.init(held)
    for grad in grads:
        held, state = run(held, state, fzero.partition(grad, mesh, like=held) if world else grad)
    return fzero.unpartition((held, state)) if world else (held, state)


def run_torch(name: str, **options: Any) -> Reference:
    """The reference that runs an optimizer of torch."""

    def run(params: Leaves, grads: list[Leaves]) -> Leaves:
        params = {key: p.clone().requires_grad_() for key, p in params.items() if p.numel()}  # Adafactor divides by it
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(params["weight"].dtype)  # that of torch's own numbers, such as NAdam's product
        try:
            optimizer = getattr(torch.optim, name)(list(params.values()), **options)
            for grad in grads:
                for key, p in params.items():
                    p.grad = grad[key].clone()
                optimizer.step()
        finally:
            torch.set_default_dtype(dtype)
        return {key: p.detach() for key, p in params.items()}

    return run


def of_torch(optimizer: optim.GradientTransformation, name: str, **options: Any) -> Case:
    """The case whose reference is an optimizer of torch."""
    given = ", ".join(f"{key}={value}" for key, value in options.items())
    return Case(optimizer, run_torch(name, **options), f"torch.optim.{name}({given})")


def by_hand(optimizer: optim.GradientTransformation, rule: Callable[..., tuple[Tensor, Any]], source: str) -> Case:
    """The case whose reference is `rule(p, g, state, t) -> (p, state)`, leaf by leaf. The first state is None."""

    def run(params: Leaves, grads: list[Leaves]) -> Leaves:
        new = {}
        for key, p in params.items():
            state = None
            for t, grad in enumerate(grads, 1):
                p, state = rule(p, grad[key], state, t)
            new[key] = p
        return new

    return Case(optimizer, run, f"{source}, by hand")


def step_lion(p: Tensor, g: Tensor, m: Tensor | None, t: int) -> tuple[Tensor, Tensor]:
    m = torch.zeros_like(p) if m is None else m
    return p - 0.01 * ((0.9 * m + 0.1 * g).sign() + 0.1 * p), 0.99 * m + 0.01 * g


def step_lamb(p: Tensor, g: Tensor, state: Any, t: int) -> tuple[Tensor, Any]:
    """The paper's function of norms is the identity."""
    m, v = state or (torch.zeros_like(p), torch.zeros_like(p))
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    u = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * p
    ratio = p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0
    return p - 0.01 * ratio * u, (m, v)


def step_fused_lamb(p: Tensor, g: Tensor, state: Any, t: int) -> tuple[Tensor, Any]:
    """fused_lamb_cuda_kernel.cu of DeepSpeed 0.19.8: the means are not corrected, the rate is. The ratio is bounded."""
    m, v = state or (torch.zeros_like(p), torch.zeros_like(p))
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    u = m / (v.sqrt() + 1e-4) + 0.1 * p
    ratio = min(max((p.norm() / u.norm()).item(), 0.3), 0.8) if p.norm() > 0 and u.norm() > 0 else 1.0
    return p - 0.01 * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * ratio * u, (m, v)


def step_schedule_free(p: Tensor, g: Tensor, state: Any, t: int) -> tuple[Tensor, Any]:
    """With a warmup of four steps. Of the sequences x, z and their mixture y, y is given as `p`."""
    x, z, total, most = state or (p, p, 0.0, 0.0)
    rate = 0.1 * min(1.0, t / 4)
    most = max(most, rate)
    total += most**2
    z = z - rate * g
    x = x + most**2 / total * (z - x)
    return 0.9 * x + 0.1 * z, (x, z, total, most)


def warm_up(count: Any) -> Any:
    return 0.1 * torch.clamp((count + 1.0) / 4, max=1.0).to(torch.float64)


MAXIMIZE = optim.scale(-1.0)
CASES = {
    "sgd": of_torch(optim.sgd(), "SGD"),
    "sgd, momentum and decay": of_torch(
        optim.sgd(0.1, 0.9, weight_decay=0.1), "SGD", lr=0.1, momentum=0.9, weight_decay=0.1
    ),
    "sgd, nesterov": of_torch(
        optim.sgd(0.1, 0.9, True, 0.1), "SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd, maximize": of_torch(
        optim.chain(MAXIMIZE, optim.sgd(0.1, 0.9, weight_decay=0.1)),
        "SGD", lr=0.1, momentum=0.9, weight_decay=0.1, maximize=True,
    ),
    "adam": of_torch(optim.adam(), "Adam"),
    "adam, decay": of_torch(optim.adam(0.01, weight_decay=0.1), "Adam", lr=0.01, weight_decay=0.1),
    "amsgrad": of_torch(optim.amsgrad(0.01, b2=0.5), "Adam", lr=0.01, betas=(0.9, 0.5), amsgrad=True),
    "amsgrad, decay": of_torch(
        optim.amsgrad(b2=0.5, weight_decay=0.1), "Adam", betas=(0.9, 0.5), weight_decay=0.1, amsgrad=True
    ),
    "amsgrad, decoupled decay": of_torch(
        optim.amsgrad(0.01, 0.8, 0.5, 1e-4, 0.1, decoupled=True),
        "AdamW", lr=0.01, betas=(0.8, 0.5), eps=1e-4, weight_decay=0.1, amsgrad=True,
    ),
    "adamw": of_torch(optim.adamw(), "AdamW"),
    "adamw, maximize": of_torch(
        optim.chain(MAXIMIZE, optim.adamw(0.01, weight_decay=0.1)), "AdamW", lr=0.01, weight_decay=0.1, maximize=True
    ),
    "nadam": of_torch(optim.nadam(), "NAdam"),
    "nadam, decay": of_torch(
        optim.nadam(0.01, 0.8, 0.99, 1e-4, 0.1, 0.1),
        "NAdam", lr=0.01, betas=(0.8, 0.99), eps=1e-4, momentum_decay=0.1, weight_decay=0.1,
    ),
    "nadam, decoupled decay": of_torch(
        optim.nadam(weight_decay=0.1, decoupled=True), "NAdam", weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adagrad": of_torch(optim.adagrad(), "Adagrad"),
    "adagrad, decays": of_torch(
        optim.adagrad(0.1, 0.2, 0.5, 1e-3, 0.1),
        "Adagrad", lr=0.1, lr_decay=0.2, initial_accumulator_value=0.5, eps=1e-3, weight_decay=0.1,
    ),
    "rmsprop": of_torch(optim.rmsprop(), "RMSprop"),
    "rmsprop, momentum and decay": of_torch(
        optim.rmsprop(0.01, 0.9, 1e-3, momentum=0.9, weight_decay=0.1),
        "RMSprop", lr=0.01, alpha=0.9, eps=1e-3, momentum=0.9, weight_decay=0.1,
    ),
    "rmsprop, centered": of_torch(optim.rmsprop(0.01, centered=True), "RMSprop", lr=0.01, centered=True),
    "adafactor": of_torch(optim.adafactor(), "Adafactor"),
    "adafactor, decay": of_torch(
        optim.adafactor(0.3, 0.6, (1e-4, 1e-2), 1.5, 0.1),
        "Adafactor", lr=0.3, beta2_decay=-0.6, eps=(1e-4, 1e-2), d=1.5, weight_decay=0.1,
    ),
    "lion": by_hand(optim.lion(0.01, weight_decay=0.1), step_lion, "Chen et al., algorithm 2"),
    "lamb": by_hand(optim.lamb(0.01), step_lamb, "You et al., algorithm 2"),
    "lamb, DeepSpeed's": by_hand(
        optim.lamb(0.01, eps=1e-4, weight_decay=0.1, bounds=(0.3, 0.8), corrects="rate"),
        step_fused_lamb, "DeepSpeed's FusedLamb",
    ),
    "schedule_free": by_hand(
        optim.schedule_free(optim.sgd(warm_up), warm_up), step_schedule_free, "Defazio et al., the three sequences"
    ),
}  # fmt: skip
"""Name -> case. A name begins with that of a function of `fzero.optim`."""
