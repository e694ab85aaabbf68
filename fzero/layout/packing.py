"""Packing: where leaves lie in a bucket of equal shards, when no shard's end may cut a block (say, a row) of a leaf.

    w: three rows, 4 + 4 + 4      2 shards of 8, w first   |w w w w w w w w|w w w w b b b .|
    b: three elements             2 shards of 8, b first   |b b b . w w w w|w w w w w w w w|

Leaves keep their order, and each leaf is one range of the bucket, so that a gathered leaf is a view of the bucket.

A shard's end inside a leaf must be whole blocks away from the leaf's start. Therefore

* a leaf that several shard ends fall into has a block that divides the shard;
* any other leaf is cut at most once.

Let `fits(shard, often)` say whether the leaves fit when leaves whose block is in `often` may be cut by many ends. If
`fits(shard, often)` holds, it holds for every larger shard and for every larger `often` too. So bisection finds the
smallest shard for a given `often`, and the search is for the blocks that divide the shard.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

from fzero.layout.ranges import pad, tile

Sizes = tuple[tuple[int, int], ...]
"""Elements of each leaf, and of a block of the leaf. The last block of a leaf may be shorter."""

Blocks = frozenset[int]
Fits = Callable[[int, Blocks], bool]

NOWHERE = 1 << 200
"""A position beyond the end of every bucket."""


class Packing(NamedTuple):
    """The elements of a shard, and the range of the bucket that each leaf takes. All else in the bucket is padding."""

    shard: int
    ranges: tuple[range, ...]


@lru_cache(2**10)
def pack(sizes: Sizes, world: int, align: int) -> Packing:
    """Pack leaves in order into `world` shards, each leaf as early as possible, the shard the smallest that holds them.

    A shard is a multiple of `align`. If all blocks are 1, leaves adjoin and a shard is below `numel / world + align`.
    Otherwise let `block` be the largest block, `longest` the largest leaf that has a block, and `unit` the least common
    multiple of all blocks and `align`. Then a shard is below both

    * `numel / world + block + unit`,
    * `max(numel / world + block, longest) + align`.

    So padding is small where shards are longer than leaves, and where blocks divide each other. Rows of 4,096 and of
    11,008 elements in one bucket of many short shards waste much.
    """
    before = tuple(accumulate((numel for numel, _ in sizes), initial=0))
    shard, longest = pad(-(-before[-1] // world), align), _longest(sizes)
    if not shard or not longest:
        return Packing(shard, tile(numel for numel, _ in sizes))
    fits = partial(_fits, sizes, before, world)
    often = frozenset(block for _, block in sizes if align % block == 0)
    shard = _smallest(fits, longest, shard, align, often, frozenset(longest) - often, pad(before[-1], align))
    return Packing(shard, tuple(_ranges(sizes, shard)))


def _longest(sizes: Sizes) -> dict[int, int]:
    """For each block above 1, the elements of the largest leaf that has the block."""
    longest: dict[int, int] = {}
    for numel, block in sizes:
        if block > 1:
            longest[block] = max(numel, longest.get(block, 0))
    return longest


def _smallest(
    fits: Fits, longest: Mapping[int, int], low: int, step: int, often: Blocks, open: Blocks, limit: int
) -> int:
    """The smallest shard that fits: a multiple of `step`, at least `low`; `limit` if no smaller one fits.

    How often shard ends may cut a leaf depends on the leaf's block:

    * block in `often`: any number of times;
    * block in `open`: any number of times if the block divides the shard, else at most once;
    * any other block: at most once.

    The smallest shard that fits with all `open` blocks cut often is a lower bound, and the answer if all `open` blocks
    divide it. If one block does not, then either the answer cuts that block's leaves at most once, or the answer is a
    multiple of the block: two searches, in both of which the block is no longer open. A block whose leaves are no
    longer than the shard does not matter, because two ends cannot fall into such a leaf.
    """
    if pad(low, step) >= limit:
        return limit
    shard = _first(fits, low, step, often | open)
    open = frozenset(block for block in open if longest[block] > shard)
    block = max((block for block in open if shard % block), key=lambda block: longest[block], default=None)
    if block is None or shard >= limit:
        return min(shard, limit)
    open -= {block}
    limit = _smallest(fits, longest, shard, step, often, open, limit)
    return _smallest(fits, longest, shard, math.lcm(step, block), often | {block}, open, limit)


def _first(fits: Fits, low: int, step: int, often: Blocks) -> int:
    """The first multiple of `step` from `low` on that fits. All later multiples fit too, so bisection finds it."""
    start = stop = -(-low // step)
    stride = 1
    while not fits(stop * step, often):
        start, stop, stride = stop + 1, stop + stride, 2 * stride
    return step * (start + bisect_left(range(start, stop), True, key=lambda steps: fits(steps * step, often)))


def _fits(sizes: Sizes, before: Sequence[int], world: int, shard: int, often: Blocks) -> bool:
    """Whether `world` shards hold the leaves. `before[i]` is the number of elements of all leaves before leaf i.

    The loop stops only at leaves that do not end in the shard in which they would begin.
    """
    end = leaf = 0
    while end <= world * shard:
        stop = bisect_right(before, before[leaf] + shard - end % shard) - 1
        end += before[stop] - before[leaf]
        if stop == len(sizes):
            return end <= world * shard
        numel, block = sizes[stop]
        end, leaf = _end(end, numel, block, shard, block in often), stop + 1
    return False


def _ranges(sizes: Sizes, shard: int) -> Iterator[range]:
    """The range of each leaf, in shards that hold all leaves."""
    end = 0
    for numel, block in sizes:
        end = _end(end, numel, block, shard, shard % block == 0)
        yield range(end - numel, end)


def _end(cursor: int, numel: int, block: int, shard: int, often: bool) -> int:
    """The earliest end of a leaf that begins at `cursor` or later; NOWHERE if the leaf must be cut often and may not.

    A leaf that is cut often, and whose block does not divide the shard, has a gap before each cut.
    """
    room, most = shard - cursor % shard, shard - shard % block
    if numel <= room:
        return cursor + numel
    border, rest = cursor + room, numel - (room - room % block)
    if rest <= shard:
        return border + rest
    if often and most:
        cuts = -((shard - rest) // most)
        return border + cuts * shard + rest - cuts * most
    return border + shard + numel - most if numel - most <= shard else NOWHERE
