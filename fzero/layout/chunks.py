"""Chunks: how a leaf that is read, drawn or written piece by piece meets the ranks that own it.

    leaf              |- - - - - - - - - - - -|
    chunks of 5       |--- 0 ---|--- 1 ---|-2-|
    ranks             |---- 0 ----|---- 1 ----|
    overlaps          |    0    |0|   1   | 1 |

Chunks are counted from the leaf's start and do not depend on ranks, so that what is made a chunk at a time, random
numbers say, is the same on any number of them. A rank that reads or writes its own part goes through `rank_overlaps`;
one that reads everything goes through `chunks`, and sends of each the `overlaps` to their ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fzero.base.errors import FzeroError
from fzero.layout.layout import Layout
from fzero.layout.ranges import intersect, shift


class Overlap(NamedTuple):
    """Elements of a chunk that a rank owns, at least one: those at `source` of the flattened leaf lie at `destination`
    of what the rank holds of the bucket. With no rank, of what all hold together: the bucket."""

    leaf: int
    source: range
    destination: range
    rank: int | None


def chunks(numel: int, size: int) -> Iterator[range]:
    """Ranges of `size` elements, the last one maybe shorter, that tile [0, numel) in order.

    Raises:
        FzeroError: for a size below 1.
    """
    return _chunks(range(numel), size)


def overlaps(layout: Layout, leaf: int, chunk: range) -> Iterator[Overlap]:
    """What ranks own of one chunk of a leaf, in their order; of a replicated leaf each rank owns all.

    Raises:
        FzeroError: for a chunk that reaches outside the leaf.
    """
    whole = layout.leaf_ranges[leaf]
    if chunk.start < 0 or chunk.stop > len(whole):
        problem = f"a chunk is {chunk}, of {len(whole)} elements"
        raise FzeroError(layout.leaves[leaf].path, problem, "take chunks from fzero.chunks.chunks")
    return (_overlap(layout, leaf, chunk, rank) for rank in _owners(layout, shift(chunk, whole.start)))


def rank_overlaps(layout: Layout, leaf: int, rank: int | None, size: int) -> Iterator[Overlap]:
    """What `rank` owns of each chunk of `size` elements of a leaf, in order: together its part of the leaf.

    Raises:
        FzeroError: for a size below 1.
    """
    return (_overlap(layout, leaf, chunk, rank) for chunk in _chunks(layout.part(leaf, rank), size))


def _chunks(part: range, size: int) -> Iterator[range]:
    """The chunks that a part of a leaf touches, the last one ending with it at the latest."""
    if size < 1:
        raise FzeroError("", f"chunks of {size} elements", "a chunk is at least 1 element")
    starts = range(part.start // size * size, part.stop, size) if part else ()
    return (range(start, min(start + size, part.stop)) for start in starts)


def _owners(layout: Layout, where: range) -> range:
    """The ranks that own some of a range of the bucket."""
    if not where:
        return range(0)
    return range(layout.world) if layout.replicated else range(where[0] // layout.shard, where[-1] // layout.shard + 1)


def _overlap(layout: Layout, leaf: int, chunk: range, rank: int | None) -> Overlap:
    source = intersect(chunk, layout.part(leaf, rank))
    return Overlap(leaf, source, shift(source, layout.leaf_ranges[leaf].start - layout.rank_range(rank).start), rank)
