"""Rows and columns of leaves of which a rank holds a flat slice: the kernels of Adafactor.

A leaf of shape [..., R, C] is B matrices of R rows and C columns. A slice begins and ends anywhere in a row. Zeros fill
the slice up to whole rows, and to whole matrices where the leaf has several: `_fold`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fzero.optim.operations import MAPS, PLACED, SUMS, define, find_starts

List = list[Tensor]


class Matrices(NamedTuple):
    """The shape of a leaf as `number` matrices."""

    number: int
    rows: int
    columns: int

    @property
    def unit(self) -> int:
        """The elements of a row, or of a matrix where there are several: slices are filled up to such units."""
        return self.columns if self.number == 1 else self.rows * self.columns


def matrices_of(shape: Sequence[int]) -> Matrices:
    """The matrices of a leaf of this shape, of two dimensions or more."""
    return Matrices(math.prod(shape[:-2]), *shape[-2:])


def _split_sizes(sizes: Sequence[int]) -> list[Matrices]:
    return [Matrices(*sizes[i : i + 3]) for i in range(0, len(sizes), 3)]


def _fold(x: Tensor, of: Matrices, start: int) -> Tensor:
    """[m, h, C] the units that a slice which begins at element `start` reaches into; 0 where the slice has nothing.

    Several whole matrices, or h rows of the one that there is.
    """
    front = start % of.unit
    filled = pad(x, (front, -(front + x.numel()) % of.unit))
    return filled.view(1, -1, of.columns) if of.number == 1 else filled.view(-1, of.rows, of.columns)


def _average_rows_and_columns(
    leaves: List, sizes: Sequence[int], shards: Sequence[int], begins: Sequence[int], rank: int
) -> List:
    rows, columns = _make_zeros(leaves, sizes)
    for i, (x, of, start) in enumerate(zip(leaves, _split_sizes(sizes), find_starts(shards, begins, rank))):
        if x.numel():
            squares = _fold(x.reshape(-1).to(rows[i].dtype).square(), of, start)
            first = start // of.unit  # the first row, or matrix, that the slice reaches into
            at_row, at_column = (first, 0) if of.number == 1 else (first * of.rows, first * of.columns)
            by_row, by_column = squares.sum(2).view(-1) / of.columns, squares.sum(1).view(-1) / of.rows
            rows[i][at_row : at_row + by_row.numel()] = by_row
            columns[i][at_column : at_column + by_column.numel()] = by_column
    return rows + columns


def _make_zeros(leaves: List, sizes: Sequence[int]) -> tuple[List, List]:
    """Zeros for the rows, and for the columns, of each leaf: in one dtype, because one collective sums them."""
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in leaves) else torch.float32
    shapes = list(zip(leaves, _split_sizes(sizes)))
    return (
        [x.new_zeros(of.number * of.rows, dtype=dtype) for x, of in shapes],
        [x.new_zeros(of.number * of.columns, dtype=dtype) for x, of in shapes],
    )


average_rows_and_columns = define(
    "average_rows_and_columns(Tensor[] leaves, int[] sizes, int[] shards, int[] begins, int rank) -> Tensor[]",
    _average_rows_and_columns,
    lambda leaves, sizes, *placed: [x for zeros in _make_zeros(leaves, sizes) for x in zeros],
    SUMS,
    PLACED,
)
"""The mean square of each row, 1-d, for each leaf, and behind them that of each column.

`sizes` has the three numbers of `Matrices` for each leaf. The last arguments say where the slices lie: see `PLACED`.
"""


def _scale_by_factors(
    leaves: List,
    rows: List,
    columns: List,
    floors: Sequence[float],
    sizes: Sequence[int],
    shards: Sequence[int],
    begins: Sequence[int],
    rank: int,
) -> List:
    scaled = []
    starts = find_starts(shards, begins, rank)
    for x, row, column, floor, of, start in zip(leaves, rows, columns, floors, _split_sizes(sizes), starts):
        scaled.append(_scale_leaf(x, row, column, floor, of, start) if x.numel() else torch.empty_like(x))
    return scaled


def _scale_leaf(x: Tensor, row: Tensor, column: Tensor, floor: float, of: Matrices, start: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    first, front = divmod(start, of.unit)
    units = -(-(front + x.numel()) // of.unit)  # that the slice reaches into
    shares = row.to(wide).view(of.number, of.rows)
    shares = shares / shares.mean(1, keepdim=True).clamp(min=floor)
    if of.number == 1:
        shares = shares[:, first : first + units]
        columns = column.to(wide).view(1, of.columns)
    else:
        shares = shares[first : first + units]
        columns = column.to(wide).view(of.number, of.columns)[first : first + units]
    variances = (shares[:, :, None] * columns[:, None, :]).view(-1)[front : front + x.numel()]
    roots = variances.clamp(min=floor * floor).rsqrt()
    return (x.reshape(-1).to(wide) * roots).view(x.shape).to(x.dtype)


scale_by_factors = define(
    "scale_by_factors(Tensor[] leaves, Tensor[] rows, Tensor[] columns, float[] floors, int[] sizes, int[] shards,"
    " int[] begins, int rank) -> Tensor[]",
    _scale_by_factors,
    lambda leaves, *others: [torch.empty_like(x) for x in leaves],
    MAPS,
    PLACED,
)
"""`g / sqrt(v)` for each leaf g, where v is the product of its rows and columns, divided by the mean of the rows.

`floors` has a number for each leaf, which bounds that mean and `sqrt(v)` from below. The other arguments are as in
`average_rows_and_columns`.
"""
