"""Linking: a program to the Python function that runs it on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fzero import ops
from fzero.ops import Node
from fzero.program import Program

Runner = Callable[[list[Tensor]], list[Tensor]]


def link(program: Program, runtime: Any) -> Runner:
    """A function of the program's arguments, on this rank, that returns its tensor results.

    Aten operations run as they are; each operation of `ops` is a call of the method of that name on `runtime`. The code
    is generated once, and lets go of every value at its last use.
    """
    graph = fx.Graph()
    values: dict[Node, Node] = {}
    receiver = graph.placeholder("runtime")
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in ops.FAKES:
            args = fx.map_arg(node.args, values.__getitem__)
            values[node] = graph.call_method(ops.name_of(node), (receiver, *args), node.kwargs)
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    forward = fx.GraphModule(program.constants, graph, class_name=program.name).forward

    @torch.no_grad()
    def run(tensors: list[Tensor]) -> list[Tensor]:
        return forward(runtime, *tensors)

    return run
