"""Fragments: the computations between a program's collectives as functions of tensors, to compile. Equal fragments are
one function."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx

from fzero.base.symbols import key_of
from fzero.base.torch_private_functions import call_function
from fzero.program import ops
from fzero.program.arguments import bucket_of, operand_of
from fzero.program.inference import infer
from fzero.program.kinds import RAGGED, Kind
from fzero.program.open import map_numbers
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import alias_of, find_writes, is_call, is_random, name_of, shares_memory
from fzero.values.regions import DOTS

LEAST = 2
"""The number of operations that can be fused from which on a fragment is worth compiling."""

_PASSED_OVER = (ops.whole, ops.part, operator.getitem)
_ACCUMULATE = frozenset({"embedding_dense_backward", "index_put", "index_add", "scatter_add", "scatter_reduce"})
"""Operations that inductor compiles to additions in the order of threads, so that a step would not repeat bit for
bit."""


class Value(NamedTuple):
    """The properties of a tensor that compiled code depends on. An open size or stride has its `key_of` here."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Fragment:
    """A function of tensors that returns a tuple of tensors, by the aten operations of `graph`.

    It writes to no input, and its results share no memory with each other or with an input. Behind the tensors it takes
    the `numbers` that the operations of an open program compute with. Fragments of equal `code`, `inputs` and `keys` of
    numbers are equal.
    """

    __name__: ClassVar[str] = "fragment"
    code: str
    inputs: tuple[Value, ...]
    graph: fx.Graph = field(compare=False, repr=False)
    keys: tuple[Any, ...] = ()
    numbers: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    def __call__(self, *given: Any) -> tuple[Tensor, ...]:
        """Run operation by operation."""
        return self._forward(*given)

    @cached_property
    def _forward(self) -> Any:
        return fx.GraphModule({}, self.graph).forward


def outline(program: Program) -> Program:
    """Replace each run of plain operations in which something can be fused by a call of a `Fragment`.

    A run ends at collectives, at random draws, at writes, and at values computed from slices, whose sizes differ
    between ranks. A run also ends where the program begins to use another bucket, so that equal layers give equal
    fragments. Views of a fragment's inputs and results are taken outside of the fragment. Same results, bit for bit,
    where fragments run operation by operation.
    """
    program = ops.map_bodies(program.copy(), outline)
    for item in program.graph.find_nodes(op="call_function", target=operator.getitem):
        operand_of(item).append(item)  # items stand right behind their list, so that no run ends between them
    for run in list(_find_runs(program)):
        _outline(program.graph, run)
    return program


def _find_runs(program: Program) -> Iterator[list[Node]]:
    """The runs of plain operations, with the views of buffers among them, which do not end a run."""
    kinds, names, bucket, run = infer(program), dict[Node, str](), "", list[Node]()
    for node in program.graph.nodes:
        used = [names[source] for source in node.all_input_nodes if source in names]
        if is_call(node, ops.whole):
            names[node] = bucket_of(node)
        elif used and shares_memory(node):
            names[node] = used[0]
        elif used and bucket not in used:
            yield run
            bucket, run = used[0], []
        if node.op == "get_attr" or is_call(node, *_PASSED_OVER) or _is_plain(node, kinds):
            run.append(node)
        else:
            yield run
            run = []


def _is_plain(node: Node, kinds: dict[Node, Kind]) -> bool:
    """Whether a node only computes, and its operands and results have the same sizes on all ranks."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "aten":
        return False
    if find_writes(node) or is_random(node) or name_of(node) in _ACCUMULATE:
        return False
    values = [node, *node.all_input_nodes]
    return all(isinstance(kinds[x], frozenset) and RAGGED not in kinds[x] and _is_ordinary(x) for x in values)


def _is_ordinary(node: Node) -> bool:
    """Whether all tensors of a node's value are described by a `Value`: strided, and not complex."""
    return all(isinstance(x, Tensor) and x.layout == torch.strided and not x.is_complex() for x in _list_tensors(node))


def _list_tensors(node: Node) -> list[Any]:
    """The tensors of a node's value, without the Nones of a list."""
    value = node.meta.get("val")
    return [x for x in value if x is not None] if isinstance(value, (list, tuple)) else [value]


def _outline(graph: fx.Graph, run: Sequence[Node]) -> None:
    """Replace the nodes of a run by a call behind the run, and views of the call's results behind the call."""
    inside = _select_inside(run)
    if sum(map(_may_fuse, inside)) < LEAST:
        return
    outputs, views = _find_outputs(inside)
    fragment, inputs = _make_fragment(inside, outputs)
    with graph.inserting_after(run[-1]):
        call = last = call_function(graph, fragment, (*inputs, *fragment.numbers), {}, "fragment")
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


def _select_inside(run: Sequence[Node]) -> list[Node]:
    """The nodes that a run computes, and views of these, without views of earlier values."""
    inside: dict[Node, None] = {}
    for node in run:
        if node.op == "call_function" and (alias_of(node) is None or alias_of(node) in inside):
            inside[node] = None
    return list(inside)


def _may_fuse(node: Node) -> bool:
    """Whether fusing a node with another saves time: not for views, matrix products and operations on 0-d tensors."""
    if shares_memory(node) or name_of(node) in DOTS:
        return False
    return any(x.ndim for source in node.all_input_nodes for x in _list_tensors(source))


def _find_outputs(inside: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The nodes inside that nodes outside use, in order: first tensors, which the fragment returns, then views of
    these, which are taken outside of it."""
    outputs, views, own = list[Node](), list[Node](), set(inside)
    for node in reversed(inside):
        if any(user not in own for user in node.users):
            (views if _is_view(node) else outputs).append(node)
            if _is_view(node):
                own.remove(node)
    return outputs[::-1], views[::-1]


def _is_view(node: Node) -> bool:
    """Whether a node's value is a view of another node's. An item of several results is a result, and no view."""
    return shares_memory(operand_of(node) if is_call(node, operator.getitem) else node)


def _make_fragment(inside: Sequence[Node], outputs: Sequence[Node]) -> tuple[Fragment, list[Node]]:
    """The fragment that computes `outputs`, and the nodes that are its inputs."""
    needed = set(outputs)
    for node in reversed(inside):
        if node in needed:
            needed.update(node.all_input_nodes)
    body = [node for node in inside if node in needed]
    inputs = list(dict.fromkeys(x for node in body for x in node.all_input_nodes if x not in inside))
    graph, values = fx.Graph(), dict[Node, Node]()
    for i, node in enumerate(inputs):
        values[node] = graph.placeholder(f"x{i}")
    numbers: dict[Any, Any] = {}
    for node in body:
        map_numbers((node.args, node.kwargs), lambda x: numbers.setdefault(key_of(x), x))
    places = {key: graph.placeholder(f"n{i}") for i, key in enumerate(numbers)}
    for i, node in enumerate(body):
        given = map_numbers((node.args, node.kwargs), lambda x: places[key_of(x)])
        args, kwargs = fx.map_arg(given, lambda x: values.get(x, x))
        values[node] = graph.create_node("call_function", node.target, args, kwargs, name=f"y{i}")
    graph.output(tuple(values[node] for node in outputs))
    described = tuple(_describe(node.meta["val"]) for node in inputs)
    return Fragment(str(graph), described, graph, tuple(numbers), tuple(numbers.values())), inputs


def _describe(x: Tensor) -> Value:
    shape, strides = (map_numbers(tuple(sizes), key_of) for sizes in (x.shape, x.stride()))
    return Value(shape, strides, x.dtype, x.device)
