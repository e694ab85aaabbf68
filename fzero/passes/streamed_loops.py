"""Loops of the stream pass: one use of a large leaf becomes a loop over the leaf's chunks.

A value with the rows of the leaf has N * held of them: `held` rows of each of N ranks. Chunk j has `height` rows of
each rank. So a value that the loop reads by rows is seen as [N, turns, height], and turn j takes [:, j].
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from fzero.base.dtypes import accumulator
from fzero.base.torch_private import find_root
from fzero.layout.streams import Stream
from fzero.passes.order import is_cast
from fzero.passes.rows import Dims, find_dims, resize
from fzero.program import ops
from fzero.program.kinds import UNIFORM, Kind, Slice
from fzero.program.operation import Node
from fzero.program.ops.loops import Loop
from fzero.program.program import Argument, Program, Result
from fzero.program.records import name_of

_aten = torch.ops.aten
_PRODUCTS = {"mm": _aten.mm.default, "addmm": _aten.mm.default, "bmm": _aten.bmm.default}

_SORTS = ("carry", "xs", "lists", "constants")
"""The sorts of arguments of a body, in order."""


class Use(NamedTuple):
    """One use of a leaf by rows: the `node`, and what it needs of its operands (`dims`).

    * "rows": the result has the leaf's rows along `dim`.
    * "sum": the result is a sum over the leaf's rows.
    * "lookup": the result has some of the rows, by indices.
    * "scatter": the node scatters a gradient of the leaf.
    """

    node: Node
    how: Literal["rows", "sum", "lookup", "scatter"]
    dims: Dims = ()
    dim: int = 0


def emit_use(program: Program, kinds: dict[Node, Kind], plan: Stream, inner: Mapping[Node, int], use: Use) -> None:
    """Replace a use by a loop over the chunks of its leaf, in the program's own graph. Notes the kinds of new nodes.

    `inner` has the nodes that are computed within turns, each with the dimension of the leaf's rows in its result; the
    gathers of the leaf are among them.
    """
    with program.graph.inserting_before(_find_place(program, use, inner)):
        result = _Emitter(program, kinds, plan, inner).emit(use)
    kinds[result] = kinds[use.node]
    program.substitute(use.node, result)


def _find_place(program: Program, use: Use, inner: Mapping[Node, int]) -> Node:
    """The node in front of which a loop stands: the use, and for a gradient the first that has all inputs behind it."""
    if use.how != "scatter":
        return use.node
    inputs, stack = list(program.placeholders), [use.node]
    while stack:
        for source in stack.pop().all_input_nodes:
            (stack if source in inner else inputs).append(source)
    place: Node = max(inputs).next
    return place


class _Emitter:
    """Emits one loop: its body, node by node, and around it what the body is given, at the insert point of `program`.

    Arguments of the body: the sum so far, rows of values, the chunk of each slice, values that all turns share.
    """

    def __init__(self, program: Program, kinds: dict[Node, Kind], plan: Stream, inner: Mapping[Node, int]) -> None:
        self.program, self.kinds, self.plan, self.inner = program, kinds, plan, inner
        self.graph = fx.Graph()
        self.body = replace(
            program, name="turn", graph=self.graph, arguments=(), results=(), constants={}, pass_state=(), read=(),
            remarks=(),
        )  # fmt: skip
        self.given: dict[str, dict[Any, tuple[Node, Node, Argument]]] = {sort: {} for sort in _SORTS}
        """For each sort of argument, by what it is of: the outer operand, the placeholder, the argument."""
        self.made: dict[Node, Node] = {}

    def emit(self, use: Use) -> Node:
        """The node, behind the loop, that takes the place of the use."""
        node = use.node
        if use.how == "rows":
            return self._join_rows(self._stack(self._compute(node, use.dims, use.dim), self.kinds[node]), use)
        if use.how == "scatter":
            return self._scatter(node)
        return self._sum(use) if use.how == "sum" else self._look_up(node)

    # uses

    def _scatter(self, node: Node) -> Node:
        full, bucket, leaf, numel = node.args
        chunk, shard = self.plan.layout.bucket, self.plan.layout.shard
        kind = replace(self.kinds[node], bucket=chunk, leaf=0)
        part = self.body.emit(ops.scatter, self._rows(full, 0), chunk, 0, shard, **node.kwargs)
        stacked = self._stack(part, kind)
        return self.program.emit(ops.join, stacked, bucket, leaf, chunk, numel)

    def _sum(self, use: Use) -> Node:
        node, dtype = use.node, use.node.meta["val"].dtype
        wide = accumulator(dtype)
        operands = [self._rows(x, dim) for x, dim in zip(node.args, use.dims) if dim is not None]
        before = self._begin_carry(node, wide)
        part = self.body.emit(_PRODUCTS[name_of(node)], *operands)
        total = self._carry(self.body.emit(_aten.add.Tensor, before, part), self.kinds[node])
        if name_of(node) == "addmm":
            total = self.program.emit(_aten.add.Tensor, total, node.args[0])
        return total if wide == dtype else self.program.emit(_aten._to_copy.default, total, dtype=dtype)

    def _look_up(self, node: Node) -> Node:
        """A lookup takes the rows that a turn has. In the first turn the kernel refuses indices outside of the leaf."""
        table, indices = node.args[:2]
        turn, place, wrong = self._find_places(indices)
        turn, place = (
            self.program.emit(_aten.masked_fill.Scalar, x, wrong, value) for x, value in ((turn, 0), (place, -1))
        )
        before = self._begin_carry(node, node.meta["val"].dtype)
        inside, local = self._look_inside(indices, turn, place, outside=0)
        rows = self.body.emit(_aten.embedding.default, self._rows(table, 0), local)
        for _ in self.plan.layout.leaves[0].shape[1:]:
            inside = self.body.emit(_aten.unsqueeze.default, inside, -1)
        return self._carry(self.body.emit(_aten.where.self, inside, rows, before), self.kinds[node])

    # values of a turn

    def _rows(self, node: Node, dim: int) -> Node:
        """The rows of a turn of a value that has the leaf's rows along `dim`."""
        if node not in self.inner:
            return self._take_rows(node, dim)
        if node not in self.made:
            dims = () if ops.is_call(node, ops.gather) else find_dims(node, dim, self.plan.rows)
            assert dims is not None  # the stream pass has looked
            self.made[node] = self._gather(node) if not dims else self._compute(node, dims, dim)
        return self.made[node]

    def _compute(self, node: Node, dims: Dims, dim: int) -> Node:
        """What a node computes, for the rows of a turn along a dimension of its result."""
        if name_of(node) == "embedding_dense_backward":
            return self._add_up_rows(node)
        every = (*dims, *[None] * len(node.args))
        args = [self._rows(x, at) if at is not None else self._share(x) for x, at in zip(node.args, every)]
        made = self.body.emit(node.target, *resize(node, args, dim, self.plan.rows_of_chunk), **node.kwargs)
        made.stack_trace = node.stack_trace
        return made

    def _add_up_rows(self, node: Node) -> Node:
        """The gradient of the rows of a turn that lookups read. A row more takes what belongs to other turns."""
        gradient, indices, _, padding, by_count = node.args
        emit, rows = self.program.emit, self.plan.rows_of_chunk
        turn, place, wrong = self._find_places(indices)
        if padding >= 0:
            wrong = emit(_aten.logical_or.default, wrong, emit(_aten.eq.Scalar, indices, padding))
        turn = emit(_aten.masked_fill.Scalar, turn, wrong, -1)
        _, local = self._look_inside(indices, turn, place, outside=rows)
        sums = self.body.emit(node.target, self._share(gradient), local, rows + 1, rows, by_count)
        return self.body.emit(_aten.slice.Tensor, sums, 0, 0, rows)

    def _find_places(self, indices: Node) -> tuple[Node, Node, Node]:
        """Of each index: the turn that has its row, the place of the row in the chunk, and whether no turn has it."""
        emit, held, height = self.program.emit, self.plan.held, self.plan.height
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
        source, bucket, leaf, _ = node.args
        cast = source if is_cast(source) else None
        source = source if cast is None else cast.args[0]
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
        shape, plan = list(node.meta["val"].shape), self.plan
        if ("rows", node, dim) not in self.given["xs"]:
            x, behind = node, len(shape) - dim - 1
            before, after = shape[:dim], shape[dim + 1 :]
            x = self._pad(x, behind, plan.world * plan.held - plan.rows)
            x = self.program.emit(_aten.view.default, x, [*before, plan.world, plan.held, *after])
            x = self._pad(x, behind, plan.padded - plan.held)
            x = self.program.emit(_aten.view.default, x, [*before, plan.world, plan.turns, plan.height, *after])
            at = dim + 1
            order = [at, *(i for i in range(len(shape) + 2) if i != at)]
            outer = self.program.emit(_aten.permute.default, x, order)
        else:
            outer = self.given["xs"]["rows", node, dim][0]
        argument = Argument("", kind=self.kinds[node])
        row = self._give("xs", ("rows", node, dim), outer, argument, outer.meta["val"][0])
        return _merge(self.body, row, dim)

    def _pad(self, x: Node, behind: int, count: int) -> Node:
        """A value with `count` zeros more along the dimension that has `behind` others behind it."""
        return self.program.emit(_aten.constant_pad_nd.default, x, [*[0] * (2 * behind), 0, count]) if count else x

    # the loop

    def _begin_carry(self, like: Node, dtype: torch.dtype) -> Node:
        """What turns have computed so far of a value like that of a node: zeros in front of the loop."""
        shape, device = list(like.meta["val"].shape), like.meta["val"].device
        start = self.program.emit(_aten.zeros.default, shape, dtype=dtype, device=device)
        argument = Argument("carry.0", kind=self.kinds[like])
        return self._give("carry", "carry", start, argument, start.meta["val"])

    def _carry(self, result: Node, kind: Kind) -> Node:
        return self._run(result, Result("carry.0", kind=kind))

    def _stack(self, result: Node, kind: Kind) -> Node:
        bucket, leaf = (kind.bucket, kind.leaf) if isinstance(kind, Slice) else (None, 0)
        return self._run(result, Result("y.0", bucket, leaf, kind=kind))

    def _run(self, result: Node, returned: Result) -> Node:
        """The one result of the loop, whose body returns `result`."""
        given = [each for sort in _SORTS for each in self.given[sort].values()]
        anchor = find_root(self.graph)
        for _, placeholder, _ in given:  # they were made where the body first uses them
            anchor.append(placeholder)
            anchor = placeholder
        self.graph.output([result])
        layouts = {**self.program.layouts, self.plan.layout.bucket: self.plan.layout}
        body = replace(
            self.body, arguments=tuple(argument for _, _, argument in given), results=(returned,), layouts=layouts
        )
        carry, xs, lists, constants = ([outer for outer, _, _ in self.given[sort].values()] for sort in _SORTS)
        loop = Loop(body, self.plan.turns, carry, xs, lists, constants)
        return self.program.emit(operator.getitem, self.program.emit(ops.loop, *loop), 0)

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
