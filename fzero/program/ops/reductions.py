"""Reductions over a mesh axis by name, and a rank's position along one.

all_reduce       any -> uniform   "sum", "avg", "max" or "min" over a mesh axis; `leaf` is the path of the leaf whose
                                  gradient a mean is of, if any
all_reduce_list  any -> uniform   the same for several values of one dtype, in one collective; `coalesce` emits it
axis_index       -> per-rank      this rank's position along a mesh axis, a 0-d int64
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.program.comm import Comm
from fzero.program.kinds import Kind, Slice
from fzero.program.linear import apply
from fzero.program.operation import NO_WORK, Node, Operation
from fzero.program.ops.buckets import check_dtypes, sum_dtype
from fzero.program.records import record, register, register_for_tracing
from fzero.program.refusals import refuse_node
from fzero.ranks.exchanges import AllReduce, Rank, Steps

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.memory import Allocator
    from fzero.program.program import Program

_REDUCTIONS = ("sum", "avg", "max", "min")


def all_reduce_list(values: Sequence[Tensor], op: str, axis: str) -> list[Tensor]:
    """`all_reduce` of each value."""
    return [torch.empty_like(value) for value in values]


def check_axis(program: Program, node: Node, axis: str) -> None:
    """Refuse an axis that the mesh does not have."""
    if not program.mesh.has(axis):
        raise refuse_node(program, node, f"names the axis {axis!r}", f"the mesh has {program.mesh.names}")


def _check_reduction(program: Program, node: Node) -> None:
    values, op, axis = node.args
    check_axis(program, node, axis)
    if op not in _REDUCTIONS:
        raise refuse_node(program, node, f"reduces by {op!r}", f"there are {_REDUCTIONS}")
    if isinstance(values, Sequence):
        check_dtypes(program, node, values)


def _all_reduce_kind(walk: Walk, node: Node) -> Kind:
    return _reduced_kind(walk, node, node.args[0])


def _all_reduce_list_kind(walk: Walk, node: Node) -> Kind:
    return [_reduced_kind(walk, node, value) for value in node.args[0]]


def _reduced_kind(walk: Walk, node: Node, value: Node) -> Kind:
    """The kind of a whole value, or of a slice that differs along the axis, once it is reduced."""
    kind, axes = walk.of(value), frozenset(walk.program.mesh.split(node.args[2]))
    if isinstance(kind, Slice) and axes & kind.over:
        return replace(kind, over=kind.over - axes)
    walk.expect_full(node, value)
    return kind - axes


def _list_reduction(program: Program, node: Node) -> Iterator[Comm]:
    value = node.meta["val"]
    values = value if isinstance(value, list) else [value]
    dtype = sum_dtype(values[0])
    yield Comm(AllReduce.name, node.args[2], None, dtype, sum(x.numel() for x in values) * dtype.itemsize)


def _all_reduce(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    op, axis = node.args[1:]

    def run(x: Tensor, *_: str, **__: str) -> Steps:
        return (yield AllReduce(f"{AllReduce.name} over {axis}", axis, x, op))

    return run


def _all_reduce_list(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    op, axis = node.args[1:]
    what = f"{AllReduce.name} over {axis}"

    def run(values: Sequence[Tensor], *_: str) -> Steps:
        if len(values) == 1:
            return [(yield AllReduce(what, axis, values[0], op))]
        packed = yield AllReduce(what, axis, torch.cat([value.reshape(-1) for value in values]), op)
        flats = packed.split([value.numel() for value in values])
        return [flat.view(value.shape) for flat, value in zip(flats, values)]

    return run


def _transpose(cotangent: Tensor, op: str, axis: str, *, leaf: str = "") -> Tensor:
    """A sum over ranks is its own transpose, and so is a mean."""
    return apply(record(all_reduce), cotangent, op, axis, leaf=leaf)


def _is_identity(program: Program, node: Node, kind: Kind) -> bool:
    """Whether the ranks hold the same of the value, and the reduction is no sum."""
    _, op, axis = node.args
    return op != "sum" and kind.isdisjoint(program.mesh.split(axis))


def mean_over(program: Program, value: Node, axes: Iterable[str], leaf: str = "") -> Node:
    """A new node: the mean of a value over the ranks along some axes, in one collective."""
    of_leaf = {"leaf": leaf} if leaf else {}
    return program.emit(all_reduce, value, "avg", program.mesh.join(axes), **of_leaf)


def _list_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """One buffer for all results, which are views of the reduced buffer: each result keeps all of it alive."""
    values, counts = node.meta["val"], [allocator.at(value).counts for value in node.args[0]]
    buffer = allocator.place(node, values[0], sum(counts))
    return ([buffer._replace(counts=count) for count in counts],)


def _label(program: Program, node: Node) -> str:
    return f"{AllReduce.name} {node.args[2]}"


def _axis_index(program: Program, node: Node, rank: Rank) -> Callable[..., Tensor]:
    position = rank.along(node.args[0])  # `full` fills on the device: a CUDA graph does not capture a copy from host
    return lambda axis, device: torch.full((), position, device=device)


_REDUCTION: dict[str, Any] = {
    "check": _check_reduction,
    "moves": _list_reduction,
    "work": lambda node: NO_WORK,
    "label": _label,
}
all_reduce = register_for_tracing(
    "all_reduce(Tensor x, str op, str axis, *, str leaf='') -> Tensor",
    lambda x, op, axis, leaf="": torch.empty_like(x),
    kind=_all_reduce_kind,
    perform=_all_reduce,
    of_all=lambda x, op, axis, leaf="": x,
    transpose=_transpose,
    together=all_reduce_list,
    mean_of=lambda program, node: node.kwargs.get("leaf") or None,
    is_identity=_is_identity,
    **_REDUCTION,
)
register(
    Operation(
        name="all_reduce_list",
        target=all_reduce_list,
        fake=all_reduce_list,
        kind=_all_reduce_list_kind,
        perform=_all_reduce_list,
        memory=_list_memory,
        **_REDUCTION,
    )
)
axis_index = register_for_tracing(
    "axis_index(str axis, Device device) -> Tensor",
    lambda axis, device: torch.empty((), dtype=torch.int64, device=device),
    kind=lambda walk, node: frozenset(walk.program.mesh.split(node.args[0])),
    check=lambda program, node: check_axis(program, node, node.args[0]),
    perform=_axis_index,
)
