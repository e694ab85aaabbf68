"""Laws of rows and columns of leaves that lie in slices."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Leaf
from fzero.layout.parts import cut_into_parts, join_parts
from fzero.layout.splits import Split
from fzero.optim import factors
from fzero.testing.strategies import layouts

TP = VirtualMesh(fsdp=2, tp=2)
SPLIT = Layout(
    "bucket",
    (
        Leaf("rows", (4, 3), split=Split("tp", 0)),
        Leaf("pairs", (4, 3), split=Split("tp", 0, 2)),
        Leaf("columns", (3, 4), split=Split("tp", 1, 2)),
        Leaf("matrices", (2, 3, 2), split=Split("tp", 0)),
        Leaf("rows of each", (2, 4, 3), split=Split("tp", 1, 2)),
        Leaf("columns of each", (2, 3, 2), split=Split("tp", 2)),
    ),
    TP,
    align=2,
)
STACK = Layout("bucket", (Leaf("a", (3,)), Leaf("b", (3, 2, 4)), Leaf("c", (2, 0))), VirtualMesh(fsdp=4), align=1)
MATRIX = Layout("bucket", (Leaf("a", (5,)), Leaf("b", (4, 3))), VirtualMesh(fsdp=3), align=2)


def matrices(layout: Layout) -> tuple[list[int], list[Tensor], list[int]]:
    """The indices of a layout's leaves of two dimensions or more, values for these, and the sizes of their matrices."""
    draw = torch.Generator().manual_seed(0)
    chosen = [i for i, leaf in enumerate(layout.leaves) if len(leaf.shape) > 1]
    shapes = [layout.shape_of(i) for i in chosen]
    values = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    return chosen, values, [size for shape in shapes for size in factors.matrices_of(shape)]


def slices(layout: Layout, rank: int, position: int) -> tuple[list[Tensor], tuple[Any, ...]]:
    """A rank's slices of these values, and where they lie."""
    chosen, values, _ = matrices(layout)
    cut = [cut_into_parts(x, torch.empty_like(x), layout, i) for i, x in zip(chosen, values)]
    rows = [x.view(layout.splits, -1)[position] for x in cut]
    parts = [layout.part(i, rank) for i in chosen]
    held, count = [x[part.start : part.stop] for x, part in zip(rows, parts)], len(chosen)
    begins, runs = [layout.leaf_ranges[i].start for i in chosen], list(map(layout.run_of, chosen))
    splits, positions, axes = [layout.splits] * count, [position] * count, [layout.split_axis] * count
    where = axes, [layout.shard_axis] * count, positions, [rank] * count
    return held, ([layout.shard] * count, begins, runs, splits, *where)


@given(layouts())
@example(SPLIT)
@example(STACK)
@example(MATRIX)
def test_rows_and_columns_of_slices_add_up_to_those_of_the_leaf(layout: Layout) -> None:
    _, values, sizes = matrices(layout)
    if not values:
        return
    ranks = []
    for rank, position in layout.cut_positions:
        held, places = slices(layout, rank, position)
        ranks.append(factors.average_rows_and_columns(held, sizes, *places))
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
@example(SPLIT, 0.0)
@example(STACK, 0.0)
@example(MATRIX, 0.5)
def test_scaled_slices_are_slices_of_the_scaled_leaf(layout: Layout, floor: float) -> None:
    chosen, values, sizes = matrices(layout)
    if not values:
        return
    shapes = [factors.matrices_of(x.shape) for x in values]
    rows = [1 + torch.arange(of.number * of.rows, dtype=torch.float64) for of in shapes]
    columns = [2 + torch.arange(of.number * of.columns, dtype=torch.float64) for of in shapes]
    ranks = []
    for rank, position in sorted(layout.cut_positions, key=lambda at: at[::-1]):  # part by part
        held, places = slices(layout, rank, position)
        floors = [floor] * len(held)
        ranks.append(factors.scale_by_factors(held, rows, columns, floors, sizes, *places))
    for i, parts, x, row, column in zip(chosen, zip(*ranks), values, rows, columns, strict=True):
        if x.numel():
            row, column = row.view(*x.shape[:-1], 1), column.view(*x.shape[:-2], 1, x.shape[-1])
            variance = row @ column / row.mean(-2, keepdim=True).clamp(min=floor)
            want = x / variance.sqrt().clamp(min=floor)
            got = join_parts(torch.cat(parts), layout, i)
            torch.testing.assert_close(got, want.reshape(-1), rtol=1e-12, atol=0)  # a dozen roundings
