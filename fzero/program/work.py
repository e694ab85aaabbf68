"""Work: the flops of one node, and the bytes that it reads and writes, from its fake values."""

from __future__ import annotations

from torch import Tensor, fx

from fzero.optim.list_ops import masked_fill_
from fzero.program.operation import NO_WORK, Node, Work
from fzero.program.records import is_call, record

__all__ = ["Work", "find_device_type", "work", "work_on_host"]

_FILLS = (masked_fill_.Scalar, masked_fill_.List)


def work(node: Node) -> Work:
    """The work of a node besides communication, on the rank whose slices the graph shows."""
    return record(node).work(node) if node.op == "call_function" else NO_WORK


def work_on_host(node: Node) -> Work:
    """`work` of a node that runs on the host, which reads the condition of a fill in place before it fills. The
    condition is that something went wrong, so the usual fill does nothing."""
    return NO_WORK if is_call(node, *_FILLS) else work(node)


def find_device_type(graph: fx.Graph) -> str:
    """The type of device of a graph's first tensor, such as "cuda"; "cpu" where there is no tensor."""
    values = (node.meta.get("val") for node in graph.nodes)
    return next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")
