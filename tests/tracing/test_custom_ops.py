"""Custom operations of `torch.library` in a step: differentiated as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero

MESH = fzero.VirtualMesh(fsdp=2)
LIB = "fzero_tests"


@torch.library.custom_op(f"{LIB}::scale", mutates_args=())
def scale(x: Tensor, w: Tensor, by: float = 3.0) -> Tensor:
    return x * w * by


@scale.register_fake
def _(x: Tensor, w: Tensor, by: float = 3.0) -> Tensor:
    return torch.empty_like(x)


def save(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, w, ctx.by = inputs
    ctx.save_for_backward(x, w)


def scale_backward(ctx: Any, grad: Tensor) -> Any:
    x, w = ctx.saved_tensors
    needed = ctx.needs_input_grad
    assert needed[1]
    return grad * w * ctx.by if needed[0] else None, (grad * x).sum(0) * ctx.by, None


scale.register_autograd(scale_backward, setup_context=save)


@torch.library.custom_op(f"{LIB}::both", mutates_args=())
def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return 2 * x, -x


@both.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


both.register_autograd(lambda ctx, a, b: 2 * a - b)


@torch.library.custom_op(f"{LIB}::constant", mutates_args=())
def constant(x: Tensor) -> Tensor:
    """Without a derivative."""
    return x + 1


@constant.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


Loss = Callable[[Any, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "a packet": lambda p, x: torch.ops.fzero_tests.scale(x, p["w"]).sum(),
    "an overload": lambda p, x: torch.ops.fzero_tests.scale.default(x, p["w"], 2.0).sum(),
    "the definition": lambda p, x: scale(x, p["w"], by=2.0).sin().sum(),
    "by keyword": lambda p, x: scale(w=p["w"], x=x).sum(),
    "two results": lambda p, x: both(x * p["w"])[0].sin().sum() + both(p["w"])[1].sum(),
    "in a checkpoint": lambda p, x: fzero.remat(lambda x: scale(x, p["w"]))(x).sum(),
    "twice": lambda p, x: scale(scale(x, p["w"]), p["w"]).sum(),
    "beside one without a derivative": lambda p, x: (scale(x, p["w"]) + constant(x)).sum(),
}


@pytest.mark.parametrize(("name", "stage"), [*((name, 3) for name in LOSSES), ("twice", 1), ("twice", 2)])
def test_a_custom_operation_is_differentiated(name: str, stage: int) -> None:
    loss, w = LOSSES[name], torch.linspace(-1, 1, 5)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    value, grads = fzero.simulate(fzero.value_and_grad(loss), MESH, stage=stage)(fzero.partition({"w": w}, MESH), x)
    leaf = w.clone().requires_grad_()
    expected = torch.stack([loss({"w": leaf}, part) for part in x.chunk(2)]).mean()
    expected.backward()
    torch.testing.assert_close(value.mean(), expected.detach())
    torch.testing.assert_close(fzero.unpartition(grads)["w"], leaf.grad)


@both.register_vmap
def _(info: Any, in_dims: Any, x: Tensor) -> Any:
    return both(x), (in_dims[0], in_dims[0])


def test_a_custom_operation_is_mapped_as_in_plain_torch() -> None:
    def step(x: Tensor) -> Any:
        return torch.func.vmap(both)(x), torch.func.vmap(torch.func.grad(lambda x: both(x.sin())[0].sum()))(x)

    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fzero.simulate(step, MESH)(x), ((2 * x, -x), 2 * x.cos()))
