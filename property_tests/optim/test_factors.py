"""Laws of rows and columns of leaves that lie in slices."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf
from fzero.optim import factors
from property_tests.strategies import layouts

STACK = Layout("bucket", (Leaf("a", (3,)), Leaf("b", (3, 2, 4)), Leaf("c", (2, 0))), VirtualMesh(fsdp=4), align=1)
MATRIX = Layout("bucket", (Leaf("a", (5,)), Leaf("b", (4, 3))), VirtualMesh(fsdp=3), align=2)


def matrices(layout: Layout) -> tuple[list[int], list[Tensor], list[int]]:
    """The indices of a layout's leaves of two dimensions or more, values for these, and the sizes of their matrices."""
    draw = torch.Generator().manual_seed(0)
    chosen = [i for i, leaf in enumerate(layout.leaves) if len(leaf.shape) > 1]
    shapes = [layout.leaves[i].shape for i in chosen]
    values = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return chosen, values, [size for shape in shapes for size in factors.matrices_of(shape)]


def slices(layout: Layout, rank: int) -> tuple[list[Tensor], list[int], list[int]]:
    """A rank's slices of these values, and where they lie."""
    chosen, values, _ = matrices(layout)
    parts = [layout.part(i, rank) for i in chosen]
    held = [x.reshape(-1)[part.start : part.stop] for x, part in zip(values, parts)]
    return held, [layout.shard] * len(chosen), [layout.leaf_ranges[i].start for i in chosen]


@given(layouts())
@example(STACK)
@example(MATRIX)
def test_rows_and_columns_of_slices_add_up_to_those_of_the_leaf(layout: Layout) -> None:
    _, values, sizes = matrices(layout)
    if not values:
        return
    ranks = []
    for rank in range(layout.world):
        held, shards, begins = slices(layout, rank)
        ranks.append(factors.average_rows_and_columns(held, sizes, shards, begins, rank))
    for got, want in zip(map(sum, zip(*ranks)), expected(values), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)  # sums of at most 64 squares, each of 1e-16


def expected(values: list[Tensor]) -> list[Tensor]:
    """The mean square of each row, and of each column; 0 of a leaf without elements."""
    sides = []
    for dim in (-1, -2):
        for x in values:
            means = x.square().mean(dim) if x.numel() else x.square().sum(dim)
            sides.append(means.reshape(-1))
    return sides


@given(layouts(), st.sampled_from([0.0, 0.5]))
@example(STACK, 0.0)
@example(MATRIX, 0.5)
def test_scaled_slices_are_slices_of_the_scaled_leaf(layout: Layout, floor: float) -> None:
    _, values, sizes = matrices(layout)
    if not values:
        return
    shapes = [factors.matrices_of(x.shape) for x in values]
    rows = [1 + torch.arange(of.number * of.rows, dtype=torch.float64) for of in shapes]
    columns = [2 + torch.arange(of.number * of.columns, dtype=torch.float64) for of in shapes]
    ranks = []
    for rank in range(layout.world):
        held, shards, begins = slices(layout, rank)
        floors = [floor] * len(held)
        ranks.append(factors.scale_by_factors(held, rows, columns, floors, sizes, shards, begins, rank))
    for parts, x, row, column in zip(zip(*ranks), values, rows, columns, strict=True):
        if x.numel():
            row, column = row.view(*x.shape[:-1], 1), column.view(*x.shape[:-2], 1, x.shape[-1])
            variance = row @ column / row.mean(-2, keepdim=True).clamp(min=floor)
            want = x / variance.sqrt().clamp(min=floor)
            torch.testing.assert_close(torch.cat(parts), want.reshape(-1), rtol=1e-12, atol=0)  # a dozen roundings
