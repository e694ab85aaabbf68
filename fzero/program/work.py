"""Work: what an operation of a program computes and the memory that it touches, read off its fake values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fzero.program import ops
from fzero.program.costs import nbytes
from fzero.program.ops import Node, is_call, name_of, overwritten, shares_memory


class Work(NamedTuple):
    """Floating-point operations, of which a multiply-add is two, and bytes read and written."""

    flops: int
    nbytes: int


NONE = Work(0, 0)
_aten = torch.ops.aten
_FLOPS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    ),
}
"""Operation -> its flops, of its arguments: those that torch's table does not have."""
_OF_SOME_ROWS = frozenset({"embedding", "index", "index_select", "gather", "slice", "select"})
"""Operations that read of their first argument no more than they return."""
_NO_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})

_COMMUNICATES = (ops.gather, ops.scatter, ops.all_reduce, ops.all_reduce_list)


def work(node: Node) -> Work:
    """What the rank whose slices the graph shows does for a node besides communication. Views and waits are no work.

    Flops are those of `torch.utils.flop_counter`: matrix products, convolutions and attention, which it counts in full
    where it is causal. Every operation reads what it is given and writes what it returns, once.
    """
    if node.op != "call_function" or name_of(node) in _NO_KERNEL or is_call(node, *_COMMUNICATES):
        return NONE
    if is_call(node, ops.all_gather):
        return _cast(node)
    if is_call(node, ops.reduce_scatter):
        return _packed(node)
    written = overwritten(node)
    if shares_memory(node) and not written:
        return NONE
    return Work(_flops(node), _read(node) + nbytes(_values(written) if written else node.meta.get("val")))


def _cast(node: Node) -> Work:
    """Slices are cast to be sent. That others may have to be packed is left out: arguments lie as they are sent."""
    dtype, slices = ops.cast_of(node), _values(node.args[0])
    return NONE if dtype is None else Work(0, sum(nbytes(x) + x.numel() * dtype.itemsize for x in slices))


def _packed(node: Node) -> Work:
    """Several leaves are copied together to be scattered, but on CPU sent as they lie."""
    fulls = _values(node.args[0])
    return NONE if len(fulls) == 1 or fulls[0].device.type == "cpu" else Work(0, 2 * nbytes(fulls))


def _flops(node: Node) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    args, kwargs = _values((node.args, node.kwargs))
    if packet in _FLOPS:
        return _FLOPS[packet](*args, **kwargs)
    return flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]) if packet in flop_registry else 0


def _read(node: Node) -> int:
    given = [nbytes(_values(source)) for source in node.all_input_nodes]
    if name_of(node) in _OF_SOME_ROWS and given:
        given[0] = min(given[0], nbytes(node.meta["val"]))
    return sum(given)


def _values(given: Any) -> Any:
    """Arguments with the fake values of their nodes."""
    return fx.map_arg(given, lambda node: node.meta.get("val"))


def device_type(graph: fx.Graph) -> str:
    """The type of device that a graph's tensors are on: "cuda", "cpu" where there is none."""
    values = (node.meta.get("val") for node in graph.nodes)
    return next((value.device.type for value in values if isinstance(value, Tensor)), "cpu")
