"""Laws of moves: the backward pass of a move is its transpose, `<move(x), y> == <x, transpose(y)>`.

`<a, b>` of sharded values is the sum of all elements of `a * b`. Of values that every rank holds in full, `<a, b>` is
the mean over ranks of each rank's sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import fzero
from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf
from fzero.passes import defaults
from fzero.program.ops.leaves import gather_leaf, scatter_leaf, take_leaf
from fzero.ranks.virtual import virtual
from fzero.testing.steps import WIDE
from fzero.testing.strategies import layouts, small_meshes
from fzero.values.moves import BESIDE, PARTS, Spread, Total, move
from fzero.values.sharded import Sharded
from property_tests.laws import slow

Inner = tuple[Tensor, Tensor]
"""`<move(x), y>` and `<x, transpose(y)>`, each [1] on one rank. Their means over ranks are equal."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def state(layout: Layout, seed: int = 0) -> list[Sharded]:
    """A `Sharded` for each leaf of a layout, on all virtual ranks."""
    on = virtual(layout.mesh)
    return [Sharded(numbers(leaf.numel, seed=seed + i), layout, i, on) for i, leaf in enumerate(layout.leaves)]


def whole(layout: Layout) -> list[Tensor]:
    """[ranks, *shape] for each leaf: values that differ between ranks."""
    return [numbers(layout.mesh.size(), *leaf.shape, seed=100 + i) for i, leaf in enumerate(layout.leaves)]


def assert_transposes(law: Callable[..., list[Inner]], mesh: VirtualMesh, *args: Any) -> None:
    """In simulation, the pairs that `law(*args)` returns are equal: without passes, and with all of them."""
    for passes in ((), defaults(stage=3, in_place=False)):
        for left, right in fzero.simulate(law, mesh, passes=passes)(*args):
            torch.testing.assert_close(left.mean(), right.mean(), rtol=1e-12, atol=1e-12)


EMPTY = Layout("bucket", (Leaf("leaf0", (0,)),), VirtualMesh(fsdp=2))


@given(layouts(max_leaves=3))
@example(EMPTY)
@slow
def test_scatter_is_the_transpose_of_gather(layout: Layout) -> None:
    def law(xs: list[Sharded], ys: list[Tensor]) -> list[Inner]:
        return [(inner(gathered(x), y[0]), inner(x, scattered(y[0], x))) for x, y in zip(xs, ys)]

    assert_transposes(law, layout.mesh, state(layout), whole(layout))


def inner(x: Any, y: Any) -> Tensor:
    """[1] this rank's sum of `x * y`. A sum of slices is multiplied by the number of ranks: then the mean over ranks is
    the sum over all slices."""
    if isinstance(x, Sharded):
        return (x.local * y.local).sum().reshape(1) * x.form.layout.world
    return (x * y).sum().reshape(1)


def gathered(x: Sharded) -> Tensor:
    return gather_leaf(x.local, x.form.layout, x.index, on=x.on)


def scattered(y: Tensor, like: Sharded) -> Sharded:
    return like.with_local(scatter_leaf(y, like.form.layout, like.index, on=like.on))


@given(layouts(max_leaves=3))
@slow
def test_gather_is_the_transpose_of_take(layout: Layout) -> None:
    def law(ys: list[Sharded], others: list[Sharded]) -> list[Inner]:
        pairs = [(gathered(other), y) for other, y in zip(others, ys)]  # a uniform value, as `take` needs
        taken = [y.with_local(take_leaf(x, y.form.layout, y.index, on=y.on)) for x, y in pairs]
        return [(inner(part, y), inner(x, gathered(y))) for part, (x, y) in zip(taken, pairs)]

    assert_transposes(law, layout.mesh, state(layout), state(layout, seed=100))


@given(layouts(max_leaves=3))
@slow
def test_spread_is_the_transpose_of_total(layout: Layout) -> None:
    def law(xs: list[Sharded], others: list[Sharded]) -> list[Inner]:
        pairs = []
        for x, other in zip(xs, others):
            y = other.square().sum()  # uniform
            total, spread = Total.apply(x.local, x.on, x.cut), Spread.apply(y, x.local, x.on, x.cut)
            pairs.append(((total * y).reshape(1), inner(x, x.with_local(spread))))
        return pairs

    assert_transposes(law, layout.mesh, state(layout), state(layout, seed=100))


@given(layouts(max_leaves=3))
@slow
def test_parts_is_the_transpose_of_beside(layout: Layout) -> None:
    def law(ys: list[Sharded], others: list[Sharded]) -> list[Inner]:
        pairs = []
        for y, other in zip(ys, others):
            x = other.square().sum()  # uniform
            beside, parts = move(BESIDE, x, y.on, y.cut), move(PARTS, y.local.sum(), y.on, y.cut)
            pairs.append((inner(y.with_local(torch.ones_like(y.local) * beside), y), (x * parts).reshape(1)))
        return pairs

    assert_transposes(law, layout.mesh, state(layout), state(layout, seed=100))


@given(small_meshes(), st.sampled_from([fzero.psum, fzero.pmean]), st.data())
@slow
def test_sums_and_means_over_ranks_are_their_own_transposes(
    mesh: VirtualMesh, reduced: Callable[..., Tensor], data: st.DataObject
) -> None:
    axis = data.draw(st.sampled_from(mesh.names))

    def law(x: Tensor, y: Tensor) -> list[Inner]:
        return [(inner(reduced(x, axis), y), inner(x, reduced(y, axis)))]

    assert_transposes(law, mesh, numbers(mesh.size(), 3), numbers(mesh.size(), 3, seed=1))


def full(x: Any) -> Tensor:
    """The full value. A 0-d leaf beside a differentiated number is full already."""
    return x.full_tensor() if isinstance(x, Sharded) else x


def times_sum(x: Any) -> Any:
    return x * x.sum()


@given(layouts(max_leaves=3), st.sampled_from([torch.tanh, torch.square, times_sum, lambda x: x / x.norm()]))
@example(Layout("bucket", (Leaf("leaf0", ()),), VirtualMesh(fsdp=2)), times_sum)
@slow
def test_gradients_are_transposes_of_tangents(layout: Layout, fn: Callable[..., Any]) -> None:
    """`<J t, c> == <t, J' c>` for elementwise functions and reductions of slices, with a gathered result."""

    def law(xs: list[Sharded], tangents: list[Sharded], cotangents: list[Tensor]) -> list[Inner]:
        pairs = []
        for x, tangent, cotangent in zip(xs, tangents, cotangents):
            if not x.numel():
                continue
            _, moved = torch.func.jvp(lambda x: full(fn(x)), (x,), (tangent,))
            _, pull_back = torch.func.vjp(lambda x: full(fn(x)), x)
            pairs.append((inner(moved, cotangent[0]), inner(tangent, pull_back(cotangent[0])[0])))
        return pairs

    assert_transposes(law, layout.mesh, state(layout), state(layout, seed=100), whole(layout))
