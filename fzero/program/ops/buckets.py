"""Operations on some leaves of a bucket at once, which passes make.

    all_gather, wait, whole      slices of leaves -> their buffer -> one leaf, a view of the buffer
    reduce_scatter, wait, part   leaves in full -> this rank's block of their mean -> one leaf's slice, a view

An operation that starts returns something to wait for; `wait` gives the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.layout import buffers
from fzero.layout.layout import Wire
from fzero.program.comm import Comm
from fzero.program.kinds import UNIFORM, Buffer, Kind, Slice
from fzero.program.operation import NO_WORK, Node, Operation, Work, nbytes, values_of
from fzero.program.records import leaves_of, record, register
from fzero.program.refusals import refuse_node
from fzero.ranks.exchanges import Steps, average_leaves, gather_leaves

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.memory import Held
    from fzero.program.program import Program


# what nodes call: plain functions, of which the name and the result for fake tensors matter


def all_gather(
    slices: Sequence[Tensor], bucket: str, leaves: Sequence[int], numel: int, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Start gathering these leaves of a bucket, cast to `dtype` where one is given. Wait for a buffer of `numel`
    elements."""
    return slices[0].new_empty(numel, dtype=dtype)


def reduce_scatter(fulls: Sequence[Tensor], bucket: str, leaves: Sequence[int], numel: int) -> Tensor:
    """Start scattering the mean of these leaves. Wait for this rank's block of `numel` elements."""
    return fulls[0].new_empty(numel)


def wait(pending: Tensor) -> Tensor:
    """The buffer of what was started."""
    return pending


def whole(buffer: Tensor, bucket: str, leaves: Sequence[int], position: int, shape: Sequence[int]) -> Tensor:
    """The leaf at `position` of `leaves`, in its shape."""
    return buffer[: torch.Size(shape).numel()].view(shape)


def part(block: Tensor, bucket: str, leaves: Sequence[int], position: int, numel: int) -> Tensor:
    """This rank's slice of the leaf at `position` of `leaves`."""
    return block[:numel]


# checks


def check_leaves(program: Program, node: Node, leaves: Sequence[int]) -> None:
    """Refuse a bucket that the program does not have, and leaves that the bucket does not have in this order."""
    layout = program.layouts.get(node.args[1])
    if layout is None:
        known = sorted(map(str, program.layouts))
        raise refuse_node(program, node, f"names the bucket {node.args[1]!r}", f"there are {known}")
    if sorted(set(leaves)) != list(leaves) or not set(leaves) <= set(range(len(layout.leaves))):
        problem = f"names leaves {leaves} of {len(layout.leaves)} in {layout.bucket!r}"
        raise refuse_node(program, node, problem, "see its layout")


def check_dtypes(program: Program, node: Node, values: Sequence[Node]) -> None:
    """Refuse values of several dtypes: one buffer holds values of one."""
    dtypes = sorted({str(value.meta["val"].dtype).removeprefix("torch.") for value in values})
    if len(dtypes) > 1:
        problem = f"moves {' and '.join(dtypes)} in one buffer"
        raise refuse_node(program, node, problem, "move each dtype on its own")


def _check_start(program: Program, node: Node) -> None:
    """Refuse leaves, dtypes and sizes that are not those of the bucket's layout."""
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
    for given, leaf in zip(slices, leaves, strict=True):
        walk.expect(node, given, Slice(bucket, leaf))
    return Buffer(True, bucket, tuple(leaves))


def _reduce_scatter_kind(walk: Walk, node: Node) -> Kind:
    fulls, bucket, leaves, _ = node.args
    for full, leaf in zip(fulls, leaves, strict=True):
        walk.expect_leaf(node, full, bucket, leaf)
    return Buffer(False, bucket, tuple(leaves))


def _wait_kind(walk: Walk, node: Node) -> Kind:
    kind = walk.of(node.args[0])
    if not isinstance(kind, Buffer) or kind.done:
        raise walk.refuse(node, "waits for something that was not started", "wait once, for a collective")
    return replace(kind, done=True)


def _whole_kind(walk: Walk, node: Node) -> Kind:
    walk.expect_shape(node, node.args[4], node.args[1], _expect_buffer(walk, node, gathered=True))
    return UNIFORM


def _part_kind(walk: Walk, node: Node) -> Kind:
    return Slice(node.args[1], _expect_buffer(walk, node, gathered=False))


def _expect_buffer(walk: Walk, node: Node, *, gathered: bool) -> int:
    """The leaf that a node takes out of a buffer. Refuses another buffer than the node names."""
    buffer, bucket, leaves, position, _ = node.args
    walk.expect(node, buffer, Buffer(gathered, bucket, tuple(leaves), done=True))
    if not 0 <= position < len(leaves):
        raise walk.refuse(node, f"takes leaf {position} of {len(leaves)} in a buffer")
    return leaves[position]


# communication


def list_gather(program: Program, node: Node) -> Iterator[Comm]:
    """One all-gather of the leaves that a node names."""
    value = node.meta["val"]
    size = program.wire_of(node).numel * value.element_size()
    yield Comm("all_gather", program.mesh.shard_axis, node.args[1], value.dtype, size)


