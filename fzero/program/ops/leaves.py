"""Operations on one leaf. Tracing a step emits them.

    gather   sharded -> uniform   the full leaf
    scatter  any -> sharded       this rank's slice of the mean over ranks; with `replicas=False` over the shard axis
    take     uniform -> sharded   this rank's slice, a view: no communication
    beside   uniform -> uniform   the identity, a mark on a 0-d value that a pointwise operation combines with a slice
    spread   uniform -> sharded   a 0-d value, repeated over a slice

`bucket` is a key of the program's `layouts`, `leaf` an index into the layout's leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.layout import buffers
from fzero.layout.layout import Layout
from fzero.program.kinds import Kind, Slice
from fzero.program.linear import apply
from fzero.program.operation import NO_WORK, Node
from fzero.program.ops.buckets import (
    all_gather,
    check_leaves,
    find_replica_axes,
    list_gather,
    list_scatter,
    reduce_scatter,
)
from fzero.program.records import record, register_for_tracing
from fzero.ranks.exchanges import Rank, Steps, average_leaves, gather_leaves
from fzero.ranks.performer import MovePerformer

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.memory import Allocator
    from fzero.program.program import Program


def check_leaf(program: Program, node: Node) -> None:
    """Refuse a bucket or leaf that the program does not have, where a node names one leaf."""
    check_leaves(program, node, [node.args[2]])


def _label(program: Program, node: Node) -> str:
    return f"{node.target.__name__.partition('.')[0]} {node.args[1]}"


def gather_leaf(x: Tensor, layout: Layout, leaf: int, *_: Any, on: MovePerformer | None = None) -> Tensor:
    """`gather` of this rank's slice of a leaf, differentiable: the transpose of `scatter`."""
    return apply(record(gather), x, layout, leaf, list(layout.leaves[leaf].shape), on=on)


def gather_cotangent(x: Tensor, layout: Layout, leaf: int, *_: Any, on: MovePerformer | None = None) -> Tensor:
    """The transpose of `take`, differentiable: the full cotangent of a slice's cotangent.

    A slice's cotangent is that of the mean over all ranks, of which n have parts of a split leaf. A full value's is
    that of what its rank returns, n times as large. `scatter` divides by n.
    """
    full = gather_leaf(x, layout, leaf, on=on)
    return full if layout.splits == 1 else full * layout.splits


def scatter_leaf(x: Tensor, layout: Layout, leaf: int, *_: Any, on: MovePerformer | None = None) -> Tensor:
    """`scatter` of a full leaf, differentiable: the transpose of `gather`."""
    return apply(record(scatter), x, layout, leaf, len(layout.part(leaf, 0)), on=on)


def take_leaf(x: Tensor, layout: Layout, leaf: int, on: MovePerformer | None = None) -> Tensor:
    """`take` of a full leaf, differentiable."""
    return apply(record(take), x, layout, leaf, len(layout.part(leaf, 0)), on=on)


# gather


def _gather_kind(walk: Walk, node: Node) -> Kind:
    source, bucket, leaf, shape = node.args
    over = walk.expect_slice(node, source, bucket, leaf)
    walk.expect_shape(node, shape, bucket, leaf)
    return over.union(walk.program.layouts[bucket].split_axes)


def _gather_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    return (allocator.new(node, node.meta["val"], allocator.program.wire_of(node).numel),)


