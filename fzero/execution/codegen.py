"""Linking: a program to the Python function that runs it on one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base.randomness import step_seed
from fzero.execution.outline import Fragment
from fzero.execution.profiling import named
from fzero.layout.layout import wire
from fzero.program import ops
from fzero.program.ops import Node
from fzero.program.program import Program

Runner = Callable[[list[Tensor]], list[Tensor]]
Compile = Callable[[Fragment], Callable[..., Any]]


def link(program: Program, runtime: Any, compile: Compile = lambda fragment: fragment) -> Runner:
    """A function of the program's arguments, on this rank, that returns its tensor results.

    Aten operations run as they are; each operation of `ops` but a view is a call of the method of that name on
    `runtime`, a draw with the step's seed in front; `settle` of it comes before memory is overwritten, and last. The
    code is generated once, and lets go of every value at its last use. A program that draws advances torch's default
    CPU generator by one draw a call. `compile` says what runs in the place of a fragment, and is asked once for equal
    ones.
    """
    graph = fx.Graph()
    values: dict[Node, Node] = {}
    receiver, functions, seed = map(graph.placeholder, ("runtime", "functions", "seed"))
    fragments: dict[Fragment, str] = {}
    for node in program.graph.nodes:
        if node.op == "output" or ops.overwritten(node):
            graph.call_method("settle", (receiver,))
        if node.op == "call_function" and node.target in ops.FAKES:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            given = (receiver, seed) if ops.is_call(node, ops.draw) else (receiver,)
            where = _place(node, program, runtime.on.rank)
            if where is None:
                values[node] = graph.call_method(node.target.__name__.partition(".")[0], (*given, *args), kwargs)
            else:
                values[node] = _view(graph, args[0], where, node)
        elif isinstance(node.target, Fragment):
            name = fragments.setdefault(node.target, f"fragment_{len(fragments)}")
            values[node] = graph.call_method(name, (functions, *fx.map_arg(node.args, values.__getitem__)))
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    forward = fx.GraphModule(program.constants, graph, class_name=program.name).forward
    made = SimpleNamespace(**{name: compile(fragment) for fragment, name in fragments.items()})
    draws = program.draws

    @torch.no_grad()
    def run(tensors: list[Tensor]) -> list[Tensor]:
        with step_seed() if draws else nullcontext() as seed:
            return forward(named(runtime), made, seed, *tensors)

    return run


def _place(node: Node, program: Program, rank: int) -> range | None:
    """Where in its buffer the leaf or slice lies that a node takes; None for another node, and for a leaf in pieces."""
    if not ops.is_call(node, ops.whole, ops.part):
        return None
    _, bucket, leaves, position, _ = node.args
    along = wire(program.layouts[bucket], tuple(leaves))
    if ops.is_call(node, ops.part):
        return along.block(rank)[position]
    pieces = along.pieces(position)
    return pieces[0] if len(pieces) == 1 else None


def _view(graph: fx.Graph, buffer: Node, where: range, node: Node) -> Node:
    """`whole` or `part` by torch alone, without a call of the runtime for each leaf."""
    flat = graph.call_method("narrow", (buffer, 0, where.start, len(where)))
    return graph.call_method("view", (flat, node.args[4])) if ops.is_call(node, ops.whole) else flat
