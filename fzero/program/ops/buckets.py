"""Operations on several leaves of a bucket at once. Passes emit them.

    all_gather, wait, whole      slices of leaves -> buffer of the leaves -> one leaf, a view of the buffer
    reduce_scatter, wait, part   full leaves -> this rank's block of their mean -> one leaf's slice, a view of the block

`all_gather` and `reduce_scatter` start a collective; `wait` returns its buffer, and may cast it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.base.dtypes import accumulator, name_dtype
from fzero.layout import buffers
from fzero.layout.wires import Wire
from fzero.program.arguments import start_of
from fzero.program.comm import Comm
from fzero.program.fakes import view_first
from fzero.program.kinds import Buffer, Kind, Slice
from fzero.program.operation import NO_WORK, Node, Operation, Work, nbytes, values_of
from fzero.program.records import averages_alone, leaves_of, record, register
from fzero.program.refusals import refuse_node
from fzero.ranks.exchanges import AllGather, AllReduce, Rank, ReduceScatter, Steps, average_leaves, gather_leaves

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.memory import Allocator
    from fzero.program.program import Program


# targets: plain functions that give the name of the operation and the result for fake tensors


def all_gather(
    slices: Sequence[Tensor], bucket: str, leaves: Sequence[int], numel: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Start gathering these leaves of a bucket, cast to `dtype` where it is given. The wait returns a buffer of `numel`
    elements, padding included."""
    return slices[0].new_empty(numel, dtype=dtype)


def reduce_scatter(
    fulls: Sequence[Tensor],
    bucket: str,
    leaves: Sequence[int],
    numel: int,
    *,
    replicas: bool = True,
    divided: bool = False,
) -> Tensor:
    """Start scattering the mean of these leaves over all ranks, or without `replicas` over the shard axis alone. The
    wait returns this rank's block of `numel` elements. Split leaves count by 1 / their parts, unless they are `divided`
    by that already."""
    return fulls[0].new_empty(numel)


def wait(pending: Any, *, dtype: torch.dtype | None = None) -> Any:
    """The buffer of a started collective, cast to `dtype` where it is given. Where a rank averages alone the block of a
    reduce-scatter is the list of its slices."""
    if dtype is None:
        return pending
    return [x.to(dtype) for x in pending] if isinstance(pending, list) else pending.to(dtype)


def whole(buffer: Tensor, bucket: str, leaves: Sequence[int], position: int, shape: Sequence[int]) -> Tensor:
    """The leaf at `position` among `leaves`, in its shape: a view of a gathered buffer."""
    return view_first(buffer, shape)


def part(block: Tensor, bucket: str, leaves: Sequence[int], position: int, numel: int) -> Tensor:
    """This rank's slice of the leaf at `position` among `leaves`: a view of a scattered block."""
    return view_first(block, [numel])


# checks


def check_leaves(program: Program, node: Node, leaves: Sequence[int]) -> None:
    """Refuse a bucket that the program does not have, and leaves that the bucket does not have or not in order."""
    layout = program.layouts.get(node.args[1])
    if layout is None:
        known = sorted(map(str, program.layouts))
        raise refuse_node(program, node, f"names the bucket {node.args[1]!r}", f"there are {known}")
    if sorted(set(leaves)) != list(leaves) or not set(leaves) <= set(range(len(layout.leaves))):
        problem = f"names leaves {leaves} of {len(layout.leaves)} in {layout.bucket!r}"
        raise refuse_node(program, node, problem, "see its layout")


def check_dtypes(program: Program, node: Node, values: Sequence[Node]) -> None:
    """Refuse values of several dtypes: the values of a buffer have one."""
    dtypes = sorted({name_dtype(value.meta["val"].dtype) for value in values})
    if len(dtypes) > 1:
        problem = f"moves {' and '.join(dtypes)} in one buffer"
        raise refuse_node(program, node, problem, "move each dtype on its own")


