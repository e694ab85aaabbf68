"""Numbers: the nodes that a trace with open sizes has for its numbers."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from fzero.base.symbols import is_open
from fzero.program.operation import Node


def inline_numbers(graph: fx.Graph) -> fx.Graph:
    """A graph without the nodes of numbers: operands are the numbers. Nodes have the names that they have in
    the trace of given sizes, which has no such nodes.

    torch 2.11 asks for the sizes of a tensor in a node of a list, and takes a tensor of torch.func for a constant."""
    inlined, values = fx.Graph(), dict[Node, Any]()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and _is_number(value):
            values[node] = value
            continue
        if node.op == "get_attr" and all(_is_number(user.meta.get("val")) for user in node.users):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        name = re.sub(r"_\d+$", "", node.name) if node.op == "call_function" else node.name
        copied = values[node] = inlined.create_node(node.op, node.target, args, kwargs, name, node.type)
        copied.meta = node.meta
    return inlined


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or a list of numbers."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_number, value))
    return is_open(value) or isinstance(value, (int, float, bool))
