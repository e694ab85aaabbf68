"""Rows: which part of its operands an operation needs for some rows of its result.

A large leaf is used by some of its rows at a time (`stream`). Here stands what a node computes from such rows, as
numbers of dimensions: `(0, None)` says that rows of the result need the same rows of the first operand, along its
dimension 0, and all of the second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.program.arguments import operand_of
from fzero.program.operation import Node
from fzero.program.records import find_writes, name_of, record

Dims = tuple[int | None, ...]
"""For each argument of a node the dimension of its rows; None for an argument that is needed whole."""

_PRODUCTS: dict[str, dict[int, Dims]] = {
    "mm": {0: (0, None), 1: (None, 1)},
    "bmm": {0: (0, 0), 1: (1, None), 2: (None, 2)},
    "mv": {0: (0, None)},
}
"""Product -> dimension of the result -> dimensions of the operands."""
_SUMMED: dict[str, Dims] = {"mm": (1, 0), "bmm": (2, 1), "mv": (1, 0), "addmm": (None, 1, 0)}
"""Product -> the dimensions of the operands that it sums over."""
_REDUCTIONS = {"sum": 1, "mean": 1, "amax": 1, "amin": 1, "logsumexp": 1, "linalg_vector_norm": 2}
"""Reduction -> the position of its dimensions among its arguments."""
_RESHAPES = frozenset({"view", "_unsafe_view", "unsqueeze", "squeeze"})
_SAME = frozenset({"alias", "detach", "clone", "_to_copy"})


class Lookup(NamedTuple):
    """A lookup of rows of a table by indices, or the gradient of one. Indices may count from the end where it `wraps`.

    Of a gradient, `given` are the gradients of the rows that were looked up. Those of the row `padding` do not count.
    Where it is `by_count`, each is divided by the number of lookups of its row.
    """

    given: Node
    indices: Node
    wraps: bool = False
    padding: int = -1
    by_count: bool = False


def find_lookup(node: Node) -> Lookup | None:
    """The lookup that a node is, if it is one: `embedding`, `index_select`, or an index in brackets."""
    name = name_of(node)
    if name == "embedding":
        table, indices, *_ = node.args
        return Lookup(table, indices)
    if name == "index_select":
        table, dim, indices = node.args
        return Lookup(table, indices) if dim == 0 else None
    if name == "index" and _has_one_index(node):
        table, (indices,) = node.args
        return Lookup(table, indices, wraps=True)
    return None


def find_lookup_gradient(node: Node) -> Lookup | None:
    """The gradient of a lookup by its table that a node is, if it is one. The table has two dimensions."""
    name = name_of(node)
    if name == "embedding_dense_backward":
        given, indices, _, padding, by_count = node.args
        return Lookup(given, indices, False, padding, by_count)
    if name not in ("index_add", "index_put") or node.kwargs or node.meta["val"].ndim != 2:
        return None
    total, *others = node.args
    if not isinstance(total, fx.Node) or name_of(total) != "new_zeros":
        return None
    if name == "index_add":
        dim, indices, given = others
        return Lookup(given, indices) if dim == 0 else None
    indices, given, *adds_up = others
    return Lookup(given, indices[0], wraps=True) if any(adds_up) and _has_one_index(node) else None


def _has_one_index(node: Node) -> bool:
    """Whether a node is given the numbers of rows, and nothing else to choose elements by."""
    _, indices, *_ = node.args
    return len(indices) == 1 and indices[0] is not None and indices[0].meta["val"].dtype in (torch.int32, torch.int64)


def find_dims(node: Node, dim: int, rows: int) -> Dims | None:
    """What a node needs for some of the `rows` of its result along `dim`; None where this is not known."""
    name = name_of(node)
    if name in _PRODUCTS:
        return _PRODUCTS[name][dim]
    if name == "addmm":
        return None if node.kwargs else (_align(node, operand_of(node), dim, rows), *_PRODUCTS["mm"][dim])
    if find_lookup_gradient(node) is not None:
        return (None, None) if dim == 0 else None
    if name in _REDUCTIONS:
        return _find_dims_of_reduction(node, dim)
    return _find_dims_of_carrier(node, dim, rows) if is_carrier(node) else None


def find_sum_dims(node: Node, position: int, dim: int) -> Dims | None:
    """The dimensions that a product sums over, where `dim` of the operand at `position` is among them."""
    dims = None if node.kwargs else _SUMMED.get(name_of(node))
    return dims if dims is not None and dims[position] == dim else None


def list_reduction_dims(node: Node) -> list[int]:
    """The dimensions of its first operand that a reduction reduces; none for another operation."""
    position = _REDUCTIONS.get(name_of(node))
    if position is None:
        return []
    ndim, given = operand_of(node).meta["val"].ndim, node.args[position] if position < len(node.args) else None
    return sorted({each % ndim for each in ([given] if isinstance(given, int) else given or range(ndim))})


def follow_rows(node: Node, source: Node, dim: int, rows: int) -> tuple[int, Dims] | None:
    """The dimension in which a node's result has the rows that its operand `source` has along `dim`, and what these
    need. None where the result has no such dimension, or needs more of the operand than these rows."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or source in _list_hidden(node):
        return None
    at = [i for i, arg in enumerate(node.args) if arg is source]
    for result in (i for i, size in enumerate(value.shape) if size == rows):
        dims = find_dims(node, result, rows)
        if dims is not None and all(dims[i] == dim for i in at):
            return result, dims
    return None


