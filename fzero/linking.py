"""Linking: a program to the Python function that runs it on one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from fzero import ops
from fzero.ops import Node
from fzero.program import Program
from fzero.randomness import step_seed

Runner = Callable[[list[Tensor]], list[Tensor]]


def link(program: Program, runtime: Any) -> Runner:
    """A function of the program's arguments, on this rank, that returns its tensor results.

    Aten operations run as they are; each operation of `ops` is a call of the method of that name on `runtime`, a draw
    with the step's seed in front; `settle` of it comes before memory is overwritten, and last. The code is generated
    once, and lets go of every value at its last use. A program that draws advances torch's default CPU generator by one
    draw a call.
    """
    graph = fx.Graph()
    values: dict[Node, Node] = {}
    receiver, seed = graph.placeholder("runtime"), graph.placeholder("seed")
    for node in program.graph.nodes:
        if node.op == "output" or ops.overwritten(node):
            graph.call_method("settle", (receiver,))
        if node.op == "call_function" and node.target in ops.FAKES:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            given = (receiver, seed) if ops.is_call(node, ops.draw) else (receiver,)
            values[node] = graph.call_method(node.target.__name__.partition(".")[0], (*given, *args), kwargs)
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    forward = fx.GraphModule(program.constants, graph, class_name=program.name).forward
    draws = program.draws

    @torch.no_grad()
    def run(tensors: list[Tensor]) -> list[Tensor]:
        with step_seed() if draws else nullcontext() as seed:
            return forward(runtime, seed, *tensors)

    return run
