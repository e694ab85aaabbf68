"""Places: where the elements of each leaf lie among the files of a checkpoint, as numbers alone.

A checkpoint has one file for each rank of the mesh that saved it. Files are numbered as the ranks, row by row. A rank
holds one slice of each bucket, and the slices of a leaf lie in as many files as the shard axis has positions:

    bucket                      |- start -|------ leaf ------|- - -|
    positions of the shard axis |---- 0 ----|---- 1 ----|---- 2 ----|
    files                        first       first + stride  ...

Of several copies of the state, `first` says which copy wrote the leaf: each leaf is in the files once. So where an
element is follows from four numbers of a leaf and two of the mesh, and no rank asks another.
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

    A leaf that is split over model axes is as many leaves, each of the `shape`: `firsts` has the first file of each.
    `dim` and `parts` are as in a `Split`.
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
    """The files of a checkpoint. `world` is the size of the shard axis, and neighbours along it are `stride` files
    apart. `files` is their number."""

    world: int
    stride: int
    files: int

    @classmethod
    def of(cls, sizes: Mapping[str, int], shard_axis: str) -> Grid:
        """The grid of a mesh with axes of these sizes, outermost first. {} stands for a process that saves alone.

        Raises:
            ValueError: for a shard axis that the mesh does not have.
        """
        names, along = list(sizes), shard_axis.split(JOINT) if sizes else []
        first = names.index(along[0]) if along else 0
        if names[first : first + len(along)] != along:
            raise ValueError(f"the axes {along} are not side by side in {names}")
        inner = names[first + len(along) :] if along else []
        return cls(*(math.prod(sizes[name] for name in each) for each in (along, inner, names)))

    def position(self, file: int) -> int:
        """The position of a file along the shard axis."""
        return file // self.stride % self.world

    def list_firsts(self) -> list[int]:
        """The file at position 0 of each copy of the state."""
        return [file for file in range(self.files) if self.position(file) == 0]

    def find_part(self, place: Place, file: int) -> range:
        """The elements of a flattened leaf that a file has. May be empty."""
        if not place.shard:
            return range(place.numel) if file == place.first else range(0)
        position = self.position(file)
        begin = position * place.shard - place.start  # of the file, in elements of the leaf
        if file != place.first + position * self.stride or begin + place.shard <= 0:
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
            file = place.first + position * self.stride
            yield file, intersect(elements, self.find_part(place, file))
