"""Modes of torch that a step enters: one that changes nothing has no part in the program, and one that does has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from traces import describe_trace

import fzero
from fzero.tracing.trace import trace

MESH = fzero.VirtualMesh(fsdp=2)
Mode = Callable[[], AbstractContextManager[Any]]


class Passing(TorchFunctionMode):
    """Calls each function from a function of its own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


def count_flops() -> FlopCounterMode:
    return FlopCounterMode(display=False)


def on_the_cpu() -> torch.device:
    return torch.device("cpu")


PASSIVE: tuple[Any, ...] = (on_the_cpu, BaseTorchFunctionMode, Passing, Dispatching, count_flops)


def loss(p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(functional.linear(x, p["w"], p["b"]))
    return (h * torch.arange(1.0, 5.0)).square().mean()


def train(mode: Mode, is_inside: bool, p: Any, x: Tensor) -> Any:
    def inside(p: Any) -> Tensor:
        with mode():
            return loss(p, x)

    if is_inside:
        value, grads = fzero.value_and_grad(inside)(p)
    else:
        with mode():
            grads, value = torch.func.grad_and_value(loss)(p, x)
    return fzero.tree.map(lambda w, g: w - 0.1 * g, p, grads), value


def make() -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(12, 4, generator=generator)
    return {"w": draw[:4] / 2, "b": draw[4]}, draw[5:11]


@pytest.mark.parametrize("mode", [*PASSIVE, Doubling], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_step_under_a_mode_is_that_of_plain_torch(mode: Mode, is_inside: bool) -> None:
    expected, x = make()
    params = fzero.partition(expected, MESH)
    step = fzero.simulate(lambda p, x: train(mode, is_inside, p, x), MESH)
    for _ in range(2):
        leaves = {name: value.detach().requires_grad_() for name, value in expected.items()}
        with mode():
            value = (loss(leaves, x[:3]) + loss(leaves, x[3:])) / 2
        grads = torch.autograd.grad(value, list(leaves.values()))
        expected = {name: (w - 0.1 * g).detach() for (name, w), g in zip(leaves.items(), grads)}
        params, got = step(params, x)
        torch.testing.assert_close(got, value.detach())
        torch.testing.assert_close(fzero.unpartition(params), expected)


@pytest.mark.parametrize("mode", PASSIVE, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_mode_that_changes_nothing_leaves_the_program_as_it_is(mode: Mode, is_inside: bool) -> None:
    params, x = make()
    args = fzero.partition(params, MESH), x
    bare = trace(lambda p, x: train(torch.enable_grad, is_inside, p, x), args, MESH)
    found = trace(lambda p, x: train(mode, is_inside, p, x), args, MESH)
    assert [row[:6] for row in describe_trace(found)] == [row[:6] for row in describe_trace(bare)]


@pytest.mark.parametrize("mode", [on_the_cpu, BaseTorchFunctionMode, count_flops], ids=lambda mode: mode.__name__)
def test_a_check_of_torch_is_found_behind_a_mode(mode: Mode) -> None:
    def step(p: Any, x: Tensor) -> Tensor:
        with mode():
            normal = torch.distributions.Normal(p["b"].mean(), p["w"].square().mean(), validate_args=True)
            return normal.log_prob(x).mean()

    params, x = make()
    torch.testing.assert_close(fzero.simulate(step, MESH)(fzero.partition(params, MESH), x), step(params, x))