def _check_start(program: Program, node: Node) -> None:
    """Refuse leaves, dtypes and sizes that differ from the bucket's layout."""
    values, bucket, leaves, numel = node.args
    check_leaves(program, node, leaves)
    if len(values) != len(leaves):
        problem = f"moves {len(values)} values as {len(leaves)} leaves of {bucket!r}"
        raise refuse_node(program, node, problem, "match them")
    if not node.kwargs.get("dtype"):
        check_dtypes(program, node, values)
    along = program.wire_of(node)
    expected = along.numel if record(node).starts == "gathered" else along.stride
    if numel != expected:
        problem = f"of {bucket!r} has {numel} elements, its layout {expected}"
        raise refuse_node(program, node, problem, "take fzero.layout's")


# kinds


def _all_gather_kind(walk: Walk, node: Node) -> Kind:
    slices, bucket, leaves, _ = node.args
    over = [walk.expect_slice(node, given, bucket, leaf) for given, leaf in zip(slices, leaves, strict=True)]
    return Buffer(True, bucket, tuple(leaves), over=frozenset().union(*over))


def _reduce_scatter_kind(walk: Walk, node: Node) -> Kind:
    fulls, bucket, leaves, _ = node.args
    for full, leaf in zip(fulls, leaves, strict=True):
        walk.expect_leaf(node, full, bucket, leaf)
    return Buffer(False, bucket, tuple(leaves), over=find_replica_axes(walk.program, node))


def find_replica_axes(program: Program, node: Node) -> frozenset[str]:
    """The axes along which the result of a scatter still differs: without `replicas` those along which ranks hold the
    same of the leaves."""
    return frozenset() if node.kwargs.get("replicas", True) else frozenset(program.layout_of(node).replica_axes)


def _wait_kind(walk: Walk, node: Node) -> Kind:
    kind = walk.of(node.args[0])
    if not isinstance(kind, Buffer) or kind.done:
        raise walk.refuse(node, "waits for something that was not started", "wait once, for a collective")
    return replace(kind, done=True)


def _whole_kind(walk: Walk, node: Node) -> Kind:
    walk.expect_shape(node, node.args[4], node.args[1], _expect_buffer(walk, node, gathered=True))
    return walk.of(node.args[0]).over.union(walk.program.layouts[node.args[1]].split_axes)


def _part_kind(walk: Walk, node: Node) -> Kind:
    leaf, kind = _expect_buffer(walk, node, gathered=False), walk.of(node.args[0])
    return Slice(node.args[1], leaf, kind.over if isinstance(kind, Buffer) else frozenset())


def _expect_buffer(walk: Walk, node: Node, *, gathered: bool) -> int:
    """The leaf that a node takes from its buffer. Refuses a buffer of other leaves than the node names."""
    buffer, bucket, leaves, position, _ = node.args
    kind = walk.of(buffer)
    over = kind.over if isinstance(kind, Buffer) else frozenset()
    walk.expect(node, buffer, Buffer(gathered, bucket, tuple(leaves), done=True, over=over))
    if not 0 <= position < len(leaves):
        raise walk.refuse(node, f"takes leaf {position} of {len(leaves)} in a buffer")
    return leaves[position]


# communication


def sum_dtype(value: Tensor) -> torch.dtype:
    """The dtype in which a value is sent to be added up over ranks. CPU ranks add up what arrives. NCCL adds up on the
    way, so float16 and bfloat16 travel as float32 (see `Native`)."""
    return value.dtype if value.device.type == "cpu" else accumulator(value.dtype)


def list_gather(program: Program, node: Node) -> Iterator[Comm]:
    """The collective of a gather: one all-gather of the leaves that a node names."""
    value = node.meta["val"]
    size = program.wire_of(node).numel * value.element_size()
    yield Comm(AllGather.name, program.layout_of(node).shard_axis, node.args[1], value.dtype, size)


