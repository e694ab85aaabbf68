"""Wires: how one collective carries leaves of a bucket, and the layouts that nodes name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from fzero.layout.layout import Layout
from fzero.layout.ranges import pad, shift, tile


@dataclass(frozen=True)
class Wire:
    """How one collective carries some leaves of a bucket: a buffer of `world` equal blocks, one a rank.

    Block r has rank r's parts of the leaves, in leaf order. A complete wire carries all leaves: its buffer is the
    bucket itself, and every leaf is one contiguous range. In a partial wire the parts of a block adjoin.
    """

    layout: Layout
    leaves: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the wire carries all leaves of the bucket."""
        return len(self.leaves) == len(self.layout.leaves)

    @property
    def has_gaps(self) -> bool:
        """Whether there may be padding between the parts of a block: the wire is complete and its bucket has gaps."""
        return self.is_complete and self.layout.has_gaps

    @cached_property
    def stride(self) -> int:
        """The elements of a block: those of the fullest rank, padded to the layout's alignment."""
        if self.is_complete:
            return self.layout.shard
        most = max(sum(map(len, self.parts(rank))) for rank in self.layout.representative_ranks(self.leaves))
        return pad(most, self.layout.align)

    @property
    def numel(self) -> int:
        """The elements of the whole buffer, padding included."""
        return self.stride * self.layout.world

    @property
    def sent(self) -> int:
        """The elements that a reduce-scatter moves: of a complete wire `numel`, of a partial one the real parts alone.

        The blocks of a partial wire are padded to the fullest rank, and a reduce-scatter leaves this padding out.
        """
        return self.numel if self.is_complete else sum(self.layout.leaves[leaf].numel for leaf in self.leaves)

    @cache  # noqa: B019  wires are interned by `wire` and live as long as the process
    def parts(self, rank: int | None) -> tuple[range, ...]:
        """The elements of each carried leaf that `rank` owns, counted from the leaf's start."""
        return tuple(self.layout.part(leaf, rank) for leaf in self.leaves)

    @cache  # noqa: B019
    def block(self, rank: int | None) -> tuple[range, ...]:
        """The places of these parts in the rank's block. Without gaps they tile a prefix of [0, stride)."""
        if self.has_gaps:
            return tuple(self.layout.slot(leaf, rank) for leaf in self.leaves)
        return tile(map(len, self.parts(rank)))

    def is_joined(self, position: int) -> bool:
        """Whether the leaf at `position` of `leaves` is empty or one contiguous piece of the buffer."""
        span = self.layout.leaf_ranges[self.leaves[position]]
        if self.is_complete or not span:
            return True
        first, last = span.start // self.layout.shard, (span.stop - 1) // self.layout.shard
        before = [rank for rank in self.layout.representative_ranks(self.leaves) if first <= rank < last]
        return all(self.block(rank)[position].stop == self.stride for rank in before)

    @cache  # noqa: B019
    def pieces(self, position: int) -> tuple[range, ...]:
        """The ranges of the buffer that hold the leaf at `position` of `leaves`, none empty or adjoining."""
        if self.is_complete:
            span = self.layout.leaf_ranges[self.leaves[position]]
            return (span,) if span else ()
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
    """The one `Wire` of these leaves of a layout: wires remember what they compute."""
    return Wire(layout, leaves)


class LayoutTable:
    """Finds the layouts that nodes name: the second argument of a node is a key of `layouts`, the third names leaves of
    that layout. A program is one, and so is a call outside of a program."""

    layouts: Mapping[Any, Layout]

    def layout_of(self, node: Any) -> Layout:
        """The layout of the bucket that a node of an operation of `ops` names."""
        _, bucket, *_ = node.args
        return self.layouts[bucket]

    def wire_of(self, node: Any) -> Wire:
        """The buffer in which the leaves that a node of an operation of `ops` names move together."""
        _, bucket, leaves, *_ = node.args
        return self.wire(bucket, [leaves] if isinstance(leaves, int) else leaves)

    def wire(self, bucket: str, leaves: Iterable[int]) -> Wire:
        """The buffer in which these leaves of a bucket, in order, move together."""
        return wire(self.layouts[bucket], tuple(leaves))