def is_carrier(node: Node) -> bool:
    """Whether a node's result is its operand, seen in another shape, cast, or changed element by element."""
    if node.op != "call_function" or find_writes(node) or getattr(node.target, "namespace", "") != "aten":
        return False
    known, name = record(node), name_of(node)
    if known.is_random(node) or _list_hidden(node):
        return False
    return known.is_pointwise or name in _SAME | _RESHAPES | {"t", "transpose", "permute", "expand"}


def is_transposed(node: Node) -> bool:
    """Whether a node's result is its operand with the dimensions in another order."""
    return node.op == "call_function" and name_of(node) in ("t", "transpose", "permute")


def keeps_zeros(node: Node, inner: Mapping[Node, int]) -> bool:
    """Whether a value has rows of zeros where the leaf has, because `inner` nodes only cast it or reshape it."""
    names = _SAME | _RESHAPES | {"t", "transpose", "permute", "expand"}
    while is_carrier(node) and node in inner:
        if name_of(node) not in names or operand_of(node).meta["val"].numel() < node.meta["val"].numel():
            return False
        node = operand_of(node)
    return True


def resize(node: Node, args: Sequence[Any], dim: int, size: int) -> list[Any]:
    """The arguments of a node whose result gets `size` rows along `dim`: a shape among them follows."""
    args = list(args)
    if name_of(node) in ("view", "_unsafe_view", "expand"):
        args[1] = [size if i == dim else n for i, n in enumerate(node.meta["val"].shape)]
    return args


def _find_dims_of_carrier(node: Node, dim: int, rows: int) -> Dims | None:
    """What a carrier needs for rows of its result."""
    name, value = name_of(node), node.meta["val"]
    if name == "t":
        return (1 - dim if value.ndim == 2 else dim,)
    if name in ("transpose", "permute"):
        order = list(range(value.ndim))
        if name == "transpose":
            _, a, b = node.args
            order[a], order[b] = order[b], order[a]
        else:
            _, dims = node.args
            order = [each % value.ndim for each in dims]
        return (order[dim], *[None] * (len(node.args) - 1))
    if name == "squeeze" and len(node.args) == 1:
        return None  # it drops the dimensions of size 1, which other rows may be
    if name in _RESHAPES:
        given = operand_of(node).meta["val"].shape
        before = math.prod(value.shape[:dim])
        at = next((i for i, n in enumerate(given) if n == rows and math.prod(given[:i]) == before), None)
        return None if at is None else (at, *[None] * (len(node.args) - 1))
    return tuple(_align(node, arg, dim, rows) for arg in node.args)


def _align(node: Node, given: Any, dim: int, rows: int) -> int | None:
    """The dimension of an operand that broadcasts to `dim` of the result, where it has all rows."""
    if not isinstance(given, fx.Node):
        return None
    shape = given.meta["val"].shape
    at = dim - (node.meta["val"].ndim - len(shape))
    return at if at >= 0 and shape[at] == rows else None


def _find_dims_of_reduction(node: Node, dim: int) -> Dims | None:
    """What a reduction of some dimensions needs for rows along a dimension that it keeps."""
    reduced, ndim = list_reduction_dims(node), operand_of(node).meta["val"].ndim
    kept = [i for i in range(ndim) if i not in reduced or node.meta["val"].ndim == ndim]
    at = kept[dim]
    return None if at in reduced else (at, *[None] * (len(node.args) - 1))


def _list_hidden(node: Node) -> list[Node]:
    """The operands that stand in lists or keywords."""
    return [x for x in node.all_input_nodes if not any(x is arg for arg in node.args)]
