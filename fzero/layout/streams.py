"""Streams: the chunks in which a large leaf is gathered, one after the other, so that it is never whole.

A chunk is the same part of every rank's slice, so its all-gather is balanced and no layout changes:

    leaf of 12 rows     |0 1 2 3 4 5|6 7 8 9 . .|     2 ranks of 6 rows each, the last one has 4
    chunk 0 of 2 + 2    |0 1        |6 7        |
    chunk 1             |    2 3    |    8 9    |
    chunk 2             |        4 5|        . .|     rows that nothing fills are zeros

Rows are those of the leaf's first dimension: of an embedding tokens, of stacked experts experts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fzero.layout.layout import ALIGN, Layout, Leaf

LEAST_PART = 2
"""A chunk may have so many times fewer rows than its limit allows, where every chunk is full then."""


class Stream(NamedTuple):
    """The chunks of one leaf: `turns` chunks of `height` rows of each of `world` ranks.

    Rank r has rows `r * held` to `(r + 1) * held` of the leaf's `rows`, the last ranks fewer. `layout` is that of one
    chunk: a leaf of `world * height` rows, of `width` elements each.
    """

    rows: int
    width: int
    world: int
    held: int
    height: int
    turns: int
    layout: Layout

    @property
    def rows_of_chunk(self) -> int:
        """The rows of a gathered chunk."""
        return self.world * self.height

    @property
    def padded(self) -> int:
        """The rows of each rank in all chunks, with those that nothing fills."""
        return self.turns * self.height


def find_obstacle(layout: Layout, leaf: int) -> str:
    """Why a leaf has no chunks of whole rows that all ranks hold alike; empty where it has."""
    width = math.prod(layout.leaves[leaf].shape[1:])
    if len(layout.leaves) > 1:
        return f"shares the bucket {layout.bucket!r} with other leaves; give it one of its own with partition(layers=)"
    if layout.shard % width or layout.leaf_ranges[leaf].start:
        return f"is cut within rows of {width} elements; cut it between rows with partition(granularity=)"
    return ""


def plan_stream(layout: Layout, leaf: int, itemsize: int, limit: int) -> Stream:
    """The chunks of a leaf without an obstacle, of at most `limit` bytes when gathered. Elements have `itemsize` bytes.

    The height divides the rows of a rank where that makes the chunks no smaller than half of what the limit allows.
    Otherwise the last chunk has rows that nothing fills. A limit below one row of every rank counts as that.
    """
    own, world = layout.leaves[leaf], layout.world
    width = math.prod(own.shape[1:])
    held = layout.shard // width
    most = min(max(limit // (world * width * itemsize), 1), held)
    height = next((each for each in range(most, most // LEAST_PART, -1) if held % each == 0), None)
    if height is None:
        height = -(-held // -(-held // most))
    turns = -(-held // height)
    chunk = Leaf(own.path, (world * height, *own.shape[1:]), 1, own.is_frozen, own.is_embedding, own.split)
    align = math.gcd(height * width, ALIGN)  # so that a chunk has no padding
    return Stream(
        own.shape[0], width, world, held, height, turns,
        Layout(f"{layout.bucket} in {turns}", (chunk,), layout.mesh, align),
    )  # fmt: skip
