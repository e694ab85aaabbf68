"""`from_torch`: an optimizer of torch and its schedule train the same weights as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import fzero
from fzero import FzeroError, VirtualMesh, optim

MESH = VirtualMesh(fsdp=2)
Make = Callable[[nn.Module], tuple[Any, Any]]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_groups(model: nn.Module) -> list[dict[str, Any]]:
    biases = [x for x in model.parameters() if x.ndim == 1]
    return [
        {"params": [x for x in model.parameters() if x.ndim > 1], "lr": 0.05},
        {"params": biases, "weight_decay": 0.0},
    ]


def of_adamw(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(make_groups(model), lr=0.01, weight_decay=0.3, eps=1e-3)
    return optimizer, lr_scheduler.LambdaLR(optimizer, [lambda n: min(1.0, (n + 1) / 4), lambda n: 0.8**n])


def of_sgd(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 7)


def of_one_cycle(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)
    return optimizer, lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)


def of_a_part(model: Any) -> tuple[Any, Any]:
    return torch.optim.RMSprop(model[2].parameters(), lr=0.01, eps=1e-3), None


CASES: dict[str, Make] = {
    "groups and a rate for each": of_adamw, "momentum and a cosine": of_sgd, "momenta that move": of_one_cycle,
    "some parameters": of_a_part,
}  # fmt: skip


def make_batches() -> list[Tensor]:
    return list(torch.randn(6, 4, 6, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_torch(case: str) -> None:
    plain = make_model()
    theirs, schedule = CASES[case](plain)
    model = make_model()
    optimizer = optim.from_torch(*CASES[case](model), model=model)
    params, apply = fzero.lower(model)
    params = fzero.partition(params, MESH)
    opt_state = optimizer.init(params)

    def train_step(params: Any, opt_state: Any, x: Tensor) -> tuple[Any, Any]:
        grads = fzero.grad(lambda params: apply(params, x).square().mean())(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optim.apply_updates(params, updates), opt_state

    step = fzero.simulate(train_step, MESH)
    for x in make_batches():
        params, opt_state = step(params, opt_state, x)
        plain(x).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
        if schedule is not None:
            schedule.step()
    whole = fzero.unpartition(params)
    for path, value in zip(fzero.tree.paths(whole), fzero.tree.leaves(whole)):
        torch.testing.assert_close(value, plain.get_parameter(path).detach(), rtol=1e-5, atol=1e-6)


def test_a_step_behind_the_last_rate_is_an_error() -> None:
    model = make_model()
    optimizer = optim.from_torch(*of_one_cycle(model), model=model)
    params, _ = fzero.lower(model)
    grads = fzero.tree.map(torch.ones_like, params)
    state = optimizer.init(params)
    for _ in range(9):  # torch's scheduler steps eight times
        _, state = optimizer.update(grads, state, params)
        optim.check_flags(state)
    _, state = optimizer.update(grads, state, params)
    with pytest.raises(FzeroError, match=r"from_torch: scheduler: has rates for 9 updates, and more are made"):
        optim.check_flags(state)


def test_what_is_not_converted_is_named() -> None:
    model = make_model()
    optimizer, schedule = of_sgd(model)
    with pytest.raises(FzeroError, match=r"optimizer: is a torch\.optim\.rprop\.Rprop, which is not converted"):
        optim.from_torch(torch.optim.Rprop(model.parameters()), model=model)
    with pytest.raises(FzeroError, match=r"lr_scheduler: is a ReduceLROnPlateau.*inject_hyperparams"):
        optim.from_torch(optimizer, lr_scheduler.ReduceLROnPlateau(optimizer), model=model)
    with pytest.raises(FzeroError, match=r"lr_scheduler: is of another optimizer"):
        optim.from_torch(torch.optim.SGD(model.parameters(), lr=0.1), schedule, model=model)
    with pytest.raises(FzeroError, match=r"lr_scheduler: is a builtins\.function, which is not converted"):
        optim.from_torch(optimizer, lambda n: 0.5, model=model)  # type: ignore[arg-type]
    with pytest.raises(FzeroError, match=r"that is no parameter of the model"):
        optim.from_torch(optimizer, model=make_model())
    schedule.step()
    with pytest.raises(FzeroError, match=r"lr_scheduler: has made 1 steps; give a new one"):
        optim.from_torch(optimizer, schedule, model=model)
