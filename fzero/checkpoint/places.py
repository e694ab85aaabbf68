"""Places: where the elements of each leaf lie among the files of a checkpoint, as numbers alone.

A checkpoint has one file for each rank of the mesh that saved it. Files are numbered as the ranks, row by row. A rank
holds one slice of each bucket, and the slices of a leaf lie in as many files as the shard axis has positions:

    bucket                      |- start -|------ leaf ------|- - -|
    positions of the shard axis |---- 0 ----|---- 1 ----|---- 2 ----|
    files                        first       first + offset  ...

Of several copies of the state, `first` says which copy wrote the leaf: each leaf is in the files once. So where an
element is follows from four numbers of a leaf and the sizes of the mesh, and no rank asks another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from fzero.base.mesh import JOINT
from fzero.layout.ranges import intersect


class Place(NamedTuple):
    """One leaf. Its bucket has `shard` elements a rank, and the leaf begins at element `start` of the bucket. With
    `shard` 0 the file `first` has the whole leaf.

    A leaf that is split over axes is as many leaves, each of the `shape`: `firsts` has the first file of each. `dim`
    and `parts` are as in a `Split`. Where state lies along some of these axes, `axis` is the rest of the shard axis.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    shard: int
    first: int
    dim: int = 0
    parts: int = 0
    firsts: tuple[int, ...] = ()
    axis: str = ""

    @property
    def numel(self) -> int:
        """The elements of the leaf, or of each of the leaves that it is split into."""
        return math.prod(self.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        shape, dim = self.shape, self.dim
        return (*shape[:dim], shape[dim] * len(self.firsts), *shape[dim + 1 :]) if self.firsts else shape

    def list_parts(self) -> list[Place]:
        """The leaf, or the leaves that it is split into, in order."""
        return [self._replace(first=first, firsts=()) for first in self.firsts] if self.firsts else [self]


class Grid(NamedTuple):
    """The files of a checkpoint, by the sizes of the axes of a mesh, outermost first. `shard_axis` is the mesh's."""

    axes: tuple[tuple[str, int], ...]
    shard_axis: str

    @classmethod
    def of(cls, sizes: Mapping[str, int], shard_axis: str) -> Grid:
        """The grid of a mesh with axes of these sizes. {} stands for a process that saves alone.

        Raises:
            ValueError: for a shard axis that the mesh does not have.
        """
        grid = cls(tuple(sizes.items()), shard_axis)
        grid.count(shard_axis)
        return grid

    @property
    def files(self) -> int:
        """The number of files."""
        return math.prod(size for _, size in self.axes)

    def count(self, axis: str) -> int:
        """The positions along an axis, by default the shard axis.

        Raises:
            ValueError: for an axis that the mesh does not have, or that is named twice.
        """
        sizes, along = dict(self.axes), self._split(axis)
        if not sizes.keys() >= set(along) or len(set(along)) < len(along):
            raise ValueError(f"the axes {along} are not in {list(sizes)}")
        return math.prod(sizes[name] for name in along)

    def position(self, file: int, axis: str) -> int:
        """The position of a file along an axis, by default the shard axis."""
        position, inner, along = 0, self.files, self._split(axis)
        for name, size in self.axes:
            inner //= size
            if name in along:
                position = position * size + file // inner % size
        return position

    def offset(self, position: int, axis: str) -> int:
        """How many files behind that at position 0 the file at a position along an axis is, by default the shard
        axis."""
        offset, inner, along = 0, 1, self._split(axis)
        for name, size in reversed(self.axes):
            if name in along:
                position, digit = divmod(position, size)
                offset += digit * inner
            inner *= size
        return offset

    def _split(self, axis: str) -> list[str]:
        return (axis or self.shard_axis).split(JOINT) if self.axes else []

    def list_firsts(self) -> list[int]:
        """The file at position 0 of each copy of the state."""
        return [file for file in range(self.files) if self.position(file, "") == 0]

    def find_part(self, place: Place, file: int) -> range:
        """The elements of a flattened leaf that a file has. May be empty."""
        if not place.shard:
            return range(place.numel) if file == place.first else range(0)
        position = self.position(file, place.axis)
        begin = position * place.shard - place.start  # of the file, in elements of the leaf
        if file != place.first + self.offset(position, place.axis) or begin + place.shard <= 0:
            return range(0)
        return intersect(range(place.numel), range(begin, begin + place.shard))

    def iter_files(self, place: Place, elements: range) -> Iterator[tuple[int, range]]:
        """`(file, elements of the flattened leaf in the file)` for each file that has some of `elements`."""
        if not elements:
            return
        if not place.shard:
            yield place.first, elements
            return
        first, last = ((place.start + at) // place.shard for at in (elements[0], elements[-1]))
        for position in range(first, last + 1):
            file = place.first + self.offset(position, place.axis)
            yield file, intersect(elements, self.find_part(place, file))