def list_scatter(program: Program, node: Node) -> Iterator[Comm]:
    """The collectives of a scatter: one reduce-scatter of the leaves that a node names, then, unless `replicas` is
    false, one all-reduce of the block over the axes along which ranks hold the same."""
    along, mesh, dtype = program.wire_of(node), program.mesh, sum_dtype(node.meta["val"])
    yield Comm(ReduceScatter.name, along.layout.shard_axis, node.args[1], dtype, along.sent * dtype.itemsize)
    if along.layout.replica_axes and node.kwargs.get("replicas", True):
        over = mesh.join(along.layout.replica_axes)
        yield Comm(AllReduce.name, over, node.args[1], dtype, along.stride * dtype.itemsize)


def _all_gather(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    along, dtype, axis = program.wire_of(node), node.kwargs.get("dtype"), program.layout_of(node).shard_axis
    return lambda slices, *_, **__: gather_leaves(slices, along, along.layout.rank_of(rank), axis, dtype)


def _reduce_scatter(program: Program, node: Node, rank: Rank) -> Callable[..., Steps]:
    along, kwargs = program.wire_of(node), node.kwargs
    return lambda fulls, *_, **__: average_leaves(fulls, along, **kwargs)


def _wait(program: Program, node: Node, rank: Rank) -> Callable[..., Tensor]:
    if node.kwargs:
        return lambda pending, dtype: wait(pending.wait(), dtype=dtype)
    return lambda pending: pending.wait()


def _whole(program: Program, node: Node, rank: Rank) -> Callable[..., Tensor]:
    along, position, shape = program.wire_of(node), node.args[3], list(node.args[4])
    return lambda buffer, *_: buffers.join_leaf(buffer, along, position, shape)


def _whole_span(program: Program, node: Node, rank: Rank) -> range | None:
    pieces = program.wire_of(node).pieces(node.args[3])
    return pieces[0] if len(pieces) == 1 else None


def _part(program: Program, node: Node, rank: Rank) -> Callable[..., Tensor]:
    along, position = program.wire_of(node), node.args[3]
    return lambda block, *_: buffers.slice_of(block, along, along.layout.rank_of(rank), position)


def _part_span(program: Program, node: Node, rank: Rank) -> range | None:
    is_list = averages_alone(program, start_of(node.args[0]))
    return None if is_list else program.wire_of(node).block(program.layout_of(node).rank_of(rank))[node.args[3]]


# memory and work


def _all_gather_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    along = allocator.program.wire_of(node)
    views = [] if node.kwargs.get("dtype") else allocator.find_views_sent(node, along)
    alone = along.layout.world == 1 and views  # one rank receives the memory that it sends
    return (views[0],) if alone else (allocator.new(node, node.meta["val"]), *(at.key for at in views))


def _reduce_scatter_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    value, along = node.meta["val"], allocator.program.wire_of(node)
    sent = _place_sent_leaves(allocator, node, along)
    if averages_alone(allocator.program, node):
        if along.layout.splits == 1 or node.kwargs.get("divided"):
            return (sent,)  # the rank keeps the leaves
        divided = [allocator.new((node, "divided", i), full) for i, full in enumerate(values_of(node.args[0]))]
        return (divided, *(at.key for at in sent))
    # The block of the first other rank becomes the result; the blocks of the N - 2 others need memory of their own.
    received = allocator.keep((node, "received"), max(along.layout.world - 2, 0) * nbytes(value))
    return allocator.new(node, value), received, *(at.key for at in sent)


def _place_sent_leaves(allocator: Allocator, node: Node, along: Wire) -> list[Any]:
    """The locations of the tensors that a reduce-scatter sends.

    CPU ranks, and a rank that averages alone, send leaves from where they lie, and copies of those that do not adjoin.
    NCCL sends a packed copy of all, or the one leaf that fills the buffer; float16 and bfloat16 as float32.
    """
    given = [x.meta["val"] for x in node.args[0]]
    if given[0].device.type == "cpu" or averages_alone(allocator.program, node):
        return [
            allocator.at(x) if full.is_contiguous() else allocator.new((node, i), full)
            for i, (x, full) in enumerate(zip(node.args[0], given))
        ]
    fills = len(given) == 1 == len(along.layout.leaves) and given[0].numel() == along.numel
    packed = given[0].to(sum_dtype(given[0]))
    if fills and given[0].is_contiguous() and packed.dtype == given[0].dtype:
        return [allocator.at(node.args[0][0])]
    return [allocator.new((node, "packed"), packed, along.numel)]


def _wait_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """A cast has memory of its own. It casts each slice of a list."""
    block, value = allocator.at(node.args[0]), node.meta["val"]
    if not node.kwargs:
        return (block,)
    if isinstance(block, list):
        return ([allocator.place((node, i), value, at.counts) for i, at in enumerate(block)],)
    return (allocator.new(node, value),)


def _whole_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    if allocator.program.wire_of(node).is_joined(node.args[3]):
        return (allocator.at(node.args[0]),)
    return (allocator.new(node, value, value.numel()),)  # the leaf lies in pieces, which are copied together


def _part_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    block = allocator.at(node.args[0])
    if isinstance(block, list):
        return (block[node.args[3]],)
    (leaf,) = leaves_of(node)
    return (allocator.view(node)._replace(counts=allocator.count(allocator.program.layout_of(node), leaf)),)


def _all_gather_work(node: Node) -> Work:
    """The work of casting slices. Packing slices is left out: arguments usually lie as they are sent."""
    dtype, slices = node.kwargs.get("dtype"), values_of(node.args[0])
    return NO_WORK if dtype is None else Work(0, sum(nbytes(x) + x.numel() * dtype.itemsize for x in slices))


def _reduce_scatter_work(node: Node) -> Work:
    """The work of packing leaves: none for a single leaf, on CPU, or where all of the leaves are the rank's own."""
    fulls = values_of(node.args[0])
    is_own = node.meta["val"].numel() >= sum(full.numel() for full in fulls)
    return NO_WORK if len(fulls) == 1 or is_own or fulls[0].device.type == "cpu" else Work(0, 2 * nbytes(fulls))


def _wait_work(node: Node) -> Work:
    """The work of a cast."""
    return Work(0, nbytes(node.args[0].meta["val"]) + nbytes(node.meta["val"])) if node.kwargs else NO_WORK


def _label(program: Program, node: Node) -> str:
    return f"{node.target.__name__} {node.args[1]}"


register(
    Operation(
        name="all_gather",
        target=all_gather,
        fake=all_gather,
        names="leaves",
        starts="gathered",
        kind=_all_gather_kind,
        check=_check_start,
        moves=list_gather,
        memory=_all_gather_memory,
        work=_all_gather_work,
        perform=_all_gather,
        taken=whole,
        alias_at=lambda node, position: None if node.kwargs.get("dtype") else node.args[0][position],
        label=_label,
    )
)
register(
    Operation(
        name="reduce_scatter",
        target=reduce_scatter,
        fake=reduce_scatter,
        names="leaves",
        starts="scattered",
        kind=_reduce_scatter_kind,
        check=_check_start,
        moves=list_scatter,
        memory=_reduce_scatter_memory,
        work=_reduce_scatter_work,
        perform=_reduce_scatter,
        taken=part,
        alias_at=lambda node, position: node.args[0][position],
        label=_label,
    )
)
_VIEW: dict[str, Any] = {
    "shares": lambda node: True,
    "work": lambda node: NO_WORK,
    "is_quiet": True,
    "is_derived": True,
}
register(
    Operation(
        name="wait",
        target=wait,
        fake=wait,
        waits=True,
        kind=_wait_kind,
        memory=_wait_memory,
        perform=_wait,
        **{**_VIEW, "shares": lambda node: not node.kwargs, "work": _wait_work},
    )
)
register(
    Operation(
        name="whole",
        target=whole,
        fake=whole,
        names="position",
        takes_buffers=True,
        kind=_whole_kind,
        memory=_whole_memory,
        perform=_whole,
        span=_whole_span,
        **_VIEW,
    )
)
register(
    Operation(
        name="part",
        target=part,
        fake=part,
        names="position",
        takes_buffers=True,
        kind=_part_kind,
        memory=_part_memory,
        perform=_part,
        span=_part_span,
        **_VIEW,
    )
)
