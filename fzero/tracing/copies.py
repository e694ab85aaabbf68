"""Copies of a part of a trace: the same operations on other operands, without running what called them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from fzero.base.torch_private import OpOverload, storage_key
from fzero.base.torch_private_traces import TraceGraph
from fzero.program.operation import Node
from fzero.program.records import find_writes
from fzero.tracing.repeats import Repeats
from fzero.values.regions import Mark, get_mark, set_mark

_NUMBERS = (operator.getitem, int)
"""What nodes may call besides operations of torch: an item of a list, and a number that is known by its value."""


Nodes = dict[Node, Node]


class Uncopied(Exception):
    """A part of a trace that is more than a copy of it would be."""


Name = tuple[str, int]
"""The kind of a node of a part, or of a value that it is given, and its place among those."""


class _Step(NamedTuple):
    """A node of a part. `args` and `kwargs` have the operands at `places` of theirs, if these are `flat`; `forms` are
    those of its values, if it calls an operation, by the values of its `tensors`."""

    node: Node
    name: Name
    args: Callable[[Nodes], Any]
    kwargs: Callable[[Nodes], Any]
    forms: Any
    tensors: list[Node]


class Part:
    """The nodes of a trace behind the node `last`, of a `kind` that their names have. They compute with `given` ones.

    Raises:
        Uncopied: where a node is no operation of torch, or writes into memory that was there before the part, and where
            a result is more than its form.
    """

    def __init__(
        self, traced: TraceGraph, repeats: Repeats, last: Node | None, given: Mapping[Name, Node], kind: str
    ) -> None:
        self._traced, self._repeats = traced, repeats
        self.nodes: list[Node] = list(traced.nodes_after(last))
        self.own = {(kind, i): node for i, node in enumerate(self.nodes)}
        """The nodes of the part by name."""
        self.names = {node: name for name, node in reversed((dict(given) | self.own).items())}
        self.outer: list[Node] = []
        """Operands that are not among those given."""
        own = set[int]()
        self._steps = [self._take(node, own) for node in self.nodes]

    def _take(self, node: Node, own: set[int]) -> _Step:
        is_operation = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
        if node.op != "call_function" or not (is_operation or node.target in _NUMBERS):
            raise Uncopied(f"{node} is no operation of torch")
        operands: list[Node] = []
        _replace(node.args, operands.append)
        _replace(node.kwargs, operands.append)
        self.outer += [x for x in operands if x not in self.names]
        written = [x for x in find_writes(node) if isinstance(x.meta.get("val"), Tensor)]
        if any(storage_key(x.meta["val"]) not in own for x in written):
            raise Uncopied(f"{node} writes into memory that was there before")
        tensors = [x for x in operands if isinstance(x.meta.get("val"), Tensor)]
        value, forms = node.meta.get("val"), None
        if is_operation and isinstance(value, (Tensor, list, tuple)):  # else an item, or a number
            values = [x.meta["val"] for x in tensors]
            forms = self._repeats.find_forms(value, values)
            if forms is None:
                raise Uncopied(f"a result of {node} is more than its form")
            own |= {storage_key(x) for x in ([value] if isinstance(value, Tensor) else value)} - set(map(storage_key, values))
        needed = tensors if forms is not None else operands
        return _Step(node, self.names[node], _fill(node.args), _fill(node.kwargs), forms, needed)

    def describe(self) -> list[Any]:
        """What the part computes, in terms of names. Parts of equal descriptions are copies of each other, but for
        operands that are not among those given."""
        return [self._describe(step) for step in self._steps]

    def _describe(self, step: _Step) -> Any:
        node = step.node
        args, kwargs = (_replace(x, lambda each: self.names.get(each, each)) for x in (node.args, node.kwargs))
        return node.target, args, kwargs, self._repeats.describe_forms(step.forms if step.forms else node.meta["val"])

    def copy(self, given: Mapping[Name, Node], change: Callable[[Mark], Mark]) -> dict[Name, Node]:
        """Trace the operations of the part again, with other values `given` by name. Each new node has the line of the
        node that it copies, and its mark after a `change`. Returns the nodes by name."""
        made, find, new = dict(given), self._repeats.make_value, Nodes()
        for node, name in self.names.items():
            if name in given:
                new[node] = given[name]
        new.update((node, node) for node in self.outer)
        marks: dict[Mark, dict[str, Any]] = {}
        with self._repeats.making():
            for node, name, args, kwargs, forms, needed in self._steps:
                meta, mark = node.meta, get_mark(node)
                if mark not in marks:
                    marks[mark] = {"stack_trace": "", "val": None}
                    set_mark(marks[mark], change(mark))
                if forms is not None:
                    value = find(forms, [new[x].meta["val"] for x in needed])
                elif node.target is operator.getitem:
                    value = new[needed[0]].meta["val"][node.args[1]]
                else:
                    value = meta["val"]
                meta = {**marks[mark], "val": value, "stack_trace": meta["stack_trace"]}
                new[node] = made[name] = self._traced.emit_as(node, args(new), kwargs(new), meta)
        return made


def _fill(given: Any) -> Callable[[Nodes], Any]:
    """A function that fills other nodes into arguments."""
    is_table = isinstance(given, dict)
    items = list(given.values()) if is_table else list(given)
    if not any(isinstance(x, (fx.Node, list, tuple, dict)) for x in items):
        return lambda new: given
    if is_table or any(isinstance(x, (list, tuple, dict)) and x for x in items):
        return lambda new: _replace(given, new.__getitem__)
    places = [(i, x) for i, x in enumerate(items) if isinstance(x, fx.Node)]

    def fill(new: Nodes) -> Any:
        filled = list(given)
        for i, x in places:
            filled[i] = new[x]
        return tuple(filled)

    return fill


def _replace(x: Any, put: Callable[[Node], Any]) -> Any:
    """Arguments of a node, with `put(operand)` in the places of operands."""
    if isinstance(x, fx.Node):
        return put(x)
    if isinstance(x, (list, tuple)):
        return type(x)([_replace(item, put) for item in x]) if len(x) else x
    if isinstance(x, dict):
        return {key: _replace(item, put) for key, item in x.items()} if x else x
    return x
