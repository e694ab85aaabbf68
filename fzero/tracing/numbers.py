"""Numbers: the nodes that a trace with open sizes has for its numbers."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from fzero.base.symbols import is_open
from fzero.program.operation import Node


def inline_numbers(graph: fx.Graph) -> fx.Graph:
    """A graph without the nodes of numbers: operands are the numbers. Nodes have the names that they have in
    the trace of given sizes, which has no such nodes."""
    inlined, values = fx.Graph(), dict[Node, Any]()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and (is_open(value) or isinstance(value, (int, float, bool))):
            values[node] = value
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        name = re.sub(r"_\d+$", "", node.name) if node.op == "call_function" else node.name
        copied = values[node] = inlined.create_node(node.op, node.target, args, kwargs, name, node.type)
        copied.meta = node.meta
    return inlined
