"""Strides: which elements of one flat array are which elements of another, after views and copies.

    Copy(source=3, target=0, dims=(Dim(5, 8, 2), Dim(2, 4, 1)))

says: element 3 + 8 i + 4 j of the one is element 0 + 2 i + j of the other, for i in range(5), j in range(2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from fzero.base.errors import FzeroError
from fzero.layout.boxes import boxes


class Dim(NamedTuple):
    """`size` steps. A step goes `source` elements on in the one array, and `target` elements on in the other."""

    size: int
    source: int
    target: int


class Copy(NamedTuple):
    """Elements of a flat array `source`, and the elements of a flat array `target` that have the same values.

    `source` and `target` are the first elements. A `Copy` has at least one element. `dims` have several steps each, and
    come from the largest source stride to the smallest, so that elements come in the order of the source.
    """

    source: int
    target: int
    dims: tuple[Dim, ...] = ()

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(dim.size for dim in self.dims)

    def swap(self) -> Copy:
        """The copy from `target` to `source`, in the order of the target."""
        dims = [Dim(size, target, source) for size, source, target in self.dims]
        return _merge(self.target, self.source, _sort(dims))


class Run(NamedTuple):
    """`numel` elements that lie side by side in both arrays."""

    source: int
    target: int
    numel: int


def view_to_view(
    shape: Sequence[int], source: Sequence[int], target: Sequence[int], start: int = 0, to: int = 0
) -> list[Copy]:
    """The copy between two views of one shape with these strides, which begin at elements `start` and `to`. The list is
    empty for a shape without elements.

    Raises:
        FzeroError: for a view that has an element several times, such as an expanded one.
    """
    if 0 in shape:
        return []
    return [_merge(start, to, _sort(tuple(map(Dim, shape, source, target))))]


def dense(shape: Sequence[int]) -> list[int]:
    """The strides of a row-major array."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def within(copy: Copy, source: range) -> Iterator[Copy]:
    """The part of a copy whose source elements lie in a range, in the order of the source: at most `2 * ndim - 1`
    copies."""
    dims = copy.dims
    flat = range(*(_count_below(dims, stop - copy.source) for stop in (source.start, source.stop)))
    for start, size in boxes(tuple(dim.size for dim in dims), flat):
        first = copy.source + sum(at * dim.source for at, dim in zip(start, dims))
        to = copy.target + sum(at * dim.target for at, dim in zip(start, dims))
        yield _merge(first, to, tuple(dim._replace(size=count) for dim, count in zip(dims, size)))


def compose(first: Copy, second: Copy) -> Iterator[Copy]:
    """The copies from the source of `first` to the target of `second`, of those elements that `first` puts where
    `second` takes them from.

    Raises:
        FzeroError: where strides of the array between them do not divide each other.
    """
    back = first.swap()
    for source, target, dims in _match(back.dims, second.dims, back.source - second.source):
        yield _merge(back.target + source, second.target + target, _sort(dims))


def runs(copy: Copy) -> Iterator[Run]:
    """The runs of a copy, in the order of the source."""
    dims, numel = copy.dims, 1
    if dims and dims[-1][1:] == (1, 1):
        dims, numel = dims[:-1], dims[-1].size
    for index in product(*(range(dim.size) for dim in dims)):
        source = copy.source + sum(at * dim.source for at, dim in zip(index, dims))
        yield Run(source, copy.target + sum(at * dim.target for at, dim in zip(index, dims)), numel)


def halve(copy: Copy) -> tuple[Copy, Copy]:
    """A copy of several elements as two, cut along the dimension with the largest source stride."""
    first, *rest = copy.dims
    half = first.size // 2
    behind = copy.source + half * first.source, copy.target + half * first.target
    return (
        _merge(copy.source, copy.target, (first._replace(size=half), *rest)),
        _merge(*behind, (first._replace(size=first.size - half), *rest)),
    )


def extent(copy: Copy) -> int:
    """How many elements of the source lie between the first and the last of a copy, both counted."""
    return _reach(copy.dims) + 1


def _reach(dims: Sequence[Dim]) -> int:
    """How far the last source element is from the first."""
    return sum((dim.size - 1) * dim.source for dim in dims)


