"""Rows and columns of leaves of which a rank holds a flat slice: the kernels of Adafactor.

A leaf of shape [..., R, C] is B matrices of R rows and C columns. A slice begins and ends anywhere in a row. Zeros fill
the slice up to whole rows, and to whole matrices where the leaf has several: `_fold`.

A rank has a part of a split leaf: some columns of each matrix, some rows of each, or some matrices. A slice is one of
this part, and means are those of the whole leaf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fzero.optim.operations import MAPS, PLACED, PLACES, SUMS, SlicePlace, define, find_places

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


def _find_runs(of: Matrices, at: SlicePlace) -> tuple[int, int]:
    """The rows, and the columns, in a run of a leaf's elements; 0 where each rank has some elements of all of them."""
    columns = at.run if at.run < of.columns else at.run // (of.rows * of.columns) * of.columns
    return at.run // of.columns, columns


def _take_part(of: Matrices, at: SlicePlace) -> Matrices:
    """The matrices that this rank's part of a leaf has."""
    rows, columns = _find_runs(of, at)
    if at.ranks == 1:
        return of
    if not rows:
        return of._replace(columns=of.columns // at.ranks)
    return of._replace(number=of.number // at.ranks) if columns else of._replace(rows=of.rows // at.ranks)


def _view_part(means: Tensor, run: int, at: SlicePlace) -> Tensor:
    """A view of the means, of all rows or columns of a leaf, that are those of this rank's part."""
    return means if at.ranks == 1 or not run else means.view(-1, at.ranks, run)[:, at.position]


def _split_sizes(sizes: Sequence[int]) -> list[Matrices]:
    return [Matrices(*sizes[i : i + 3]) for i in range(0, len(sizes), 3)]


def _fold(x: Tensor, of: Matrices, start: int) -> Tensor:
    """[m, h, C] the units that a slice which begins at element `start` reaches into; 0 where the slice has nothing.

    Several whole matrices, or h rows of the one that there is.
    """
    front = start % of.unit
    filled = pad(x, (front, -(front + x.numel()) % of.unit))
    return filled.view(1, -1, of.columns) if of.number == 1 else filled.view(-1, of.rows, of.columns)


def _average_rows_and_columns(leaves: List, sizes: Sequence[int], *places: Any) -> List:
    rows, columns = _make_zeros(leaves, sizes)
    for i, (x, of, at) in enumerate(zip(leaves, _split_sizes(sizes), find_places(*places))):
        if x.numel():
            part = _take_part(of, at)
            squares = _fold(x.reshape(-1).to(rows[i].dtype).square(), part, at.start)
            first = at.start // part.unit  # the first row, or matrix, that the slice reaches into
            starts = (first, 0) if part.number == 1 else (first * part.rows, first * part.columns)
            means = squares.sum(2).view(-1) / of.columns, squares.sum(1).view(-1) / of.rows
            for mean, start, all_means, run in zip(means, starts, (rows[i], columns[i]), _find_runs(of, at)):
                into = _view_part(all_means, run, at)
                into += pad(mean, (start, into.numel() - start - mean.numel())).view(into.shape)
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
    f"average_rows_and_columns(Tensor[] leaves, int[] sizes, {PLACES}) -> Tensor[]",
    _average_rows_and_columns,
    lambda leaves, sizes, *places: [x for zeros in _make_zeros(leaves, sizes) for x in zeros],
    SUMS,
    PLACED,
)
"""The mean square of each row, 1-d, for each leaf, and behind them that of each column.

`sizes` has the three numbers of `Matrices` for each whole leaf. The last arguments say where the slices lie.
"""


def _scale_by_factors(
    leaves: List, rows: List, columns: List, floors: Sequence[float], sizes: Sequence[int], *places: Any
) -> List:
    scaled = []
    known = zip(_split_sizes(sizes), find_places(*places))
    for x, row, column, floor, (of, at) in zip(leaves, rows, columns, floors, known):
        scaled.append(_scale_leaf(x, row, column, floor, of, at) if x.numel() else torch.empty_like(x))
    return scaled


def _scale_leaf(x: Tensor, row: Tensor, column: Tensor, floor: float, of: Matrices, at: SlicePlace) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    part, (row_run, column_run) = _take_part(of, at), _find_runs(of, at)
    first, front = divmod(at.start, part.unit)
    units = -(-(front + x.numel()) // part.unit)  # that the slice reaches into
    shares = row.to(wide).view(of.number, of.rows)
    shares = shares / shares.mean(1, keepdim=True).clamp(min=floor)
    shares = _view_part(shares.view(-1), row_run, at).reshape(part.number, part.rows)
    columns = _view_part(column.to(wide), column_run, at).reshape(part.number, part.columns)
    if part.number == 1:
        shares = shares[:, first : first + units]
    else:
        shares, columns = shares[first : first + units], columns[first : first + units]
    variances = (shares[:, :, None] * columns[:, None, :]).view(-1)[front : front + x.numel()]
    roots = variances.clamp(min=floor * floor).rsqrt()
    return (x.reshape(-1).to(wide) * roots).view(x.shape).to(x.dtype)


scale_by_factors = define(
    "scale_by_factors(Tensor[] leaves, Tensor[] rows, Tensor[] columns, float[] floors, int[] sizes,"
    f" {PLACES}) -> Tensor[]",
    _scale_by_factors,
    lambda leaves, *others: [torch.empty_like(x) for x in leaves],
    MAPS,
    PLACED,
)
"""`g / sqrt(v)` for each leaf g, where v is the product of its rows and columns, divided by the mean of the rows.

`floors` has a number for each leaf, which bounds that mean and `sqrt(v)` from below. The other arguments are as in
`average_rows_and_columns`.
"""
