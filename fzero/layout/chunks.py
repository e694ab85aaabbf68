"""Chunks: how a leaf that is read, drawn or written piece by piece meets the ranks that own the leaf.

    leaf              |- - - - - - - - - - - -|
    chunks of 5       |--- 0 ---|--- 1 ---|-2-|
    ranks             |---- 0 ----|---- 1 ----|
    overlaps          |    0    |0|   1   | 1 |

Chunks are counted from the leaf's start and do not depend on ranks. So values that are made chunk by chunk, random
numbers say, are the same on any number of ranks. A rank that reads or writes its own part uses `rank_overlaps`. A rank
that reads a whole leaf uses `chunks`, and sends the `overlaps` of each chunk to their ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fzero.base.errors import FzeroError
from fzero.layout.layout import Layout
from fzero.layout.ranges import intersect, shift


class Overlap(NamedTuple):
    """Elements of one chunk that one rank owns: `source` of the flattened leaf, at least one element.

    `rank` is None where all ranks own the elements together, as the virtual ranks of one process do.
    """

    leaf: int
    source: range
    rank: int | None


def chunks(numel: int, size: int) -> Iterator[range]:
    """Ranges of `size` elements that tile [0, numel) in order. The last range may be shorter.

    Raises:
        FzeroError: for a size below 1.
    """
    return _chunks_of_part(range(numel), size)


def overlaps(layout: Layout, leaf: int, chunk: range) -> Iterator[Overlap]:
    """The elements of one chunk of a leaf that each rank owns, in the order of ranks.

    Every rank owns all of a replicated leaf.

    Raises:
        FzeroError: for a chunk that reaches outside the leaf.
    """
    span = layout.leaf_ranges[leaf]
    if chunk.start < 0 or chunk.stop > len(span):
        problem = f"a chunk is {chunk}, of {len(span)} elements"
        raise FzeroError(layout.leaves[leaf].path, problem, "take chunks from fzero.layout.chunks.chunks")
    return (_overlap(layout, leaf, chunk, rank) for rank in _owners(layout, shift(chunk, span.start)))


def rank_overlaps(layout: Layout, leaf: int, rank: int | None, size: int) -> Iterator[Overlap]:
    """The elements of each chunk of `size` elements that `rank` owns, in order. Together they are the rank's part.

    Raises:
        FzeroError: for a size below 1.
    """
    return (_overlap(layout, leaf, chunk, rank) for chunk in _chunks_of_part(layout.part(leaf, rank), size))


def _chunks_of_part(part: range, size: int) -> Iterator[range]:
    """The chunks that a part of a leaf touches. The last chunk ends with the part at the latest."""
    if size < 1:
        raise FzeroError("", f"chunks of {size} elements", "a chunk is at least 1 element")
    starts = range(part.start // size * size, part.stop, size) if part else ()
    return (range(start, min(start + size, part.stop)) for start in starts)


def _owners(layout: Layout, where: range) -> range:
    """The ranks that own elements of a range of the bucket."""
    if not where:
        return range(0)
    return range(layout.world) if layout.replicated else range(where[0] // layout.shard, where[-1] // layout.shard + 1)


def _overlap(layout: Layout, leaf: int, chunk: range, rank: int | None) -> Overlap:
    return Overlap(leaf, intersect(chunk, layout.part(leaf, rank)), rank)
