"""Adafactor's second moments: for a matrix, the means of its rows and of its columns instead of a value an element."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.base.shapes import global_shape
from fzero.base.tree import Tree
from fzero.optim import factors, kernels
from fzero.optim.base import (
    GradientTransformation,
    cast,
    check_floating,
    check_not_negative,
    flatten_alike,
    init_count,
    init_zeros,
    stage,
)
from fzero.optim.operations import list_whole


class FactoredState(NamedTuple):
    """Running means of squared gradients. Every rank holds all of `v_row` and `v_col`."""

    count: Tensor  # type: ignore[assignment]  # 0-d int32, steps so far (hides tuple.count, as in optax)
    v_row: Tree  # for leaves of shape [..., R, C] the mean of each row, flat; None for others
    v_col: Tree  # likewise of each column
    v: Tree  # as params, for leaves of less than two dimensions; None for others


def scale_by_factored_rms(
    decay_rate: float = 0.8, eps: float | None = None, added: float = 0.0
) -> GradientTransformation:
    """`g / sqrt(v)`, where v is the running mean of squared gradients with decay rate `1 - t ** -decay_rate` in step t.

    For a leaf of two dimensions or more v is the product of the running means of its rows and columns, over the last
    two dimensions, divided by the mean of the rows. This mean and `sqrt(v)` are at least `eps`; None stands for the
    eps of the gradient's dtype. A step moves the means of rows and columns, and no more, between ranks: one all-reduce
    for all leaves.

    With `added`, the paper's epsilon 1, squares are that much larger. Then `eps` is a bound against zeros alone:
    1.2e-19, whose square is a number of float32.

    Shazeer and Stern, Adafactor, https://arxiv.org/abs/1804.04235. Formula and defaults are those of
    torch.optim.Adafactor; optax adds `eps` to the squares, and does not factor small leaves.

    Raises:
        FzeroError: for a negative number; in `init` and `update`, as `scale_by_adam`.
    """
    check_not_negative("scale_by_factored_rms", "decay_rate", decay_rate)
    check_not_negative("scale_by_factored_rms", "added", added)
    if eps is not None:
        check_not_negative("scale_by_factored_rms", "eps", eps)

    def init(params: Tree) -> FactoredState:
        matrices, vectors = tree.split(params, _is_matrix)
        v_row = tree.map_with_path(functools.partial(_init_means, side="rows"), matrices)
        v_col = tree.map_with_path(functools.partial(_init_means, side="columns"), matrices)
        return FactoredState(init_count(params), v_row, v_col, init_zeros(vectors))

    def update(updates: Tree, state: FactoredState, params: Tree | None = None) -> tuple[Tree, FactoredState]:
        count = state.count + 1
        weight = count.to(torch.float64) ** -decay_rate
        matrices, vectors = tree.split(updates, _is_matrix)
        matrices, v_row, v_col = _scale_matrices(matrices, state, weight, eps, added)
        treedef, (squares, grads) = flatten_alike(state.v, vectors)
        lists = kernels.scale_by_floored_rms(grads, squares, weight, _floors(grads, math.sqrt(added) or eps))
        vectors, v = (tree.unflatten(treedef, leaves) for leaves in lists)
        return tree.merge(matrices, vectors), FactoredState(count, v_row, v_col, v)

    return stage(FactoredState, init, update)


def _is_matrix(path: str, leaf: Any) -> bool:
    return len(leaf.shape) > 1


def _init_means(path: str, leaf: Any, side: str) -> Any:
    """Zeros for the rows or columns of a leaf, whole on every rank; None for a frozen leaf."""
    if is_frozen(leaf):
        return None
    check_floating(path, leaf)
    of = factors.matrices_of(global_shape(leaf))
    return leaf.new_zeros((of.number * getattr(of, side),))


def _floors(leaves: list[Any], eps: float | None) -> list[float]:
    return [torch.finfo(leaf.dtype).eps if eps is None else eps for leaf in leaves]


def _scale_matrices(
    updates: Tree, state: FactoredState, weight: Tensor, eps: float | None, added: float
) -> tuple[Tree, Tree, Tree]:
    """The scaled updates, and the new means of rows and columns.

    Raises:
        FzeroError: where the updates are not those of the state, naming the leaf.
    """
    (rows, treedef), (columns, _), (grads, given) = map(tree.flatten, (state.v_row, state.v_col, updates))
    if given != treedef:
        raise tree.mismatch(treedef, given)
    if not grads:
        return updates, state.v_row, state.v_col
    shapes = [factors.matrices_of(global_shape(grad)) for grad in grads]
    for path, row, column, of in zip(tree.paths(updates), rows, columns, shapes):
        expected = (of.number * of.rows, of.number * of.columns)
        held = (row.shape[0], column.shape[0])
        if held != expected:
            problem = f"has {expected[0]} rows and {expected[1]} columns, its state {held[0]} and {held[1]}"
            raise FzeroError(path, problem, "give a leaf of the parameter's shape")
    sizes, whole = [size for of in shapes for size in of], list_whole(len(grads))
    means = factors.average_rows_and_columns(grads, sizes, *whole)
    both = _average([*rows, *columns], means, weight)
    rows, columns = both[: len(grads)], both[len(grads) :]
    above: tuple[Any, Any] = (rows, columns)
    if added:  # a common factor of rows changes nothing, and keeps their mean above the bound
        above = (
            torch._foreach_mul(torch._foreach_add(rows, added), 2.0**37),
            torch._foreach_add(columns, added),
        )
    scaled = factors.scale_by_factors(grads, *above, _floors(grads, eps), sizes, *whole)
    return tuple(tree.unflatten(treedef, leaves) for leaves in (scaled, rows, columns))


def _average(old: list[Any], new: list[Any], weight: Tensor) -> list[Any]:
    """`old + weight * (new - old)`, in the dtypes of `old`."""
    kept = torch._foreach_mul(cast(old, new), 1 - weight)
    return cast(torch._foreach_add(kept, torch._foreach_mul(new, weight)), old)
