"""Copies of a part of a trace: the same operations on other operands, without running what called them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.immutable_collections import immutable_list

from fzero.base.symbols import is_open, key_of
from fzero.base.torch_private import OpOverload, no_dispatch, storage_key
from fzero.base.torch_private_traces import TraceGraph
from fzero.program.operation import Node
from fzero.program.records import find_writes
from fzero.tracing.repeats import Repeats, is_plain_result
from fzero.values.regions import Mark, get_mark, set_mark

Nodes = dict[Node, Node]


class Uncopied(Exception):
    """A part of a trace that is more than a copy of it would be."""


Name = tuple[str, int]
"""The kind of a node of a part, or of a value that it is given, and its place among those."""


class _Copied(NamedTuple):
    """A node of a part, with numbers for the nodes that stand for numbers. `forms` are those of its values by the
    values of its `operands`; None for an item of another one, and for a constant, of which `args` are the position
    among buffers and empty tensors."""

    node: Node
    name: Name
    args: Any
    kwargs: Any
    forms: Any
    operands: list[Node]


class TracePart:
    """The nodes of a trace behind the node `last`, of a `kind` that their names have. They compute with `given` ones,
    and with `buffers` of a module.

    Raises:
        Uncopied: where a node is no operation of torch and no buffer, or writes into memory that was there before the
            part, and where a result is more than its form.
    """

    def __init__(
        self,
        traced: TraceGraph,
        repeats: Repeats,
        last: Node | None,
        given: Mapping[Name, Node],
        kind: str,
        buffers: Sequence[Tensor],
    ) -> None:
        self._traced, self._repeats, self._buffers = traced, repeats, buffers
        self.nodes: list[Node] = [node for node in traced.nodes_after(last) if not _is_number(node)]
        self.own = {(kind, i): node for i, node in enumerate(self.nodes)}
        """The nodes of the part by name."""
        self.names = {node: name for name, node in reversed((dict(given) | self.own).items())}
        self.outer: list[Node] = []
        """Operands that are not among those given."""
        self._empty: list[Tensor] = []
        own = set[int]()
        self._steps = [self._take(node, own) for node in self.nodes]

    def _take(self, node: Node, own: set[int]) -> _Copied:
        if node.op == "get_attr":
            return self._take_constant(node)
        is_operation = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
        if node.op != "call_function" or not (is_operation or node.target is operator.getitem):
            raise Uncopied(f"{node} is no operation of torch")
        args, kwargs = (_replace(x, _take_number) for x in (node.args, node.kwargs))
        operands: list[Node] = []
        _replace((args, kwargs), operands.append)
        self.outer += [x for x in operands if x not in self.names]
        written = [x for x in find_writes(node) if isinstance(x.meta.get("val"), Tensor)]
        if any(storage_key(x.meta["val"]) not in own for x in written):
            raise Uncopied(f"{node} writes into memory that was there before")
        if not is_operation:
            return _Copied(node, self.names[node], args, kwargs, None, operands)
        tensors = [x for x in operands if isinstance(x.meta["val"], Tensor)]
        value, values = node.meta["val"], [x.meta["val"] for x in tensors]
        results = [value] if isinstance(value, Tensor) else value
        made = [x for x in results if isinstance(x, Tensor)]
        forms = None
        if all(isinstance(x, Tensor) or is_plain_result(x) for x in results):
            forms = self._repeats.find_forms(value, values)
        if forms is None:
            raise Uncopied(f"a result of {node} is more than its form")
        own |= set(map(storage_key, made)) - set(map(storage_key, values))
        return _Copied(node, self.names[node], args, kwargs, forms, tensors)

    def _take_constant(self, node: Node) -> _Copied:
        constant = self._traced.constant_of(node)
        at = next((i for i, x in enumerate(self._buffers) if x is constant), None)
        is_empty = type(constant) is Tensor and constant.numel() == 0 and all(x.target is LIFT for x in node.users)
        if at is None and not is_empty:
            raise Uncopied(f"{node} is no buffer of the layer")
        node.meta["val"] = self._repeats.make_constant(constant)
        if at is None:
            at = len(self._buffers) + len(self._empty)
            self._empty.append(constant)
        return _Copied(node, self.names[node], at, {}, None, [])

    def describe(self) -> list[Any]:
        """What the part computes, in terms of names. Parts of equal descriptions are copies of each other, but for
        operands that are not among those given."""
        return [self._describe(step) for step in self._steps]

    def _describe(self, step: _Copied) -> Any:
        if step.node.op == "get_attr":
            is_buffer = step.args < len(self._buffers)
            return "constant", step.args, None if is_buffer else self._repeats.describe_form(step.node.meta["val"])
        args, kwargs = (_replace(x, lambda each: self.names.get(each, each), key_of) for x in (step.args, step.kwargs))
        return step.node.target, args, kwargs, self._repeats.describe_forms(step.forms)

    def copy(
        self,
        given: Mapping[Name, Node],
        change: Callable[[Mark], Mark],
        lines: Mapping[str, str],
        buffers: Sequence[Tensor],
    ) -> dict[Name, Node]:
        """Trace the operations of the part again, with other values `given` by name, and other buffers. Each new node
        has the mark of the node that it copies, after a `change`, and its line, or the one that `lines` has for it.
        Returns the nodes by name."""
        made, find, new = dict(given), self._repeats.make_value, Nodes()
        for node, name in self.names.items():
            if name in given:
                new[node] = given[name]
        new.update((node, node) for node in self.outer)
        marks: dict[Mark, dict[str, Any]] = {}
        taken = {step.args for step in self._steps if step.node.op == "get_attr"}
        with no_dispatch():  # each layer makes empty tensors of its own
            tensors = [*buffers, *(x.clone() for x in self._empty)]
        constants = {i: self._repeats.make_constant(tensors[i]) for i in taken}
        with self._repeats.making():
            for node, name, args, kwargs, forms, needed in self._steps:
                mark = get_mark(node)
                if mark not in marks:
                    set_mark(marks.setdefault(mark, {}), change(mark))
                line = node.meta["stack_trace"]
                meta = {**marks[mark], "stack_trace": lines.get(line, line)}
                if node.op == "get_attr":
                    meta["val"] = constants[args]
                    new[node] = made[name] = self._traced.emit_constant(tensors[args], meta)
                    continue
                if forms is None:
                    value = None if node.meta.get("val") is None else new[needed[0]].meta["val"][args[1]]
                else:
                    value = find(forms, [new[x].meta["val"] for x in needed])
                meta["val"] = value
                args, kwargs = _fill(args, new), _fill(kwargs, new) if kwargs else kwargs
                new[node] = made[name] = self._traced.emit_as(node, args, kwargs, meta)
        return made


def _is_number(node: Node) -> bool:
    """Whether a node stands for a number, which is known by its value."""
    return node.op == "call_function" and node.target is int


def _take_number(node: Node) -> Any:
    return node.meta["val"] if _is_number(node) else node


def _fill(given: Any, new: Nodes) -> Any:
    """Arguments with new nodes for operands."""
    return _replace(given, new.__getitem__)


def _replace(x: Any, put: Callable[[Node], Any], write: Callable[[Any], Any] | None = None) -> Any:
    """Arguments of a node, with `put(operand)` in the places of operands, and `write(number)` in those of open
    numbers."""
    kind = type(x)
    if kind is fx.Node:
        return put(x)
    if kind in _LISTS:
        return kind([_replace(item, put, write) for item in x])
    if isinstance(x, dict):
        return {key: _replace(item, put, write) for key, item in x.items()}
    return write(x) if write is not None and is_open(x) else x


LIFT = torch.ops.aten.lift_fresh_copy.default
"""What `torch.tensor(data)` calls to have a tensor of the trace."""
_LISTS = frozenset({tuple, list, immutable_list})
