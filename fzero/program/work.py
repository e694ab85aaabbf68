"""Work: the flops of one node, and the bytes that it reads and writes, from its fake values."""

from __future__ import annotations

from torch import Tensor, fx

from fzero.program.operation import NO_WORK, Node, Work
from fzero.program.records import record

__all__ = ["Work", "find_device_type", "work"]


def work(node: Node) -> Work:
    """The work of a node besides communication, on the rank whose slices the graph shows."""
    return record(node).work(node) if node.op == "call_function" else NO_WORK


def find_device_type(graph: fx.Graph) -> str:
    """The type of device of a graph's first tensor, such as "cuda"; "cpu" where there is no tensor."""
    values = (node.meta.get("val") for node in graph.nodes)
    return next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")
