"""Layouts: how the leaves of one bucket lie in one flat buffer, and which part of it each rank owns.

    leaves            |--- w ---|- b -|----- u -----|
    bucket, padded    |--- w ---|- b -|----- u -----|000|
    ranks             |---- 0 ----|---- 1 ----|---- 2 ----|

A layout is integers and names only: it hashes, compares, and plans for 4,096 ranks without a device.

A rank boundary may fall anywhere in a leaf. Where a leaf has blocks, rows say, it falls between two of them, and zeros
before the leaf shift it there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.packing import Packing, pack
from fzero.layout.ranges import intersect, pad, shift, tile

ALIGN = 16
"""Elements that a rank's slice is a multiple of: 16 bytes for the narrowest dtype, as NCCL wants it."""


@dataclass(frozen=True)
class Leaf:
    """A leaf's dotted path, its global shape, and the elements of a block that no rank boundary cuts.

    Blocks are counted from the leaf's start; the last one may be shorter.

    Raises:
        FzeroError: for a block below 1 element.
    """

    path: str
    shape: tuple[int, ...]
    block: int = 1

    def __post_init__(self) -> None:
        if self.block < 1:
            raise FzeroError(self.path, f"has blocks of {self.block} elements", "a block is at least 1 element")

    @property
    def numel(self) -> int:
        """Elements of the whole leaf."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """One bucket: its leaves in order, flattened, concatenated, padded to `world * align` and cut into `world` slices.

    Leaves with blocks may need more padding, also between leaves: the least that leaves their blocks whole and their
    order as it is. With `replicated` every rank holds all of the bucket and there is no padding.
    """

    bucket: str
    leaves: tuple[Leaf, ...]
    mesh: VirtualMesh
    align: int = ALIGN
    replicated: bool = False

    @property
    def world(self) -> int:
        """Ranks that the bucket is cut over."""
        return self.mesh.size(self.mesh.shard_axis)

    @cached_property
    def numel(self) -> int:
        """Elements of all leaves, without padding."""
        return sum(leaf.numel for leaf in self.leaves)

    @cached_property
    def padded(self) -> int:
        """Elements of the bucket: a multiple of `world * align`, the first from `numel` on where no leaf has blocks."""
        return self.shard if self.replicated else self.shard * self.world

    @property
    def shard(self) -> int:
        """Elements that a rank holds."""
        return self._packing.shard

    @property
    def leaf_ranges(self) -> tuple[range, ...]:
        """Where each leaf lies in the bucket, in order; they tile [0, numel) where there are no gaps."""
        return self._packing.ranges

    @cached_property
    def has_gaps(self) -> bool:
        """Whether there is padding between leaves."""
        return self.leaf_ranges != tile(map(len, self.leaf_ranges))

    @cached_property
    def _packing(self) -> Packing:
        if self.replicated:
            return Packing(self.numel, tile(leaf.numel for leaf in self.leaves))
        return pack(tuple((leaf.numel, leaf.block) for leaf in self.leaves), self.world, self.align)

    def rank_range(self, rank: int | None) -> range:
        """The part of the bucket that `rank` owns; without `replicated` they tile [0, padded). None owns everything."""
        return range(self.padded) if self.replicated or rank is None else shift(range(self.shard), rank * self.shard)

    def part(self, leaf: int, rank: int | None) -> range:
        """The elements of a leaf, counted from its own start, that `rank` owns; may be empty."""
        whole = self.leaf_ranges[leaf]
        return shift(intersect(whole, self.rank_range(rank)), -whole.start)

    def slot(self, leaf: int, rank: int | None) -> range:
        """Where this part lies in what `rank` holds of the bucket, counted from its start."""
        mine = self.rank_range(rank)
        return shift(intersect(mine, self.leaf_ranges[leaf]), -mine.start)

    def turns(self, leaves: Iterable[int]) -> set[int]:
        """Ranks, 0 among them, with every other of which the last of them before it holds as many elements of each of
        these leaves, in the same place of what it holds of the bucket. Four a leaf at most, whatever the world."""
        ranks = {0}
        for where in (self.leaf_ranges[leaf] for leaf in leaves):
            if where and not self.replicated:
                first, last = where.start // self.shard, (where.stop - 1) // self.shard
                ranks |= {first, first + 1, last, last + 1}
        return {rank for rank in ranks if rank < self.world}

    @cached_property
    def _hash(self) -> int:
        return hash((self.bucket, self.leaves, self.mesh, self.align, self.replicated))

    def __hash__(self) -> int:
        return self._hash


def replicated(shape: Sequence[int], mesh: VirtualMesh) -> Layout:
    """The layout of a value that every rank of a mesh holds whole."""
    return Layout("replicated", (Leaf("", tuple(shape)),), mesh, replicated=True)


@dataclass(frozen=True)
class Wire:
    """A buffer of `world` equal blocks that carries some leaves of a bucket: block r has rank r's parts in leaf order.

    With all leaves it is the bucket itself and every leaf is one contiguous range of it. Otherwise parts adjoin.
    """

    layout: Layout
    leaves: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Whether it carries all leaves."""
        return len(self.leaves) == len(self.layout.leaves)

    @property
    def has_gaps(self) -> bool:
        """Whether parts of a block may not adjoin: the bucket has gaps, and this is all of it."""
        return self.is_complete and self.layout.has_gaps

    @cached_property
    def stride(self) -> int:
        """Elements of a block: the largest rank's, padded to the layout's alignment."""
        if self.is_complete:
            return self.layout.shard
        most = max(sum(map(len, self.parts(rank))) for rank in self.layout.turns(self.leaves))
        return pad(most, self.layout.align)

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.stride * self.layout.world

    @cache  # noqa: B019  wires are interned by `wire` and live as long as the process
    def parts(self, rank: int | None) -> tuple[range, ...]:
        """The part of each carried leaf that `rank` owns, counted from the leaf's start."""
        return tuple(self.layout.part(leaf, rank) for leaf in self.leaves)

    @cache  # noqa: B019
    def block(self, rank: int | None) -> tuple[range, ...]:
        """Where these parts lie in the rank's block; without gaps they tile a prefix of [0, stride)."""
        if self.has_gaps:
            return tuple(self.layout.slot(leaf, rank) for leaf in self.leaves)
        return tile(map(len, self.parts(rank)))

    def is_joined(self, position: int) -> bool:
        """Whether the leaf at `position` of `leaves` lies in one piece in the buffer, or is empty."""
        whole = self.layout.leaf_ranges[self.leaves[position]]
        if self.is_complete or not whole:
            return True
        first, last = whole.start // self.layout.shard, (whole.stop - 1) // self.layout.shard
        before = [rank for rank in self.layout.turns(self.leaves) if first <= rank < last]
        return all(self.block(rank)[position].stop == self.stride for rank in before)

    @cache  # noqa: B019
    def pieces(self, position: int) -> tuple[range, ...]:
        """Where the leaf at `position` of `leaves` lies in the buffer: adjoining pieces joined, empty ones dropped."""
        if self.is_complete:
            whole = self.layout.leaf_ranges[self.leaves[position]]
            return (whole,) if whole else ()
        joined: list[range] = []
        for rank in range(self.layout.world):
            piece = shift(self.block(rank)[position], rank * self.stride)
            if joined and joined[-1].stop == piece.start:
                joined[-1] = range(joined[-1].start, piece.stop)
            elif piece:
                joined.append(piece)
        return tuple(joined)


@cache
def wire(layout: Layout, leaves: tuple[int, ...]) -> Wire:
    """The one `Wire` of these leaves of a layout."""
    return Wire(layout, leaves)
