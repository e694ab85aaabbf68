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


ALONG = {
    "sum": lambda p, dim: p.sum(dim),
    "mean of two": lambda p, dim: p.mean((dim, -1)),
    "norm": lambda p, dim: p.norm(dim=dim, keepdim=True),
    "vector norm": lambda p, dim: torch.linalg.vector_norm(p, 3, dim),
    "largest": lambda p, dim: p.max(dim)[0],
    "softmax": lambda p, dim: torch.softmax(p, dim=dim),
    "normalize": lambda p, dim: torch.nn.functional.normalize(p, dim=dim),
    "running sum": lambda p, dim: p.cumsum(dim),
    "sort": lambda p, dim: p.sort(dim)[0],
    "largest one": lambda p, dim: p.topk(1, dim)[0],
    "weight norm": lambda p, dim: torch._weight_norm(p, p.norm(dim=(dim, 2), keepdim=True), 1 - dim),
}
OF_ALL = {
    "deviation": lambda p: p.std(),
    "variance": lambda p: p.var(unbiased=False),
    "norm of another order": lambda p: p.norm(3),
    "largest norm": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "median": lambda p: p.median(),
    "product": lambda p: p.prod(),
    "sum over all dimensions": lambda p: p.sum((0, 1, 2)),
    "sum of an operand with a name": lambda p: torch.sum(input=p, dim=0),
}


def run(function: Callable[[Any], Tensor]) -> Any:
    """A function of a leaf [2, 4, 4] that two ranks split along its first dimension: what each of them has."""
    mesh = fzero.VirtualMesh(fsdp=1, tp=2)
    leaf = torch.arange(32.0).reshape(2, 4, 4)
    held = fzero.partition({"leaf": leaf}, mesh, split={"leaf": ("tp", 0)})
    step = fzero.simulate(lambda p: fzero.all_gather(function(p["leaf"]).flatten(), "tp", 0), mesh, data=("fsdp",))
    return step(held)


@pytest.mark.parametrize("name", ALONG)
def test_a_function_along_a_dimension_is_that_of_the_whole_or_named(name: str) -> None:
    leaf, function = torch.arange(32.0).reshape(2, 4, 4), ALONG[name]
    expected = torch.cat([function(part, 1).flatten() for part in leaf.chunk(2)])
    assert torch.equal(run(lambda p: function(p, 1)), expected)
    with pytest.raises(
        fzero.FzeroError, match="leaf: .* along dimension 0 would be that of this rank's part: the leaf is"
    ):
        run(lambda p: function(p, 0))
    expected = torch.cat([function(part, 0).flatten() for part in leaf.chunk(2)])
    assert torch.equal(run(lambda p: function(p.full_tensor(), 0)), expected)


@pytest.mark.parametrize("name", OF_ALL)
def test_a_function_of_all_elements_without_a_rule_is_named(name: str) -> None:
    with pytest.raises(fzero.FzeroError, match=r"leaf: .*leaf.full_tensor\(\) is the part"):
        run(OF_ALL[name])


def test_the_larger_of_two_leaves_is_no_reduction() -> None:
    assert torch.equal(run(lambda p: torch.max(p, p * 2)), torch.arange(32.0) * 2)


def test_leaves_whose_parts_are_of_other_elements_are_named() -> None:
    mesh, leaf = fzero.VirtualMesh(fsdp=1, tp=2), torch.arange(32.0).reshape(8, 4)
    held = fzero.partition({"a": leaf, "b": leaf}, mesh, split={"a": ("tp", 0, 2), "b": ("tp", 0)})
    step = fzero.simulate(lambda p: fzero.psum((p["a"] * p["b"]).full_tensor().sum(), "tp"), mesh, data=("fsdp",))
    with pytest.raises(fzero.FzeroError, match=r"b: is split as \('tp', 0, 1\), .* with a, split as \('tp', 0, 2\)"):
        step(held)


def test_a_part_and_a_whole_are_named() -> None:
    mesh, leaf = fzero.VirtualMesh(fsdp=1, tp=2), torch.arange(32.0).reshape(8, 4)
    held = fzero.partition({"a": leaf, "b": leaf}, mesh, split={"a": ("tp", 0)})
    of_leaves = fzero.simulate(lambda p: fzero.psum((p["a"] * p["b"]).sum(), "tp"), mesh, data=("fsdp",))
    with pytest.raises(fzero.FzeroError, match=r"b: has all of \[8, 4\], .* with a, of which this rank has \[4, 4\]"):
        of_leaves(held)
    of_rows = fzero.simulate(lambda p, x: fzero.psum((x + p["a"]).sum(), "tp"), mesh, data=("fsdp",))
    with pytest.raises(fzero.FzeroError, match=r"an operand: has all of \[8, 4\]"):
        of_rows(held, leaf)