def _sort(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """The dimensions of several steps, from the largest source stride to the smallest.

    Raises:
        FzeroError: where two elements are one element of the source, or are out of order all the same.
    """
    found = sorted((dim for dim in dims if dim.size > 1), key=lambda dim: -dim.source)
    for at, dim in enumerate(found):
        if dim.source <= _reach(found[at + 1 :]):
            problem = f"elements overlap or interleave: strides {[dim.source for dim in found]}"
            raise FzeroError("view", f"{problem} of sizes {[dim.size for dim in found]}")
    return tuple(found)


def _merge(source: int, target: int, dims: Sequence[Dim]) -> Copy:
    """A copy of sorted dimensions, each pair that lies dense in both arrays as one."""
    merged: list[Dim] = []
    for dim in dims:
        if dim.size == 1:
            continue
        if merged and merged[-1][1:] == (dim.size * dim.source, dim.size * dim.target):
            merged[-1] = Dim(merged[-1].size * dim.size, dim.source, dim.target)
        else:
            merged.append(dim)
    return Copy(source, target, tuple(merged))


def _count_below(dims: Sequence[Dim], stop: int) -> int:
    """How many elements of sorted dimensions have a source offset below `stop`."""
    count = 0
    for at, dim in enumerate(dims):
        if stop <= 0:
            return count
        steps = min(dim.size, stop // dim.source)
        count += steps * math.prod(inner.size for inner in dims[at + 1 :])
        if steps == dim.size:
            return count
        stop -= steps * dim.source
    return count + (stop > 0)


class _Level(NamedTuple):
    """`blocks` blocks, one every stride. The `inner` dimensions of a block have no larger stride."""

    start: int  # offset of the first block, in the array between
    other: int  # and in the other array
    blocks: int
    step: int  # from block to block, in the other array
    inner: tuple[Dim, ...]


def _match(back: tuple[Dim, ...], forth: tuple[Dim, ...], gap: int) -> Iterator[tuple[int, int, tuple[Dim, ...]]]:
    """`(source, target, dims)` of the elements that two sets of dimensions share in the array between, whose strides
    are the `source` of each dimension. The first element of `back` is `gap` elements behind that of `forth`.

    Level by level from the largest stride S: block i of `back` and block j of `forth` can meet where (i - j) S + gap is
    no more than the inner elements make up for.
    """
    if not back and not forth:
        if gap == 0:
            yield 0, 0, ()
        return
    stride = max(dims[0].source for dims in (back, forth) if dims)
    for mine, theirs in product(_split_off(back, stride), _split_off(forth, stride)):
        apart = gap + mine.start - theirs.start
        least, most = -_reach(mine.inner) - apart, _reach(theirs.inner) - apart
        for ahead in range(-(-least // stride), most // stride + 1):  # i - j
            start, stop = max(0, ahead), min(mine.blocks, theirs.blocks + ahead)
            if start >= stop:
                continue
            for source, target, dims in _match(mine.inner, theirs.inner, apart + ahead * stride):
                source += mine.other + start * mine.step
                target += theirs.other + (start - ahead) * theirs.step
                yield source, target, (Dim(stop - start, mine.step, theirs.step), *dims)


def _split_off(dims: tuple[Dim, ...], stride: int) -> list[_Level]:
    """Sorted dimensions as blocks of one stride, which is at least their largest.

    Raises:
        FzeroError: where the stride is no multiple of theirs.
    """
    if not dims or dims[0].size * dims[0].source <= stride:
        return [_Level(0, 0, 1, 0, dims)]
    (size, source, other), rest = dims[0], dims[1:]
    if stride % source:
        raise FzeroError("view", f"strides {stride} and {source} do not divide each other")
    steps = stride // source
    whole, left = divmod(size, steps)
    inner = (Dim(steps, source, other), *rest) if steps > 1 else rest
    found = [_Level(0, 0, whole, steps * other, inner)]
    if left:
        inner = (Dim(left, source, other), *rest) if left > 1 else rest
        found.append(_Level(whole * stride, whole * steps * other, 1, 0, inner))
    return found
