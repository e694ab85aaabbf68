"""Layouts: how the leaves of one bucket lie in one flat buffer, and which part of it each rank owns.

    leaves            |--- w ---|- b -|----- u -----|
    bucket, padded    |--- w ---|- b -|----- u -----|000|
    ranks             |---- 0 ----|---- 1 ----|---- 2 ----|

A layout holds integers and names only: a layout hashes and compares, and plans for 4,096 ranks without a device.

A rank boundary may fall anywhere in a leaf without blocks. In a leaf with blocks, rows say, a rank boundary falls
between two blocks: zeros before the leaf shift the leaf there.

A leaf that is split over model axes is cut twice: ranks along these axes have a part of it each (`splits`), and a
layout is that of one part, over the ranks along the shard axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Protocol, TypeVar

from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.layout.packing import Packing, pack
from fzero.layout.ranges import intersect, shift, tile
from fzero.layout.splits import Split, range_in_part, run_of

ALIGN = 16
"""A rank's slice is a multiple of so many elements. NCCL wants 16 bytes, and the narrowest dtype has one byte."""


R = TypeVar("R", bound=int | None, covariant=True)


class HasRank(Protocol[R]):
    """What has a position along the shard axis of a mesh; None for all positions."""

    @property
    def rank(self) -> R: ...


