"""Readings of a trace: values, and shapes, that the batch alone decides are computed from the batch of the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.symbols import Symbols
from fzero.base.torch_private import FakeTensor, OpOverload, disable_modes, pytree_leaves, unwrap
from fzero.base.torch_private_traces import TraceGraph
from fzero.base.user_line import current_user_line
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.readings import Reading, flatten
from fzero.program.records import find_writes, is_random, storage
from fzero.program.signature import Argument
from fzero.tracing.kinds import Kinds

_aten = torch.ops.aten
BY_INDEX = frozenset(
    {
        _aten.index.Tensor,
        _aten._unsafe_index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._unsafe_index_put.default,
        _aten._index_put_impl_.default,
    }
)
"""Operations whose second argument is a list of indices, where a mask stands for the numbers of its true elements."""
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MOST_NUMBERS = 64
"""The most numbers of a list that may be open. A longer list is one value, and another list another program."""
_OWN = frozenset({"aten", "prims"})
_FILLS = {
    _aten.zeros_like.default: 0,
    _aten.ones_like.default: 1,
    _aten.new_zeros.default: 0,
    _aten.new_ones.default: 1,
    _aten.full_like.default: None,
    _aten.new_full.default: None,
}
"""Operations that take the shape of their operand, and none of its elements -> what they fill in; None for their last
argument."""
Make = Callable[[Tensor, Any], tuple[Tensor, Tensor]]
"""From a tensor, and its shape and strides with open sizes or None, to a traced tensor and the value of its node."""


class Readings:
    """What a trace takes from the elements of its batch.

    `leaves` are those of the call's arguments, and `state` the positions of those that are no batch. `given` are the
    values of each reading where the trace is one of other sizes than those of `leaves`: then nothing is computed.
    `begin_program` makes a program of a graph and its constants.
    """

    def __init__(
        self,
        traced: TraceGraph,
        kinds: Kinds,
        leaves: Sequence[Any],
        arguments: Sequence[Argument],
        make: Make,
        forms: Mapping[int, Any],
        symbols: Symbols | None,
        given: Sequence[Sequence[Any]] | None,
        begin_program: Callable[[fx.Graph, dict[str, Tensor]], Program],
    ) -> None:
        self._traced, self._kinds, self._leaves, self._make, self._forms = traced, kinds, leaves, make, forms
        self._symbols, self._given, self._begin_program = symbols, given, begin_program
        self.found: list[Reading] = []
        self.count = 0
        """How often the step took something from its batch, what readings had found before too."""
        self.values: list[list[Any]] = []
        self.arguments: list[Argument] = []
        tensors = (i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        self._sources = {
            node: i
            for node, i, argument in zip(kinds.program.placeholders, tensors, arguments)
            if argument.bucket is None and argument.flag is None and not argument.role and _has_elements(leaves[i])
        }
        """The nodes of batches, and of what readings found -> the positions of their values."""
        self._order: dict[Node, int] = {}
        """The nodes that batches alone decide, and captured tensors, in order."""
        self._fixed = {storage(node) for node in self._sources}
        self._captured: dict[int, tuple[Tensor, Node]] = {}
        self._lost = set[Any]()  # memory into which something else was written
        self._known: dict[Any, Any] = {}
        self._last: Node | None = kinds.find_last()

    def is_decided(self, x: Tensor) -> bool:
        """Whether the batch alone decides a tensor's elements."""
        node = self._find_node(x)
        self._follow()
        return node is not None and self._is_alone(node)

    def read_value(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """`[func(*args)]`, a value of Python, where the batch alone decides it; else None."""
        return self._read(func, args, kwargs)

    def read_list(self, x: Tensor) -> list[Any] | None:
        """`[x.tolist()]`, where the batch alone decides it; else None. Few whole numbers may be open."""
        if x.dtype not in _WHOLE or not 0 < x.numel() <= MOST_NUMBERS:
            return self._read(_aten.alias.default, (x,), {}, Tensor.tolist)
        items = self._read(_aten.alias.default, (x,), {}, _list_items)
        if items is None:
            return None
        for size in reversed(x.shape[1:]):
            items = [items[i : i + size] for i in range(0, len(items), size)]
        return [items] if x.ndim else items

    def read_rows(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """`func(*args)`, whose shape the batch alone decides; else None."""
        if func in BY_INDEX:
            indices = self._number(args[1])
            return None if indices is None else func(args[0], indices, *args[2:], **kwargs)
        found = self._read(func, args, kwargs)
        if found is None:
            return None
        return found[0] if len(func._schema.returns) == 1 else tuple(found)

    def _number(self, indices: Sequence[Any]) -> list[Any] | None:
        """Indices with the numbers of the true elements in the place of each mask; None where the batch alone does not
        decide them."""
        numbers = list[Any]()
        for x in indices:
            if not isinstance(x, Tensor) or x.dtype != torch.bool:
                numbers.append(x)
                continue
            found = self._read(_aten.nonzero.default, (x,), {})
            if found is None:
                return None
            numbers += found[0].unbind(1)
        return numbers

    def _read(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], convert: Callable[[Any], Any] | None = None
    ) -> list[Any] | None:
        """What `func` returns, as a list: traced tensors, or values of Python."""
        tensors = [x for x in pytree_leaves((args, dict(kwargs))) if isinstance(x, Tensor)]
        operands = list(map(self._find_node, tensors))
        self._follow()
        if not operands or not all(x is not None and self._is_alone(x) for x in operands):
            return None
        nodes = iter(operands)
        given = fx.node.map_aggregate((args, dict(kwargs)), lambda x: next(nodes) if isinstance(x, Tensor) else x)
        self.count += 1
        key = func, convert, repr(given)
        if key not in self._known:
            self._known[key] = self._add(replace(self._cut(func, given, operands), convert=convert))
        return self._known[key]

    def _find_node(self, x: Tensor) -> Node | None:
        """The node of a traced tensor, or of one that the step captured."""
        node = self._traced.node_of(x)
        if node is None and type(x) is Tensor:
            if id(x) not in self._captured:
                with disable_modes():
                    _, value = self._make(x, None)
                self._captured[id(x)] = x, self._traced.emit_constant(x, {"val": value})
            _, node = self._captured[id(x)]
        return node

    def _is_alone(self, node: Node) -> bool:
        return (node in self._sources or node in self._order) and storage(node) not in self._lost

    def _follow(self) -> None:
        """Note which of the nodes that were traced since the last call batches alone decide."""
        for node in self._traced.nodes_after(self._last):
            self._last = node
            if node.op == "get_attr" and not _is_wrapped(node):  # else only its sizes are asked for
                self._order[node] = len(self._order)
                self._fixed.add(storage(node))
            elif node.op == "call_function" and node.target is int:
                self._order[node] = len(self._order)
            elif node.op == "call_function":
                self._note(node)

    def _note(self, node: Node) -> None:
        written = [storage(x) for x in find_writes(node)]
        self._known = {} if written else self._known
        is_own = isinstance(node.target, OpOverload) and node.target.namespace in _OWN
        is_item = not isinstance(node.target, OpOverload) and node.target.__name__ == "getitem"
        if (
            (is_own or is_item)
            and not is_random(node)
            and (node.target in _FILLS or all(map(self._is_alone, node.all_input_nodes)))
            and self._fixed.isdisjoint(written)
        ):
            self._order[node] = len(self._order)
        else:
            self._lost.update(written)

    def _cut(self, func: Any, given: Any, operands: Sequence[Node]) -> Reading:
        """The reading that calls `func` on what these nodes compute."""
        needed, memory = set(operands), {storage(x) for x in operands}
        for node in reversed(self._order):
            if node in needed or not memory.isdisjoint(map(storage, find_writes(node))):
                found = {node} if node.target in _FILLS else {node, *node.all_input_nodes}
                needed |= found
                memory |= set(map(storage, found))
        graph, copies, constants = fx.Graph(), dict[Node, Any](), dict[str, Tensor]()
        sources = [node for node in self._sources if node in needed]
        for node in (*sources, *(x for x in self._order if x in needed)):
            if node.op == "call_function" and node.target is int:
                copies[node] = node.meta["val"]
                continue
            if node.target in _FILLS:
                copies[node] = _fill(graph, node, copies)
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            op = "placeholder" if node in self._sources else node.op
            copies[node] = graph.create_node(op, node.target, args, kwargs, node.name)
            copies[node].meta["val"] = node.meta["val"]
            if op == "get_attr":
                constants[node.target] = self._traced.constant_of(node)
        args, kwargs = fx.map_arg(given, copies.__getitem__)
        graph.output([graph.create_node("call_function", func, args, kwargs)])
        arguments = tuple(Argument(node.name) for node in sources)
        program = replace(self._begin_program(graph, constants), arguments=arguments)
        return Reading(current_user_line(), program, tuple(self._sources[x] for x in sources))

    def _add(self, reading: Reading) -> list[Any]:
        """Compute a reading. What it finds, with a new argument of the trace for each tensor."""
        first = len(self._leaves) + len(flatten(self.values))
        leaves = [*self._leaves, *flatten(self.values)]
        with disable_modes():
            if self._given is None:
                found = reading.read(leaves, () if self._symbols is None else self._symbols.examples)
            elif len(self.found) < len(self._given):
                found = list(self._given[len(self.found)])
            else:
                raise FzeroError(reading.where, "is read at some sizes, and not at others", "each is traced")
        self.found.append(replace(reading, count=len(found)))
        self.values.append(found)
        return [self._give(reading, x, first + i) for i, x in enumerate(found)]

    def _give(self, reading: Reading, x: Any, position: int) -> Any:
        """A new argument of the trace for a tensor that a reading found. A value of Python itself, or its open size."""
        form = self._forms.get(position)
        if self._symbols is not None and self._given is None and form is not None:
            self._check(reading, x, self._symbols, form[0])
        if not isinstance(x, Tensor):
            return x if form is None else form[0][0]
        with disable_modes():
            fake, value = self._make(x, form)
        node = self._traced.emit_further_argument(f"read{len(self.arguments)}_1", value)
        self._traced.track(fake, node)
        positions = {position: node for node, position in self._sources.items()}
        kind = self._kinds.note_argument(node, [positions[i] for i in reading.sources], reading.program)
        self.arguments.append(Argument(f"read at {reading.where}", own=None if kind else kind))
        self._sources[node] = position
        self._fixed.add(storage(node))
        return fake

    def _check(self, reading: Reading, x: Any, symbols: Symbols, shape: Sequence[Any]) -> None:
        """Refuse a trace with open sizes whose call has other sizes than those that it was opened with."""
        examples = dict(zip(map(id, symbols.sizes), symbols.examples))
        expected = [examples.get(id(size), size) for size in shape]
        found = list(x.shape) if isinstance(x, Tensor) else [x]
        if expected != found:
            raise FzeroError(reading.where, f"found {found}, not {expected}", "the step is traced again")


def _fill(graph: fx.Graph, node: Node, copies: Mapping[Node, Any]) -> Node:
    """New nodes for one of `_FILLS`, which take the shape and the strides of its result and not its operand."""
    value, fill = node.meta["val"], _FILLS[node.target]
    if fill is None:
        *_, last = node.args
        fill = fx.map_arg(node.kwargs.get("fill_value", last), copies.__getitem__)
    shaped = {"dtype": value.dtype, "device": value.device}
    empty = graph.call_function(_aten.empty_strided.default, (list(value.shape), list(value.stride())), shaped)
    filled = graph.call_function(_aten.fill_.Scalar, (empty, fill))
    empty.meta["val"] = filled.meta["val"] = value
    return filled


def _list_items(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.reshape(-1).tolist())


def _is_wrapped(node: Node) -> bool:
    """Whether a transform wraps the value of a node."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and unwrap(value) is not value


def _has_elements(x: Tensor) -> bool:
    return not x.is_meta and not isinstance(x, FakeTensor)
