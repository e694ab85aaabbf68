"""The mean of slices of a bucket over an axis, which goes on while a step computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fzero import Program, ops


def _perform(program: Program, node: Any, rank: Any) -> Callable[..., Any]:
    along, what = program.wire_of(node), f"start_mean of {node.args[1]}"

    def run(slices: Sequence[Tensor], bucket: str, leaves: Sequence[int], numel: int, axis: str) -> Any:
        return (yield ops.AllReduce(what, axis, ops.pack_slices(slices, along, along.layout.rank_of(rank)), "avg"))

    return run


def _list_moves(program: Program, node: Any) -> Iterator[ops.Comm]:
    value = node.meta["val"]
    yield ops.Comm("all_reduce", node.args[4], node.args[1], value.dtype, value.nbytes)


def _find_kind(walk: Any, node: Any) -> ops.Buffer:
    slices, bucket, leaves, _, axis = node.args
    return ops.Buffer(False, bucket, tuple(leaves), over=frozenset().union(*(walk.of(x).over for x in slices)) - {axis})


start_mean = ops.define(
    "start_mean", like=ops.reduce_scatter, perform=_perform, moves=_list_moves, kind=_find_kind,
    fake=lambda slices, bucket, leaves, numel, axis: slices[0].new_empty(numel), check=lambda program, node: None,
)  # fmt: skip
"""`(slices, bucket, leaves, numel, axis)`: start the mean of this rank's slices of leaves over an axis. A wait gives a
block of `numel` elements."""
