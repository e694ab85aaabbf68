"""Loops of the stream pass: one use of a large leaf becomes a loop over the leaf's chunks.

A value with the rows of the leaf has N * held of them: `held` rows of each of N ranks. Chunk j has `height` rows of
each rank. So a value that the loop reads by rows is seen as [N, turns, height], and turn j takes [:, j].
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from fzero.base.dtypes import accumulator
from fzero.base.torch_private import find_root
from fzero.layout.streams import Stream
from fzero.passes.order import is_cast
from fzero.passes.rows import (
    Dims,
    Lookup,
    find_dims,
    find_lookup,
    find_lookup_gradient,
    is_transposed,
    keeps_zeros,
    list_reduction_dims,
    resize,
)
from fzero.program import ops
from fzero.program.arguments import LeafMove, operand_of
from fzero.program.kinds import UNIFORM, Kind, Slice
from fzero.program.operation import AGAIN, Node
from fzero.program.ops.loops import Loop
from fzero.program.program import Program
from fzero.program.records import name_of
from fzero.program.signature import Argument, Result

_aten = torch.ops.aten
_PRODUCTS = {
    "mm": (_aten.mm.default, _aten.addmm_.default),
    "addmm": (_aten.mm.default, _aten.addmm_.default),
    "bmm": (_aten.bmm.default, _aten.baddbmm_.default),
    "mv": (_aten.mv.default, _aten.addmv_.default),
}
"""Product -> the product, and the operation that adds it to a sum in place."""

_SORTS = ("carry", "xs", "lists", "constants")
"""The sorts of arguments of a body, in order."""


class Use(NamedTuple):
    """One use of a leaf by rows: the `node`, and what it needs of its operands (`dims`).

    * "rows": the result has the leaf's rows along `dim`.
    * "sum": the result is a product that sums over the leaf's rows.
    * "reduce": the result is a sum or mean of a value, over the leaf's rows at least.
    * "lookup": the result has some of the rows, by indices.
    * "scatter": the node scatters a gradient of the leaf.
    """

    node: Node
    how: Literal["rows", "sum", "reduce", "lookup", "scatter"]
    dims: Dims = ()
    dim: int = 0


def emit_loop(
    program: Program, kinds: dict[Node, Kind], plan: Stream, inner: Mapping[Node, int], uses: Sequence[Use]
) -> None:
    """Replace uses by one loop over the chunks of their leaf, in the program's own graph, at the place of the first.
    Notes the kinds of new nodes.

    `inner` has the nodes that are computed within turns, each with the dimension of the leaf's rows in its result; the
    gathers of the leaf are among them.
    """
    with program.graph.inserting_before(_find_place(program, uses[0], inner)):
        results = _Emitter(program, kinds, plan, inner).emit(uses)
    for use, result in zip(uses, results):
        kinds[result] = kinds[use.node]
        program.substitute(use.node, result)


def list_inputs(use: Use, inner: Mapping[Node, int]) -> list[Node]:
    """The values from outside of a loop that the loop of a use needs."""
    inputs, stack = list[Node](), [use.node]
    while stack:
        for source in stack.pop().all_input_nodes:
            (stack if source in inner else inputs).append(source)
    return inputs


def _find_place(program: Program, use: Use, inner: Mapping[Node, int]) -> Node:
    """The node in front of which a loop stands: the use, and for a gradient the first that has all inputs behind it."""
    if use.how != "scatter":
        return use.node
    place: Node = max([*program.placeholders, *list_inputs(use, inner)]).next
    return place


class _Emitter:
    """Emits one loop: its body, node by node, and around it what the body is given, at the insert point of `program`.

    Arguments of the body: the sum so far, rows of values, the chunk of each slice, values that all turns share.
    """

    def __init__(self, program: Program, kinds: dict[Node, Kind], plan: Stream, inner: Mapping[Node, int]) -> None:
        self.program, self.kinds, self.plan, self.inner = program, kinds, plan, inner
        self.graph = fx.Graph()
        self.body = program.begin_body(self.graph)
        self.given: dict[str, dict[Any, tuple[Node, Node, Argument]]] = {sort: {} for sort in _SORTS}
        """For each sort of argument, by what it is of: the outer operand, the placeholder, the argument."""
        self.made: dict[tuple[Node, int], Node] = {}
        """A value and the dimension of its rows -> the rows in a turn."""

    def emit(self, uses: Sequence[Use]) -> list[Node]:
        """The nodes, behind the loop, that take the places of the uses."""
        first = sorted(uses, key=lambda use: use.how != "scatter")  # a scatter starts before a sum
        computed = {use.node: self._compute_use(use) for use in first}
        results = [computed[use.node] for use in uses]
        returned = [self._describe(use, i) for i, use in enumerate(uses)]
        given = [each for sort in _SORTS for each in self.given[sort].values()]
        anchor = find_root(self.graph)
        for _, placeholder, _ in given:  # they were made where the body first uses them
            anchor.append(placeholder)
            anchor = placeholder
        self.graph.output(results)
        layouts = {**self.program.layouts, self.plan.layout.bucket: self.plan.layout}
        arguments = tuple(argument for _, _, argument in given)
        body = replace(self.body, arguments=arguments, results=tuple(returned), layouts=layouts)
        carry, xs, lists, constants = ([outer for outer, _, _ in self.given[sort].values()] for sort in _SORTS)
        loop = self.program.emit(ops.loop, *Loop(body, self.plan.turns, carry, xs, lists, constants))
        loop.stack_trace = uses[0].node.stack_trace
        if all(AGAIN in use.node.meta for use in uses):
            loop.meta[AGAIN] = True
        items = [self.program.emit(operator.getitem, loop, i) for i in range(len(uses))]
        return [self._finish(use, item) for use, item in zip(uses, items)]

    # uses

    def _compute_use(self, use: Use) -> Node:
        """What a turn returns."""
        node = use.node
        if use.how == "rows":
            return self._compute(node, use.dims, use.dim)
        if use.how == "scatter":
            full, chunk = LeafMove(*node.args).value, self.plan.layout
            return self.body.emit(ops.scatter, self._rows(full, 0), chunk.bucket, 0, chunk.shard, **node.kwargs)
        if use.how == "reduce":
            return self._add_rows(node)
        return self._add_product(use) if use.how == "sum" else self._look_up(node)

    def _describe(self, use: Use, position: int) -> Result:
        """The result of a turn at a position: a new value of the carry, or rows for a stack. Carries come first."""
        kind = self.kinds[use.node]
        if use.how == "scatter":
            chunk = self.plan.layout.bucket
            return Result("y.0", chunk, 0, kind=replace(kind, bucket=chunk, leaf=0))
        return Result("y.0" if use.how == "rows" else f"carry.{position}", kind=kind)

    def _finish(self, use: Use, item: Node) -> Node:
        """The value of a use, from the result of the loop."""
        node, emit = use.node, self.program.emit
        if use.how == "rows":
            return self._join_rows(item, use)
        if use.how == "scatter":
            whole = LeafMove(*node.args)
            return emit(ops.join, item, *whole.key, self.plan.layout.bucket, whole.size)
        if name_of(node) == "addmm":
            item = emit(_aten.add.Tensor, item, operand_of(node))
        if name_of(node) == "mean":
            item = emit(_aten.div.Scalar, item, operand_of(node).meta["val"].numel() / max(node.meta["val"].numel(), 1))
        dtype = node.meta["val"].dtype
        return item if item.meta["val"].dtype == dtype else emit(_aten._to_copy.default, item, dtype=dtype)

    def _add_product(self, use: Use) -> Node:
        """The sum so far, to which a turn adds the product of its rows, in place. The sum is float32 or wider."""
        node, dtype = use.node, use.node.meta["val"].dtype
        operands = [self._rows_or_zeros(x, dim) for x, dim in zip(node.args, use.dims) if dim is not None]
        product, add_product = _PRODUCTS[name_of(node)]
        wide = accumulator(dtype)
        total = self._begin_carry(node, wide, is_donated=True)
        if wide == dtype:
            self.body.emit(add_product, total, *operands)
        else:
            self.body.emit(_aten.add_.Tensor, total, self.body.emit(product, *operands))
        return total

    def _add_rows(self, node: Node) -> Node:
        """The sum so far, to which a turn adds the sum of its rows, in place; or the logarithm of a sum."""
        source = operand_of(node)
        wide = accumulator(node.meta["val"].dtype)
        keeps = node.meta["val"].ndim == source.meta["val"].ndim
        if name_of(node) == "logsumexp":
            rows = self._rows_or_zeros(source, self.inner[source], -math.inf)
            part = self.body.emit(_aten.logsumexp.default, rows, list_reduction_dims(node), keeps)
            return self.body.emit(_aten.logaddexp.default, self._begin_carry(node, wide, start=-math.inf), part)
        total = self._begin_carry(node, wide, is_donated=True)
        rows = self._rows_or_zeros(source, self.inner[source])
        part = self.body.emit(_aten.sum.dim_IntList, rows, list_reduction_dims(node), keeps, dtype=wide)
        self.body.emit(_aten.add_.Tensor, total, part)
        return total

    def _look_up(self, node: Node) -> Node:
        """The rows found so far, and those that a turn has. In the first turn the kernel refuses indices outside of the
        leaf."""
        lookup = find_lookup(node)
        assert lookup is not None  # the stream pass has looked
        table, indices = lookup.given, lookup.indices
        turn, place, wrong = self._find_places(lookup)
        turn, place = (
            self.program.emit(_aten.masked_fill.Scalar, x, wrong, value) for x, value in ((turn, 0), (place, -1))
        )
        before = self._begin_carry(node, node.meta["val"].dtype)
        inside, local = self._look_inside(indices, turn, place, outside=0)
        rows = self.body.emit(_aten.embedding.default, self._rows(table, 0), local)
        for _ in self.plan.layout.leaves[0].shape[1:]:
            inside = self.body.emit(_aten.unsqueeze.default, inside, -1)
        return self.body.emit(_aten.where.self, inside, rows, before)

    # values of a turn

    def _rows(self, node: Node, dim: int) -> Node:
        """The rows of a turn of a value that has the leaf's rows along `dim`."""
        if (node, dim) not in self.made:
            if ops.is_call(node, ops.gather) and node in self.inner:
                made = self._gather(node)
            elif node in self.inner or is_transposed(node):  # a transpose of rows: other uses may take the rows too
                dims = find_dims(node, dim, self.plan.rows)
                assert dims is not None  # the stream pass has looked
                made = self._compute(node, dims, dim)
            else:
                made = self._take_rows(node, dim)
            self.made[node, dim] = made
        return self.made[node, dim]

    def _rows_or_zeros(self, node: Node, dim: int, other: float = 0.0) -> Node:
        """`_rows`, with zeros, or another number, where the leaf has no row: to the zeros that fill chunks a turn may
        have added one."""
        rows, plan = self._rows(node, dim), self.plan
        if plan.world * plan.padded == plan.rows or (not other and keeps_zeros(node, self.inner)):
            return rows
        device, shape = rows.meta["val"].device, [1] * rows.meta["val"].ndim
        ones = self.program.emit(_aten.ones.default, [plan.rows], dtype=torch.bool, device=device)
        self.kinds[ones] = UNIFORM
        shape[dim] = plan.rows_of_chunk
        is_row = self.body.emit(_aten.view.default, self._take_rows(ones, 0), shape)
        return self.body.emit(_aten.where.ScalarOther, is_row, rows, other)

    def _compute(self, node: Node, dims: Dims, dim: int) -> Node:
        """What a node computes, for the rows of a turn along a dimension of its result."""
        lookup = find_lookup_gradient(node)
        if lookup is not None:
            return self._add_up_rows(lookup)
        every = (*dims, *[None] * len(node.args))
        args = [self._rows(x, at) if at is not None else self._share(x) for x, at in zip(node.args, every)]
        made = self.body.emit(node.target, *resize(node, args, dim, self.plan.rows_of_chunk), **node.kwargs)
        made.stack_trace = node.stack_trace
        return made

    def _add_up_rows(self, lookup: Lookup) -> Node:
        """The gradient of the rows of a turn that lookups read. A row more takes what belongs to other turns."""
        emit, rows, indices = self.program.emit, self.plan.rows_of_chunk, lookup.indices
        turn, place, wrong = self._find_places(lookup)
        if lookup.padding >= 0:
            wrong = emit(_aten.logical_or.default, wrong, emit(_aten.eq.Scalar, indices, lookup.padding))
        turn = emit(_aten.masked_fill.Scalar, turn, wrong, -1)
        _, local = self._look_inside(indices, turn, place, outside=rows)
        given = self._share(lookup.given), local, rows + 1, rows, lookup.by_count
        sums = self.body.emit(_aten.embedding_dense_backward.default, *given)
        return self.body.emit(_aten.slice.Tensor, sums, 0, 0, rows)

    def _find_places(self, lookup: Lookup) -> tuple[Node, Node, Node]:
        """Of each index: the turn that has its row, the place of the row in the chunk, and whether no turn has it."""
        emit, held, height, indices = self.program.emit, self.plan.held, self.plan.height, lookup.indices
        if lookup.wraps:
            from_end = emit(_aten.add.Tensor, indices, self.plan.rows)
            indices = emit(_aten.where.self, emit(_aten.lt.Scalar, indices, 0), from_end, indices)
        rank = emit(_aten.div.Tensor_mode, indices, held, rounding_mode="floor")
        row = emit(_aten.remainder.Scalar, indices, held)
        turn = emit(_aten.div.Tensor_mode, row, height, rounding_mode="floor")
        place = emit(_aten.add.Tensor, emit(_aten.mul.Tensor, rank, height), emit(_aten.remainder.Scalar, row, height))
        low, high = emit(_aten.lt.Scalar, indices, 0), emit(_aten.ge.Scalar, indices, self.plan.rows)
        return turn, place, emit(_aten.logical_or.default, low, high)

    def _look_inside(self, indices: Node, turn: Node, place: Node, outside: int) -> tuple[Node, Node]:
        """In a turn: whether each index has its row there, and the place of the row; `outside` for other indices."""
        numbers = self.program.emit(
            _aten.arange.default, self.plan.turns, dtype=torch.int64, device=indices.meta["val"].device
        )
        now = self._give("xs", "turn", numbers, Argument("", kind=UNIFORM), numbers.meta["val"][0])
        inside = self.body.emit(_aten.eq.Tensor, self._keep(turn, indices), now)
        other = self.body.emit(_aten.logical_not.default, inside)
        return inside, self.body.emit(_aten.masked_fill.Scalar, self._keep(place, indices), other, outside)

    # what a turn is given

    def _give(self, sort: str, key: Any, outer: Node, argument: Argument, value: Any) -> Node:
        """The placeholder of an argument of the body."""
        given = self.given[sort]
        if key not in given:
            path = argument.path or f"{sort}.{len(given)}"
            placeholder = self.graph.placeholder(f"{sort}_{len(given)}")
            placeholder.meta["val"] = value
            given[key] = (outer, placeholder, replace(argument, path=path))
        return given[key][1]

    def _share(self, given: Any) -> Any:
        """A value that all turns use whole. What is no node stays."""
        return self._keep(given, given) if isinstance(given, fx.Node) else given

    def _keep(self, node: Node, like: Node) -> Node:
        """A value of the kind of `like` that all turns use whole."""
        return self._give("constants", node, node, Argument("", kind=self.kinds[like]), node.meta["val"])

    def _gather(self, node: Node) -> Node:
        """The gathered chunk of a leaf. A slice that is cast to be gathered is cast in the turn."""
        source, bucket, leaf, _ = LeafMove(*node.args)
        cast = source if is_cast(source) else None
        source = source if cast is None else operand_of(cast)
        chunk, shard = self.plan.layout.bucket, self.plan.layout.shard
        if source not in self.given["lists"]:
            outer = self.program.emit(ops.cut, source, bucket, leaf, chunk, self.plan.turns, shard)
        else:
            outer = self.given["lists"][source][0]
        path = self.program.layouts[bucket].leaves[leaf].path
        argument = Argument(path, chunk, 0, kind=Slice(chunk, 0))
        part = self._give("lists", source, outer, argument, outer.meta["val"][0])
        part = part if cast is None else self.body.emit(cast.target, part, **cast.kwargs)
        return self.body.emit(ops.gather, part, chunk, 0, list(self.plan.layout.leaves[0].shape))

    def _take_rows(self, node: Node, dim: int) -> Node:
        """The rows of a turn of a value from outside of the loop: [..., N * height, ...]."""
        shape, plan, emit = list(node.meta["val"].shape), self.plan, self.program.emit
        before, after = shape[:dim], shape[dim + 1 :]
        x = self._pad(node, len(after), plan.world * plan.held - plan.rows)
        x = emit(_aten.view.default, x, [*before, plan.world, plan.held, *after])
        x = self._pad(x, len(after), plan.padded - plan.held)
        x = emit(_aten.view.default, x, [*before, plan.world, plan.turns, plan.height, *after])
        outer = emit(_aten.permute.default, x, [dim + 1, *(i for i in range(len(shape) + 2) if i != dim + 1)])
        argument = Argument("", kind=self.kinds[node])
        return _merge(self.body, self._give("xs", (node, dim), outer, argument, outer.meta["val"][0]), dim)

    def _pad(self, x: Node, behind: int, count: int) -> Node:
        """A value with `count` zeros more along the dimension that has `behind` others behind it."""
        return self.program.emit(_aten.constant_pad_nd.default, x, [*[0] * (2 * behind), 0, count]) if count else x

    def _begin_carry(self, like: Node, dtype: torch.dtype, start: float = 0.0, is_donated: bool = False) -> Node:
        """What turns have computed so far of a value like that of a node: `start` in front of the loop."""
        shape, device = list(like.meta["val"].shape), like.meta["val"].device
        before = self.program.emit(_aten.full.default, shape, start, dtype=dtype, device=device)
        argument = Argument(f"carry.{len(self.given['carry'])}", donated=is_donated, kind=self.kinds[like])
        return self._give("carry", like, before, argument, before.meta["val"])

    def _join_rows(self, stacked: Node, use: Use) -> Node:
        """The whole value, of which each turn made rows: [turns, ..., N * height, ...] -> [..., rows, ...]."""
        plan, shape, dim, emit = self.plan, list(use.node.meta["val"].shape), use.dim, self.program.emit
        before, after = shape[:dim], shape[dim + 1 :]
        x = emit(_aten.view.default, stacked, [plan.turns, *before, plan.world, plan.height, *after])
        order = [*range(1, dim + 2), 0, *range(dim + 2, len(shape) + 2)]
        x = emit(_aten.permute.default, x, order)  # [..., N, turns, height, ...]
        x = _merge(self.program, x, dim + 1)
        if plan.padded > plan.held:
            x = emit(_aten.slice.Tensor, x, dim + 1, 0, plan.held)
        x = _merge(self.program, x, dim)
        return x if plan.world * plan.held == plan.rows else emit(_aten.slice.Tensor, x, dim, 0, plan.rows)


def _merge(program: Program, x: Node, dim: int) -> Node:
    """A value with the dimensions `dim` and the next as one: a view where the strides allow one, else of a copy."""
    shape, stride = x.meta["val"].shape, x.meta["val"].stride()
    if 1 not in shape[dim : dim + 2] and stride[dim] != stride[dim + 1] * shape[dim + 1]:
        x = program.emit(_aten.clone.default, x, memory_format=torch.contiguous_format)
    return program.emit(_aten.view.default, x, [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]])
