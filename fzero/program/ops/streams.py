"""Operations that cut a rank's slice of a leaf into chunks, and join the chunks again. Passes emit them.

    cut    slice -> a list of the slice's chunks: views, and copies where the slice ends within a chunk
    join   [turns, chunk] the chunks stacked -> slice, a view

Each chunk is a slice of a leaf of its own, whose layout is that of a `Stream` (`fzero.layout.streams`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fzero.program.kinds import Kind, Slice
from fzero.program.operation import NO_WORK, Node, Operation
from fzero.program.ops.leaves import check_leaf, place_slice
from fzero.program.records import register
from fzero.ranks.exchanges import Rank

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.memory import Allocator
    from fzero.program.program import Program


def cut(x: Tensor, bucket: str, leaf: int, chunk: str, count: int, numel: int) -> list[Tensor]:
    """`count` chunks of `numel` elements of a slice, which `chunk` is the bucket of. Zeros follow the slice's end."""
    full = x.numel() // numel
    chunks = list(x[: full * numel].view(full, numel).unbind()) if full else []
    if len(chunks) < count and x.numel() > full * numel:
        chunks.append(torch.cat([x[full * numel :], x.new_zeros((full + 1) * numel - x.numel())]))
    return [*chunks, *(x.new_zeros(numel) for _ in range(count - len(chunks)))]


def join(chunks: Tensor, bucket: str, leaf: int, chunk: str, numel: int) -> Tensor:
    """The slice of `numel` elements that stacked chunks begin with."""
    return chunks.view(-1)[:numel]


def _cut_kind(walk: Walk, node: Node) -> Kind:
    x, bucket, leaf, chunk, count, _ = node.args
    walk.expect(node, x, Slice(bucket, leaf))
    return [Slice(chunk, 0)] * count


def _cut_memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """The slice's memory, and on ranks whose slice ends early that of chunks with zeros."""
    x, bucket, leaf, _, count, numel = node.args
    missing = count * numel - allocator.count(allocator.program.layouts[bucket], leaf)
    copied = (missing + numel - 1) // numel * numel * x.meta["val"].element_size()
    places = [allocator.at(x)._replace(counts=numel, starts=None)] * count
    return places, allocator.keep((node, "padded"), copied)


def _cut(program: Program, node: Node, rank: Rank) -> Callable[..., list[Tensor]]:
    return cut


def _join_kind(walk: Walk, node: Node) -> Kind:
    chunks, bucket, leaf, chunk, _ = node.args
    kind = walk.of(chunks)
    over = kind.over if isinstance(kind, Slice) else frozenset()
    walk.expect(node, chunks, Slice(chunk, 0, over))
    return Slice(bucket, leaf, over)


def _join(program: Program, node: Node, rank: Rank) -> Callable[..., Tensor]:
    layout = program.layout_of(node)
    numel = len(layout.part(node.args[2], layout.rank_of(rank)))
    return lambda chunks, *_: chunks.view(-1)[:numel]


_QUIET: dict[str, Any] = {
    "names": "leaf",
    "check": check_leaf,
    "shares": lambda node: True,
    "work": lambda node: NO_WORK,
    "is_quiet": True,
}
register(Operation(name="cut", target=cut, fake=cut, kind=_cut_kind, memory=_cut_memory, perform=_cut, **_QUIET))
register(Operation(name="join", target=join, fake=join, kind=_join_kind, memory=place_slice, perform=_join, **_QUIET))