def _gather(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    along, axis = program.wire_of(node), program.layout_of(node).shard_axis

    def run(x: Tensor, bucket: str, leaf: int, shape: list[int]) -> Steps:
        buffer = yield from gather_leaves([x], along, along.layout.rank_of(rank), axis)
        return buffers.join_leaf(buffer, along, 0, shape)

    return run


gather = register_for_tracing(
    "gather(Tensor x, str bucket, int leaf, int[] shape) -> Tensor",
    lambda x, bucket, leaf, shape: x.new_empty(shape),
    names="leaf",
    kind=_gather_kind,
    check=check_leaf,
    moves=list_gather,
    memory=_gather_memory,
    work=lambda node: NO_WORK,
    perform=_gather,
    of_all=lambda x, layout, leaf, shape: x.view(shape),
    transpose=scatter_leaf,
    together=all_gather,
    label=_label,
)

# scatter


def _scatter_kind(walk: Walk, node: Node) -> Kind:
    walk.expect_leaf(node, *node.args[:3])
    return Slice(node.args[1], node.args[2], find_replica_axes(walk.program, node))


def _scatter_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    counts = allocator.count(allocator.program.layout_of(node), node.args[2])
    return (allocator.new(node, node.meta["val"], allocator.program.wire_of(node).stride)._replace(counts=counts),)


def _scatter(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    along, replicas = program.wire_of(node), node.kwargs.get("replicas", True)

    def run(x: Tensor, bucket: str, leaf: int, numel: int, **_: bool) -> Steps:
        block = yield from average_leaves([x], along, replicas)
        return buffers.slice_of(block, along, along.layout.rank_of(rank), 0)

    return run


scatter = register_for_tracing(
    "scatter(Tensor x, str bucket, int leaf, int numel, *, bool replicas=True) -> Tensor",
    lambda x, bucket, leaf, numel, replicas=True: x.new_empty(numel),
    names="leaf",
    kind=_scatter_kind,
    check=check_leaf,
    moves=list_scatter,
    memory=_scatter_memory,
    work=lambda node: NO_WORK,
    perform=_scatter,
    of_all=lambda x, layout, leaf, numel: x.reshape(-1),
    transpose=gather_leaf,
    together=reduce_scatter,
    mean_of=lambda program, node: program.layout_of(node).leaves[node.args[2]].path,
    label=_label,
)

# take


def _take_kind(walk: Walk, node: Node) -> Kind:
    layout = walk.program.layouts[node.args[1]]
    walk.expect_uniform(node, use=next(iter(node.users), node), but=layout.split_axes)
    walk.expect_leaf(node, *node.args[:3])
    return Slice(node.args[1], node.args[2], walk.own.intersection(walk.of(node.args[0])))


def place_slice(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """The memory of this rank's slice of the leaf that a node names, a view of the operand."""
    return (allocator.view(node)._replace(counts=allocator.count(allocator.program.layout_of(node), node.args[2])),)


def _take(program: Program, node: Node, rank: Rank) -> Callable[..., Tensor]:
    layout = program.layout_of(node)
    part = layout.part(node.args[2], layout.rank_of(rank))
    return lambda x, *_: x.reshape(-1)[part.start : part.stop]


take = register_for_tracing(
    "take(Tensor x, str bucket, int leaf, int numel) -> Tensor",
    lambda x, bucket, leaf, numel: x.reshape(-1)[:numel],
    names="leaf",
    kind=_take_kind,
    check=check_leaf,
    shares=lambda node: True,
    memory=place_slice,
    work=lambda node: NO_WORK,
    perform=_take,
    transpose=gather_cotangent,
)

# beside and spread


def _beside_kind(walk: Walk, node: Node) -> Kind:
    walk.expect_uniform(node, use=next(iter(node.users), node))
    return walk.of(node.args[0])


def _spread_kind(walk: Walk, node: Node) -> Kind:
    walk.expect_uniform(node)
    return walk.join(node, node.all_input_nodes, pointwise=True)


beside = register_for_tracing(
    "beside(Tensor x) -> Tensor",
    lambda x: torch.empty_like(x),
    kind=_beside_kind,
    perform=lambda program, node, rank: torch.clone,
    is_identity=lambda program, node, kind: True,
    is_quiet=True,
)
spread = register_for_tracing(
    "spread(Tensor x, Tensor like) -> Tensor",
    lambda x, like: torch.empty_like(like, dtype=x.dtype),
    kind=_spread_kind,
    perform=lambda program, node, rank: lambda x, like: like.new_empty(like.shape, dtype=x.dtype).copy_(x),
)