@dataclass(frozen=True)
class Leaf:
    """A leaf: its dotted path, its shape, and the elements of a block. No rank boundary cuts a block.

    Blocks are counted from the leaf's start. The last block may be shorter. No step trains a frozen leaf.
    `is_embedding` is as in `fzero.base.embeddings`. The shape of a leaf with a `split` is that of one rank's part.

    Raises:
        FzeroError: for a block below 1 element.
    """

    path: str
    shape: tuple[int, ...]
    block: int = 1
    is_frozen: bool = False
    is_embedding: bool | None = field(default=None, compare=False)  # says nothing about where elements are
    split: Split | None = None

    def __post_init__(self) -> None:
        if self.block < 1:
            raise FzeroError(self.path, f"has blocks of {self.block} elements", "a block is at least 1 element")

    @property
    def numel(self) -> int:
        """The elements of the whole leaf."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """One bucket: leaves in order, flattened, concatenated, padded to `world * align` and cut into `world` slices.

    Leaves with blocks may need more padding, also between leaves. The padding is the smallest that keeps blocks whole
    and leaves in order. With `replicated`, every rank holds the whole bucket and there is no padding.

    A leaf begins at a multiple of `unit` elements of the bucket, and so does each rank's slice. So no rank boundary
    cuts `unit` elements of a leaf that are counted from the leaf's start.

    All leaves of a bucket are split over the same axes, or none is.
    """

    bucket: str
    leaves: tuple[Leaf, ...]
    mesh: VirtualMesh
    align: int = ALIGN
    replicated: bool = False
    unit: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.unit < 2**48:  # with more, sizes have more than 64 bits
            raise FzeroError(self.bucket, f"has units of {self.unit} elements", "a unit is at least 1 element")

    @property
    def world(self) -> int:
        """The number of ranks that the bucket is cut over: the size of the shard axis."""
        return self.mesh.size(self.shard_axis)

    @cached_property
    def shard_axis(self) -> str:
        """The axis that the bucket is cut over: that of the mesh, without axes that the leaves are split over."""
        axes = self.mesh.shard_axes
        return self.mesh.join(axis for axis in axes if axis not in self.split_axes)

    @cached_property
    def positions(self) -> tuple[int, ...] | None:
        """For each rank along the shard axis of the mesh its position along that of the bucket; None where these are
        one axis."""
        return None if self.shard_axis == self.mesh.shard_axis else _list_positions(self.mesh, self.shard_axis)

    def rank_of(self, on: HasRank[R]) -> R | int:
        """The position along the shard axis of the bucket that `on` has. None for all ranks together."""
        return on.rank if on.rank is None or self.positions is None else self.positions[on.rank]

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """The model axes that the leaves are split over."""
        return self.mesh.split(self.leaves[0].split.axis) if self.leaves and self.leaves[0].split else ()

    @cached_property
    def split_axis(self) -> str:
        """The name of these axes together, "" where there are none."""
        return self.mesh.join(self.split_axes) if self.split_axes else ""

    @property
    def splits(self) -> int:
        """The ranks that each leaf is split over."""
        return math.prod(map(self.mesh.size, self.split_axes))

    @cached_property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes of the mesh along which ranks hold the same."""
        return tuple(x for x in self.mesh.names if x not in (*self.mesh.split(self.shard_axis), *self.split_axes))

    def is_averaged_alone(self, replicas: bool = True) -> bool:
        """Whether a rank averages leaves with no other: it is the only one along the shard axis, and, with `replicas`,
        along the axes along which ranks hold the same."""
        axes = (self.shard_axis, *(self.replica_axes if replicas else ()))
        return all(self.mesh.size(axis) == 1 for axis in axes)

    @cached_property
    def cut_axes(self) -> str:
        """The name of the axes, together, along which ranks hold different elements."""
        return self.mesh.join((self.shard_axis, *self.split_axes))

    @cached_property
    def cut_positions(self) -> tuple[tuple[int, int], ...]:
        """For each rank along `cut_axes` its position along the shard axis, and that along the split axes."""
        axes = self.mesh.split(self.cut_axes)
        cut = VirtualMesh(**{axis: self.mesh.size(axis) for axis in axes})
        shard, split = self.shard_axis, self.split_axes
        return tuple(
            (cut.position(number, shard), cut.position(number, cut.join(split)) if split else 0)
            for number in range(cut.size())
        )

    def run_of(self, leaf: int) -> int:
        """The elements of a leaf that adjoin in the whole and lie in one part: the flattened whole has such a run for
        each rank along the split axes in turn. All elements of a leaf that is not split; 1 for a leaf without any."""
        shape, split = self.leaves[leaf].shape, self.leaves[leaf].split
        return max(1, math.prod(shape) if split is None else run_of(shape, *split[1:]))

    def range_in_part(self, leaf: int, position: int, elements: range) -> range:
        """The elements of a range of the whole leaf that the rank at a position along the split axes has, counted from
        the start of its part."""
        return range_in_part(self.run_of(leaf), self.splits, position, elements) if self.splits > 1 else elements

    def shape_of(self, leaf: int) -> tuple[int, ...]:
        """The shape of a leaf as a whole: of the parts of all ranks that it is split over."""
        (shape, split), splits = (self.leaves[leaf].shape, self.leaves[leaf].split), self.splits
        return shape if split is None else (*shape[: split.dim], shape[split.dim] * splits, *shape[split.dim + 1 :])

    @cached_property
    def numel(self) -> int:
        """The elements of all leaves, without padding."""
        return sum(leaf.numel for leaf in self.leaves)

    @cached_property
    def padded(self) -> int:
        """The elements of the bucket with padding: a multiple of `world * align`, unless the layout is replicated.

        Without blocks, the least such multiple that is at least `numel`.
        """
        return self.shard if self.replicated else self.shard * self.world

    @property
    def shard(self) -> int:
        """The elements that one rank holds, padding included."""
        return self._packing.shard

    @property
    def leaf_ranges(self) -> tuple[range, ...]:
        """The range of the bucket that each leaf takes, in order. Without gaps the ranges tile [0, numel)."""
        return self._packing.ranges

    @cached_property
    def has_gaps(self) -> bool:
        """Whether there is padding between leaves."""
        return self.leaf_ranges != tile(map(len, self.leaf_ranges))

    @cached_property
    def _packing(self) -> Packing:
        if self.replicated:
            return Packing(self.numel, tile(leaf.numel for leaf in self.leaves))
        unit = self.unit
        sizes = tuple((-(-leaf.numel // unit), math.lcm(leaf.block, unit) // unit) for leaf in self.leaves)
        shard, ranges = pack(sizes, self.world, self._align_in_units)
        starts = (unit * where.start for where in ranges)
        return Packing(unit * shard, tuple(range(at, at + leaf.numel) for at, leaf in zip(starts, self.leaves)))

    @property
    def _align_in_units(self) -> int:
        return self.align // math.gcd(self.align, self.unit)

    def coarsen(self, size: int, leaf: int | None = None) -> Layout:
        """The layout of one value for each `size` elements of every leaf, on the rank that holds these elements.

        `coarsen(size).part(leaf, rank)` is `part(leaf, rank)` in units of `size`, rounded up. The values of a split
        leaf whose runs are multiples of `size` are those of the whole leaf, split as the leaf is.

        Raises:
            FzeroError: where a rank boundary may cut `size` elements: where they are no part of a unit; with a `leaf`,
                whose values are wanted, where that one's parts cut them.
        """
        if leaf is not None and self.splits > 1 and (run := self.run_of(leaf)) % size:
            problem = f"is split over {self.split_axis!r} into runs of {run} elements, which cut blocks of {size}"
            way_out = (
                f"split it so that runs, such as a rank's part of a row, are multiples of {size}, or leave it whole"
            )
            raise FzeroError(self.leaves[leaf].path, problem, way_out)
        is_whole = self.replicated or self.world == 1
        if not is_whole and self.unit % size:
            problem = f"ranks may cut blocks of {size} elements: leaves lie at multiples of {self.unit}"
            raise FzeroError(self.leaves[0].path, problem, f"partition with fzero.partition(..., unit={size})")
        unit = 1 if is_whole else self.unit // size
        leaves = tuple(
            Leaf(
                leaf.path,
                (-(-leaf.numel // size),),
                1 if is_whole else math.lcm(leaf.block, self.unit) // size,
                split=self._coarsen_split(i, size),
            )
            for i, leaf in enumerate(self.leaves)
        )
        align = unit * self._align_in_units
        return Layout(f"{self.bucket}/{size}", leaves, self.mesh, align, self.replicated, unit)

    def _coarsen_split(self, leaf: int, size: int) -> Split | None:
        """How the values of a split leaf's elements are split: run by run."""
        split, run = self.leaves[leaf].split, self.run_of(leaf)
        return split and Split(split.axis, 0, 1 if run % size else max(1, self.leaves[leaf].numel // run))

    def is_like(self, other: Layout) -> bool:
        """Whether another layout has leaves of the same shapes in the same places, under any names."""
        return self._without_names == other._without_names

    @cached_property
    def _without_names(self) -> tuple[object, ...]:
        leaves = tuple(replace(leaf, path="") for leaf in self.leaves)
        return leaves, self.mesh, self.align, self.replicated, self.unit

    def rank_range(self, rank: int | None) -> range:
        """The range of the bucket that `rank` owns; all of it for None. Ranges of all ranks tile [0, padded).

        Every rank owns all of a replicated bucket.
        """
        return range(self.padded) if self.replicated or rank is None else shift(range(self.shard), rank * self.shard)

    def part(self, leaf: int, rank: int | None) -> range:
        """The elements of a leaf that `rank` owns, counted from the leaf's start. May be empty."""
        span = self.leaf_ranges[leaf]
        return shift(intersect(span, self.rank_range(rank)), -span.start)

    def slot(self, leaf: int, rank: int | None) -> range:
        """The place of this part in the rank's slice, counted from the slice's start."""
        mine = self.rank_range(rank)
        return shift(intersect(mine, self.leaf_ranges[leaf]), -mine.start)

    def representative_ranks(self, leaves: Iterable[int]) -> set[int]:
        """At least one rank for each run of consecutive ranks that hold as many elements of each leaf in equal places.

        The first rank of each run is among them, so rank 0 is. At most four ranks a leaf, whatever the world size: all
        ranks between the first and the last rank of a leaf hold a slice full of it.
        """
        ranks = {0}
        for where in (self.leaf_ranges[leaf] for leaf in leaves):
            if where and not self.replicated:
                first, last = where.start // self.shard, (where.stop - 1) // self.shard
                ranks |= {first, first + 1, last, last + 1}
        return {rank for rank in ranks if rank < self.world}

    @cached_property
    def _hash(self) -> int:
        return hash((self.bucket, self.leaves, self.mesh, self.align, self.replicated, self.unit))

    def __hash__(self) -> int:
        return self._hash


@cache
def _list_positions(mesh: VirtualMesh, axis: str) -> tuple[int, ...]:
    """For each rank along the shard axis of a mesh its position along some axes of that."""
    along = VirtualMesh(**{name: mesh.size(name) for name in mesh.shard_axes})
    return tuple(along.position(number, axis) for number in range(along.size()))


def layer_of(bucket: str) -> str:
    """The layer whose leaves are in a bucket: its name, without the dtype that follows where a layer has several, and
    without the axes that its leaves are split over."""
    return bucket.partition(":")[0]


def replicated_layout(shape: Sequence[int], mesh: VirtualMesh) -> Layout:
    """The layout of one value that every rank of a mesh holds whole."""
    return Layout("replicated", (Leaf("", tuple(shape)),), mesh, replicated=True)


def representative_ranks(layouts: Iterable[Layout]) -> list[int]:
    """One rank for each run of ranks along the mesh's shard axis whose slices have equal sizes in all of these layouts,
    in order."""
    found = {0}
    for layout in layouts:
        own = layout.representative_ranks(range(len(layout.leaves)))
        found |= own if layout.positions is None else {i for i, each in enumerate(layout.positions) if each in own}
    return sorted(found)
