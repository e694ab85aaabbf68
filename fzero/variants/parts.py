"""Parts of gathered buffers: what a rank keeps of a buffer, and the gather of these parts along one axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fzero import Program, ops
from fzero.variants.model_axes import find_split_axes, lies_along_all


def _perform_keep(program: Program, node: Any, rank: Any) -> Callable[..., Tensor]:
    position = rank.along(node.args[4])
    return lambda buffer, bucket, leaves, numel, axis: buffer.view(-1, numel)[position].clone()


keep_part = ops.define(
    "keep_part", names="leaves", takes_buffers=True, perform=_perform_keep,
    kind=lambda walk, node: walk.of(node.args[0]).over.union([node.args[4]], find_split_axes(walk, node.args[1])),
    fake=lambda buffer, bucket, leaves, numel, axis: buffer.new_empty(numel),
    work=lambda node: ops.Work(0, 2 * node.meta["val"].nbytes),
)  # fmt: skip
"""`(buffer, bucket, leaves, numel, axis)`: a part of `numel` elements of a gathered buffer, that of this rank along
`axis`."""


def _perform_gather(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
    what = f"all_gather of parts of {node.args[1]}"

    def run(part: Tensor, bucket: str, leaves: Any, numel: int, axis: str) -> Any:
        return (yield ops.AllGather(what, axis, part))

    return run


def _list_moves(program: Program, node: Any) -> Iterator[ops.Comm]:
    value = node.meta["val"]
    yield ops.Comm("all_gather", node.args[4], node.args[1], value.dtype, value.nbytes)


def _find_kind(walk: Any, node: Any) -> ops.Buffer:
    over = walk.of(node.args[0]) - {node.args[4], *find_split_axes(walk, node.args[1])}
    return ops.Buffer(True, node.args[1], tuple(node.args[2]), over=over)


gather_parts = ops.define(
    "gather_parts", like=ops.all_gather, perform=_perform_gather, moves=_list_moves, kind=_find_kind,
    fake=lambda part, bucket, leaves, numel, axis: part.new_empty(numel), check=lambda program, node: None,
    memory=lambda held, node: (held.new(node, node.meta["val"]), *held.keys_of(node.all_input_nodes)),
)  # fmt: skip
"""`(part, bucket, leaves, numel, axis)`: the inverse of `keep_part`, a gathered buffer of `numel` elements."""


def list_gathers(program: Program) -> list[Any]:
    """The nodes of a program that gather buckets from slices over all axes that state lies along, loops apart."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    gathers = [x for x in calls if ops.record(x).starts == "gathered" and not ops.is_call(x, gather_parts)]
    return [x for x in gathers if lies_along_all(program, x)]
