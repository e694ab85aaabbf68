"""Values that are computed from several leaves, split ones among them: their gradients are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero

WIDTH = 8
SPLIT = {"up": ("tp", 0), "again": ("tp", 0), "down": ("tp", 1)}
SHAPES = {"up": (4 * WIDTH, WIDTH), "again": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH), "few": (WIDTH,), "one": ()}
WEIGHTS: dict[str, Callable[[Any], Tensor]] = {
    "sum": lambda p: p["up"] + p["again"],
    "larger": lambda p: torch.where(p["up"] > p["again"], p["up"], p["again"]),
    "between": lambda p: torch.lerp(p["up"], p["again"], p["one"]),
    "lists": lambda p: torch._foreach_mul([p["up"]], [p["again"]])[0],
    "expanded": lambda p: p["up"] * p["few"].expand(p["up"].shape),
    "broadcast": lambda p: p["up"] * p["few"],
    "number": lambda p: p["up"] * p["one"],
    "split along another dimension": lambda p: p["down"].t() * p["up"],
    "over a norm": lambda p: p["up"] / p["again"].square().sum().sqrt(),
    "over norms of rows": lambda p: p["up"] / p["up"].norm(dim=1, keepdim=True),
    "over the largest": lambda p: p["up"] / p["again"].abs().max(),
}


def params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) / 2 for name, shape in SHAPES.items()}


def derive(make: Callable[[Any], Tensor], kind: str) -> Callable[..., Any]:
    """A function of parameters and a batch whose results have derivatives of a loss with such a weight."""

    def loss(params: Any, x: Tensor) -> Tensor:
        return fzero.psum(torch.tanh(x @ make(params).t()) @ params["down"].t(), "tp").square().mean()

    def sums(params: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return loss(params, x) * len(x), torch.tensor(len(x))

    def norm(params: Any, x: Tensor) -> Tensor:
        return sum(each.square().sum() for each in fzero.grad(loss)(params, x).values())

    return {
        "first": fzero.value_and_grad(loss),
        "computed again": fzero.value_and_grad(fzero.remat(loss)),
        "microbatches": fzero.accumulate(sums, 2),
        "second": fzero.grad(norm),
    }[kind]


@pytest.mark.parametrize("kind", ["first", "computed again", "microbatches", "second"])
def test_gradients_are_those_of_one_device(kind: str) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name, make in WEIGHTS.items():
        expected = derive(make, kind)(params(), x)
        for ranks in (1, 2) if kind == "first" else (2,):
            mesh = fzero.VirtualMesh(fsdp=ranks, tp=2)
            step = fzero.simulate(derive(make, kind), mesh, data=("fsdp",))
            found = fzero.unpartition(step(fzero.partition(params(), mesh, split=SPLIT), x))
            text = f"{name} on {mesh}: {found}, not {expected}"
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=text)
