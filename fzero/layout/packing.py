"""Packing: where leaves lie in a bucket of equal shards when no shard's end may cut a block of a leaf, a row say.

    w: three rows, 4 + 4 + 4      2 shards of 8, w first   |w w w w w w w w|w w w w b b b .|
    b: three elements             2 shards of 8, b first   |b b b . w w w w|w w w w w w w w|

Leaves keep their order, and each is one range of the bucket, so that a gathered leaf is a view of it.

An end that falls inside a leaf must be whole blocks away from the leaf's start. So a leaf that several ends fall into
has a block that divides the shard; any other is cut once at most. Let `fits(shard, often)` say whether the leaves fit
when those whose block is in `often` may be cut by many ends. Where it holds it holds for every larger shard and for
every larger `often`: with `often` given, bisection finds the smallest shard, and what has to be searched is which
blocks divide it.
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
"""Elements of each leaf, and of a block of it. The last block of a leaf may be shorter."""

Blocks = frozenset[int]
Fits = Callable[[int, Blocks], bool]

NOWHERE = 1 << 200
"""Beyond the end of every bucket."""


class Packing(NamedTuple):
    """Elements of a shard, and where each leaf lies in the bucket; what lies in no leaf is padding."""

    shard: int
    ranges: tuple[range, ...]


@lru_cache(2**10)
def pack(sizes: Sizes, world: int, align: int) -> Packing:
    """Leaves in order, each as early as it can lie, in `world` shards of the smallest multiple of `align` that does.

    Where all blocks are 1 a shard is below `numel / world + align`, and leaves adjoin. Otherwise, with `block` the
    largest block, `longest` the largest leaf that has one, and `unit` the least common multiple of all blocks and
    `align`, it is below `numel / world + block + unit` and below `max(numel / world + block, longest) + align`. So
    padding is small where shards are longer than leaves, and where blocks divide each other; rows of 4,096 and of
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
    """Block -> elements of the largest leaf that has it; not for blocks of 1."""
    longest: dict[int, int] = {}
    for numel, block in sizes:
        if block > 1:
            longest[block] = max(numel, longest.get(block, 0))
    return longest


def _smallest(
    fits: Fits, longest: Mapping[int, int], low: int, step: int, often: Blocks, open: Blocks, limit: int
) -> int:
    """The smallest multiple of `step` from `low` on that fits when a leaf whose block is in neither set is cut at most
    once, and one whose block is `open` too unless it divides the shard; `limit` if none is smaller.

    What fits when all `open` blocks are cut often is a lower bound, and the answer if they divide it. If one does not,
    the answer cuts its leaves at most once or is a multiple of it: two searches in which it is no longer open. Blocks
    whose leaves are no longer than the shard do not matter, since two ends cannot fall into them.
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
    """The first multiple of `step` from `low` on that fits, as all after it do."""
    start = stop = -(-low // step)
    stride = 1
    while not fits(stop * step, often):
        start, stop, stride = stop + 1, stop + stride, 2 * stride
    return step * (start + bisect_left(range(start, stop), True, key=lambda steps: fits(steps * step, often)))


def _fits(sizes: Sizes, before: Sequence[int], world: int, shard: int, often: Blocks) -> bool:
    """Whether `world` shards hold the leaves, of which there are `before[i]` elements before leaf i. Stops only at
    leaves that do not end in the shard that they would begin in."""
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
    """Where each leaf lies, in shards that hold them."""
    end = 0
    for numel, block in sizes:
        end = _end(end, numel, block, shard, shard % block == 0)
        yield range(end - numel, end)


def _end(cursor: int, numel: int, block: int, shard: int, often: bool) -> int:
    """Where a leaf ends at the earliest that begins at `cursor` or later; nowhere if it can only be cut often and may
    not. Cut often by shards that its block does not divide, it has a gap before each cut."""
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
