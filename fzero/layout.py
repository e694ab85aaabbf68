"""Layouts: how the leaves of one bucket lie in one flat buffer, and which part of it each rank owns.

    leaves            |--- w ---|- b -|----- u -----|
    bucket, padded    |--- w ---|- b -|----- u -----|000|
    ranks             |---- 0 ----|---- 1 ----|---- 2 ----|

A layout is integers and names only: it hashes, compares, and plans for 4,096 ranks without a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

from fzero.mesh import VirtualMesh
from fzero.ranges import intersect, pad, shift, tile

ALIGN = 16
"""Elements that a rank's slice is a multiple of: 16 bytes for the narrowest dtype, as NCCL wants it."""


@dataclass(frozen=True)
class Leaf:
    """A leaf's dotted path and global shape."""

    path: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole leaf."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """One bucket: its leaves in order, flattened, concatenated, padded to `world * align` and cut into `world` slices.

    With `replicated` every rank holds all of it and there is no padding.
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
        """Elements of the bucket: `numel` padded to a multiple of `world * align`."""
        return self.numel if self.replicated else pad(self.numel, self.world * self.align)

    @property
    def shard(self) -> int:
        """Elements that a rank holds."""
        return self.padded if self.replicated else self.padded // self.world

    @cached_property
    def leaf_ranges(self) -> tuple[range, ...]:
        """Where each leaf lies in the bucket; they tile [0, numel)."""
        return tile(leaf.numel for leaf in self.leaves)

    def rank_range(self, rank: int) -> range:
        """The part of the bucket that `rank` owns; without `replicated` they tile [0, padded)."""
        return range(self.padded) if self.replicated else shift(range(self.shard), rank * self.shard)

    def part(self, leaf: int, rank: int) -> range:
        """The elements of a leaf, counted from its own start, that `rank` owns; may be empty."""
        whole = self.leaf_ranges[leaf]
        return shift(intersect(whole, self.rank_range(rank)), -whole.start)

    @cached_property
    def _hash(self) -> int:
        return hash((self.bucket, self.leaves, self.mesh, self.align, self.replicated))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Wire:
    """A buffer of `world` equal blocks that carries some leaves of a bucket: block r has rank r's parts in leaf order.

    With all leaves it is the bucket itself and every leaf is one contiguous range of it.
    """

    layout: Layout
    leaves: tuple[int, ...]

    @cached_property
    def stride(self) -> int:
        """Elements of a block: the largest rank's, padded to the layout's alignment."""
        if len(self.leaves) == len(self.layout.leaves):
            return self.layout.shard
        most = max(sum(map(len, self.parts(rank))) for rank in range(self.layout.world))
        return pad(most, self.layout.align)

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.stride * self.layout.world

    @cache  # noqa: B019  wires are interned by `wire` and live as long as the process
    def parts(self, rank: int) -> tuple[range, ...]:
        """The part of each carried leaf that `rank` owns, counted from the leaf's start."""
        return tuple(self.layout.part(leaf, rank) for leaf in self.leaves)

    @cache  # noqa: B019
    def block(self, rank: int) -> tuple[range, ...]:
        """Where these parts lie in the rank's block; they tile a prefix of [0, stride)."""
        return tile(map(len, self.parts(rank)))

    @cache  # noqa: B019
    def pieces(self, position: int) -> tuple[range, ...]:
        """Where the leaf at `position` of `leaves` lies in the buffer: adjoining pieces joined, empty ones dropped."""
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
