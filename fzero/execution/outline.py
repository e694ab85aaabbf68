"""Fragments: what a program computes between its collectives, as functions of tensors; equal ones are one function."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx

from fzero.program import ops
from fzero.program.inference import infer
from fzero.program.kinds import RAGGED, Kind
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import find_writes, is_call, is_random, name_of, shares_memory
from fzero.values.regions import DOTS

LEAST = 2
"""A fragment has as many operations that may be fused: with less there is nothing to gain."""

_PASSED_OVER = (ops.whole, ops.part, operator.getitem)
_ACCUMULATE = frozenset({"embedding_dense_backward", "index_put", "index_add", "scatter_add", "scatter_reduce"})
"""Inductor makes these of additions that threads do in any order: a step would not repeat bit for bit."""


class Value(NamedTuple):
    """What of a tensor decides how it is computed with."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Fragment:
    """A function of tensors that gives a tuple of tensors: the plain operations of `graph`.

    It writes to nothing, and no result shares memory with another, or with an input. `code`, and what `inputs` are,
    are all that there is to it: fragments that have both in common are equal.
    """

    __name__: ClassVar[str] = "fragment"
    code: str
    inputs: tuple[Value, ...]
    graph: fx.Graph = field(compare=False, repr=False)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Operation by operation."""
        return self._forward(*tensors)

    @cached_property
    def _forward(self) -> Any:
        return fx.GraphModule({}, self.graph).forward


def outline(program: Program) -> Program:
    """Put a call of a `Fragment` in the place of each run of plain operations in which there is something to fuse.

    Same results, bit for bit, where fragments run as they are. A run ends at what is more than a computation: at
    collectives, draws and writes, and at what is computed from slices, whose sizes differ between ranks. It also ends
    where leaves of another bucket are used, so that layers stay apart where no collective parts them. Views of what a
    fragment takes, or gives, are made outside of it.
    """
    program = program.copy()
    for item in program.graph.find_nodes(op="call_function", target=operator.getitem):
        item.args[0].append(item)  # so that no run ends between them
    for run in list(_runs(program)):
        _outline(program.graph, run)
    return program


def _runs(program: Program) -> Iterator[list[Node]]:
    """The runs, with the views that are passed over."""
    kinds, bucket_of, bucket, run = infer(program), dict[Node, str](), "", list[Node]()
    for node in program.graph.nodes:
        used = [bucket_of[source] for source in node.all_input_nodes if source in bucket_of]
        if is_call(node, ops.whole):
            bucket_of[node] = node.args[1]
        elif used and shares_memory(node):
            bucket_of[node] = used[0]
        elif used and bucket not in used:
            yield run
            bucket, run = used[0], []
        if node.op == "get_attr" or is_call(node, *_PASSED_OVER) or _is_plain(node, kinds):
            run.append(node)
        else:
            yield run
            run = []


def _is_plain(node: Node, kinds: dict[Node, Kind]) -> bool:
    """Whether a node only computes, from and to tensors of the same sizes on all ranks."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "aten":
        return False
    if find_writes(node) or is_random(node) or name_of(node) in _ACCUMULATE:
        return False
    values = [node, *node.all_input_nodes]
    return all(isinstance(kinds[x], frozenset) and RAGGED not in kinds[x] and _is_ordinary(x) for x in values)


def _is_ordinary(node: Node) -> bool:
    """Whether a node's value is of tensors that shape, strides, dtype and device describe."""
    return all(isinstance(x, Tensor) and x.layout == torch.strided and not x.is_complex() for x in _tensors(node))


def _tensors(node: Node) -> list[Any]:
    """A node's value, or those of its values that are there."""
    value = node.meta.get("val")
    return [x for x in value if x is not None] if isinstance(value, (list, tuple)) else [value]


def _outline(graph: fx.Graph, run: Sequence[Node]) -> None:
    """Put a call behind a run, and what is a view of its results behind that; the run's own nodes go."""
    inside = _inside(run)
    if sum(map(_may_fuse, inside)) < LEAST:
        return
    outputs, views = _find_needed(inside)
    fragment, inputs = _fragment(inside, outputs)
    with graph.inserting_after(run[-1]):
        call = last = graph.call_function(fragment, tuple(inputs))
    call.meta["val"] = tuple(output.meta["val"] for output in outputs)
    for i, output in enumerate(outputs):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (call, i))
        last.meta = dict(output.meta)
        output.replace_all_uses_with(last)
    for view in views:
        last.append(view)
        last = view
    for node in reversed(inside):
        if node not in views:
            graph.erase_node(node)


def _inside(run: Sequence[Node]) -> list[Node]:
    """What a run computes, with views of that, but not the views of what was there before."""
    inside: dict[Node, None] = {}
    for node in run:
        if node.op == "call_function" and (not shares_memory(node) or node.all_input_nodes[0] in inside):
            inside[node] = None
    return list(inside)


def _may_fuse(node: Node) -> bool:
    """Whether a node is worth compiling with another: not a view, a matrix product, or of numbers only."""
    if shares_memory(node) or name_of(node) in DOTS:
        return False
    return any(x.ndim for source in node.all_input_nodes for x in _tensors(source))


def _find_needed(inside: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """What others need of it: tensors that it has to give, and views of those, which are made outside. In order."""
    outputs, views, own = list[Node](), list[Node](), set(inside)
    for node in reversed(inside):
        if any(user not in own for user in node.users):
            (views if _is_view(node) else outputs).append(node)
            if _is_view(node):
                own.remove(node)
    return outputs[::-1], views[::-1]


def _is_view(node: Node) -> bool:
    """Whether a node's value shares memory with that of another; an item of several results is a result itself."""
    return shares_memory(node.args[0] if is_call(node, operator.getitem) else node)


def _fragment(inside: Sequence[Node], outputs: Sequence[Node]) -> tuple[Fragment, list[Node]]:
    """What computes these outputs, and the nodes that it takes."""
    needed = set(outputs)
    for node in reversed(inside):
        if node in needed:
            needed.update(node.all_input_nodes)
    body = [node for node in inside if node in needed]
    inputs = list(dict.fromkeys(x for node in body for x in node.all_input_nodes if x not in inside))
    graph, values = fx.Graph(), dict[Node, Node]()
    for i, node in enumerate(inputs):
        values[node] = graph.placeholder(f"x{i}")
    for i, node in enumerate(body):
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = graph.create_node("call_function", node.target, args, kwargs, name=f"y{i}")
    graph.output(tuple(values[node] for node in outputs))
    return Fragment(str(graph), tuple(_describe(node.meta["val"]) for node in inputs), graph), inputs


def _describe(x: Tensor) -> Value:
    return Value(tuple(x.shape), x.stride(), x.dtype, x.device)