def list_scatter(program: Program, node: Node) -> Iterator[Comm]:
    """One reduce-scatter of the leaves that a node names, and an all-reduce of the block over each other axis."""
    value, along, mesh = node.meta["val"], program.wire_of(node), program.mesh
    size = along.sent * value.element_size()
    yield Comm("reduce_scatter", mesh.shard_axis, node.args[1], value.dtype, size)
    for axis in mesh.names:
        if axis != mesh.shard_axis:
            nbytes_of_block = along.stride * value.element_size()
            yield Comm("all_reduce", axis, node.args[1], value.dtype, nbytes_of_block)


def _all_gather(program: Program, node: Node, rank: Any) -> Callable[..., Steps]:
    along, dtype, axis = program.wire_of(node), node.kwargs.get("dtype"), program.mesh.shard_axis
    return lambda slices, *_, **__: gather_leaves(slices, along, rank.rank, axis, dtype)


def _reduce_scatter(program: Program, node: Node, rank: Any) -> Callable[..., Steps]:
    along = program.wire_of(node)
    return lambda fulls, *_: average_leaves(fulls, along)


def _wait(program: Program, node: Node, rank: Any) -> Callable[..., Tensor]:
    return lambda pending: pending.wait()


def _whole(program: Program, node: Node, rank: Any) -> Callable[..., Tensor]:
    along, position, shape = program.wire_of(node), node.args[3], list(node.args[4])
    pieces = along.pieces(position)
    if len(pieces) != 1:
        return lambda buffer, *_: buffers.join_leaf(buffer, along, position, shape)
    start, size = pieces[0].start, len(pieces[0])
    return lambda buffer, *_: buffer.narrow(0, start, size).view(shape)


def _part(program: Program, node: Node, rank: Any) -> Callable[..., Tensor]:
    where = program.wire_of(node).block(rank.rank)[node.args[3]]
    start, size = where.start, len(where)
    return lambda block, *_: block.narrow(0, start, size)


# memory and work


def _all_gather_memory(held: Held, node: Node) -> tuple[Any, ...]:
    along = held.program.wire_of(node)
    views = [] if node.kwargs.get("dtype") else held.find_views_sent(node, along)
    alone = along.layout.world == 1 and views  # one rank: what it gets is what it sends
    return (views[0],) if alone else (held.new(node, node.meta["val"]), *(at.key for at in views))


def _reduce_scatter_memory(held: Held, node: Node) -> tuple[Any, ...]:
    value, along = node.meta["val"], held.program.wire_of(node)
    sent = _find_sent(held, node, along)
    if along.layout.mesh.size() == 1:
        return (sent[0],)
    received = held.keep((node, "received"), max(along.layout.world - 2, 0) * nbytes(value))  # from ranks beyond one
    return held.new(node, value), received, *(at.key for at in sent)


def _find_sent(held: Held, node: Node, along: Wire) -> list[Any]:
    """What a reduce-scatter sends: on CPU the leaves as they lie, if that is in order; else a packed copy, unless it is
    one leaf that fills the buffer."""
    given = [x.meta["val"] for x in node.args[0]]
    if given[0].device.type == "cpu" and along.layout.mesh.size() > 1:
        return [
            held.at(x) if full.is_contiguous() else held.new((node, i), full)
            for i, (x, full) in enumerate(zip(node.args[0], given))
        ]
    alone = len(given) == 1 == len(along.layout.leaves) and given[0].numel() == along.numel
    if alone and given[0].is_contiguous():
        return [held.at(node.args[0][0])]
    return [held.new((node, "packed"), given[0], along.numel)]


def _whole_memory(held: Held, node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    if held.program.wire_of(node).is_joined(node.args[3]):
        return (held.at(node.args[0]),)
    return (held.new(node, value, value.numel()),)  # in pieces, which are copied together


def _part_memory(held: Held, node: Node) -> tuple[Any, ...]:
    (leaf,) = leaves_of(node)
    return (held.view(node)._replace(counts=held.count(held.program.layout_of(node), leaf)),)


def _all_gather_work(node: Node) -> Work:
    """Slices are cast to be sent. That others may have to be packed is left out: arguments lie as they are sent."""
    dtype, slices = node.kwargs.get("dtype"), values_of(node.args[0])
    return NO_WORK if dtype is None else Work(0, sum(nbytes(x) + x.numel() * dtype.itemsize for x in slices))


def _reduce_scatter_work(node: Node) -> Work:
    """Several leaves are copied together to be scattered, but on CPU sent as they lie."""
    fulls = values_of(node.args[0])
    return NO_WORK if len(fulls) == 1 or fulls[0].device.type == "cpu" else Work(0, 2 * nbytes(fulls))


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
register(Operation(name="wait", target=wait, fake=wait, waits=True, kind=_wait_kind, perform=_wait, **_VIEW))
register(
    Operation(
        name="whole",
        target=whole,
        fake=whole,
        names="position",
        kind=_whole_kind,
        memory=_whole_memory,
        perform=_whole,
        **_VIEW,
    )
)
register(
    Operation(
        name="part",
        target=part,
        fake=part,
        names="position",
        kind=_part_kind,
        memory=_part_memory,
        perform=_part,
        **_VIEW,
    )
)
