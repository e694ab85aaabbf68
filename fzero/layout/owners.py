"""Owners: which rank computes with which whole matrix, and which elements move there and back. Integers only.

    slices    |-- rank 0 --|-- rank 1 --|-- rank 2 --|
    matrices  |---- q ----|---- k ----|----- v ------|
    owners          0           1            2          k: ranks 0 and 2 would send nothing, rank 1 holds all of it

A matrix is some rows of a whole leaf, so its elements adjoin in each part of a leaf that is split over model axes. The
ranks are then those along the shard axis and the split axes together. A matrix comes to its owner part by part.

A matrix that one rank holds whole stays on that rank. All other matrices go to the least loaded rank, the most work
first (Graham, Bounds on Multiprocessing Timing Anomalies, 1969). So no rank has more work than the larger of

* the work of the matrices that it holds whole,
* a rank's share of all work, plus the largest work of a matrix that moves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from fzero.base.errors import FzeroError
from fzero.layout.layout import Layout
from fzero.layout.ranges import intersect, shift, tile

Place = tuple[Layout, int]
"""A leaf: its layout, and its index there."""
Places = Sequence[Place]


class Matrix(NamedTuple):
    """Some rows of a leaf. `place` is the leaf's position among the given leaves, `part` the elements of the matrix,
    counted from the start of the whole leaf."""

    place: int
    part: range
    rows: int
    columns: int


class Piece(NamedTuple):
    """The elements of a matrix that one rank holds: `local` in the rank's slice of the leaf, `owned` in the owner's
    buffer, which has a matrix part by part; in a list of what a rank lends, counted from the matrix's start instead."""

    matrix: int
    place: int
    local: range
    owned: range


class Route(NamedTuple):
    """What one rank keeps, lends and borrows on the way to the owners. On the way back, pieces go the other way.

    `lent` and `borrowed` list, for each rank along the axis, the pieces that go to it and that come from it.
    """

    matrices: tuple[tuple[Matrix, range], ...]  # that the rank owns, and their places in its buffer
    kept: tuple[Piece, ...]
    lent: tuple[tuple[Piece, ...], ...]
    borrowed: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True, eq=False)
class Owners:
    """The owner of each matrix of some leaves, by `plan_owners`. None: every rank, for a leaf that all ranks hold."""

    places: tuple[Place, ...]
    matrices: tuple[Matrix, ...]
    costs: tuple[int, ...]
    owners: tuple[int | None, ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.places[0][0].cut_positions)

    @property
    def axis(self) -> str:
        """The axes, together, along which the ranks are."""
        return self.places[0][0].cut_axes

    @cached_property
    def costliest(self) -> int:
        """The cost of all matrices of the busiest rank."""
        return max(self._sum_by_rank(self.costs))

    @cached_property
    def largest(self) -> int:
        """The elements of all matrices of the rank that owns most elements."""
        return max(self._sum_by_rank([len(matrix.part) for matrix in self.matrices]))

    @cached_property
    def moving(self) -> int:
        """The elements that a rank has of its matrices, of what it sends and of what it receives, on the rank with most
        of them, beyond `largest`."""
        owned = self._sum_by_rank([len(matrix.part) for matrix in self.matrices])
        return max(map(sum, zip(owned, self._lent, self._borrowed))) - self.largest

    def find_scratch(self, size: int, scratch: Callable[[int, int], int]) -> int:
        """The bytes that a computation takes, one matrix after the other, beyond those of `largest` elements of `size`
        bytes: `scratch(rows, columns)` beside all matrices of a rank, on the rank with most."""
        total = self._sum_by_rank([size * len(matrix.part) for matrix in self.matrices])
        most = [0] * self.world
        for matrix, owner in zip(self.matrices, self.owners):
            for rank in range(self.world) if owner is None else [owner]:
                most[rank] = max(most[rank], scratch(matrix.rows, matrix.columns))
        return max(map(sum, zip(total, most))) - size * self.largest

    @cached_property
    def moved(self) -> int:
        """The elements that leave their rank on the way to the owners. As many move back."""
        return sum(self._lent)

    @cached_property
    def busiest(self) -> int:
        """The elements that the busiest rank sends, or receives, on the way to the owners or back."""
        return max(*self._lent, *self._borrowed)

    @cached_property
    def _lent(self) -> list[int]:
        """[N] the elements that each rank sends to owners."""
        held = [0] * self.world
        for layout, leaf in self.places:
            if not layout.replicated:
                for rank in _list_holders(layout, leaf, range(math.prod(layout.shape_of(leaf)))):
                    held[rank] += len(layout.part(leaf, layout.cut_positions[rank][0]))
        return [have - kept for have, kept in zip(held, self._kept)]

    @cached_property
    def _borrowed(self) -> list[int]:
        """[N] the elements that each rank receives as an owner."""
        owned = [0] * self.world
        for matrix, owner in zip(self.matrices, self.owners):
            if owner is not None:
                owned[owner] += len(matrix.part)
        return [have - kept for have, kept in zip(owned, self._kept)]

    @cached_property
    def _kept(self) -> list[int]:
        """[N] the elements of its own matrices that each rank holds."""
        kept = [0] * self.world
        for matrix, owner in zip(self.matrices, self.owners):
            if owner is not None:
                kept[owner] += len(self._part(matrix, owner))
        return kept

    def _sum_by_rank(self, values: Sequence[int]) -> list[int]:
        """[N] the sum of the values of each rank's matrices."""
        sums = [0] * self.world
        for value, owner in zip(values, self.owners):
            if owner is not None:
                sums[owner] += value
        everywhere = sum(value for value, owner in zip(values, self.owners) if owner is None)
        return [total + everywhere for total in sums]

    def _part(self, matrix: Matrix, rank: int) -> range:
        """The elements of a matrix that a rank holds, counted from the start of its part of the leaf."""
        layout, leaf = self.places[matrix.place]
        along, position = layout.cut_positions[rank]
        return intersect(layout.range_in_part(leaf, position, matrix.part), layout.part(leaf, along))

    def _list_own(self, rank: int) -> Iterator[tuple[int, range]]:
        """The matrices that a rank owns, as indices, and the places of their elements in its buffer."""
        mine = [i for i, owner in enumerate(self.owners) if owner in (rank, None)]
        return zip(mine, tile(len(self.matrices[i].part) for i in mine))

    @lru_cache  # noqa: B019  a program asks for three nodes, and plans live in a cache themselves
    def route(self, rank: int) -> Route:
        """What `rank` keeps, lends and borrows."""
        kept: list[Piece] = []
        lent: list[list[Piece]] = [[] for _ in range(self.world)]
        borrowed: list[list[Piece]] = [[] for _ in range(self.world)]
        mine = dict(self._list_own(rank))
        for index, at in mine.items():
            matrix = self.matrices[index]
            layout, leaf = self.places[matrix.place]
            for holder in [rank] if layout.replicated else _list_holders(layout, leaf, matrix.part):
                (kept if holder == rank else borrowed[holder]).append(self._piece(index, holder, at.start))
        for index, owner in enumerate(self.owners):
            if owner not in (rank, None) and self._part(self.matrices[index], rank):
                lent[owner].append(self._piece(index, rank, 0))
        own = tuple((self.matrices[index], at) for index, at in mine.items())
        return Route(own, tuple(kept), tuple(map(tuple, lent)), tuple(map(tuple, borrowed)))

    def _piece(self, index: int, holder: int, start: int) -> Piece:
        """The elements of a matrix that `holder` holds. The matrix begins at `start` of its owner's buffer."""
        matrix, part = self.matrices[index], self._part(self.matrices[index], holder)
        layout, leaf = self.places[matrix.place]
        along, position = layout.cut_positions[holder]
        parts = [layout.range_in_part(leaf, each, matrix.part) for each in range(position + 1)]
        owned = shift(part, start + sum(map(len, parts[:-1])) - parts[-1].start)
        return Piece(index, matrix.place, shift(part, -layout.part(leaf, along).start), owned)


@lru_cache(2**6)
def plan_owners(places: tuple[Place, ...], rows: tuple[int, ...], cost: Callable[[int, int], int]) -> Owners:
    """The owners of the matrices of these leaves, which are split over the same axes, balanced by
    `cost(rows, columns)`.

    `rows` lists the rows of each matrix, leaf by leaf.

    Raises:
        FzeroError: for rows that do not add up to those of the leaves.
    """
    matrices = tuple(_cut(places, rows))
    costs = tuple(cost(matrix.rows, matrix.columns) for matrix in matrices)
    cut = [i for i, matrix in enumerate(matrices) if not places[matrix.place][0].replicated]
    homes = [_find_home(*places[matrices[i].place], matrices[i].part) for i in cut]
    world = len(places[0][0].cut_positions)
    owners = dict(zip(cut, balance([costs[i] for i in cut], homes, world)))
    return Owners(places, matrices, costs, tuple(owners.get(i) for i in range(len(matrices))))


def balance(costs: Sequence[int], homes: Sequence[int | None], world: int) -> list[int]:
    """The rank of each item: its home, or the least loaded rank when its turn comes. Costly items come first."""
    loads, owners = [0] * world, list(homes)
    for cost, home in zip(costs, homes):
        if home is not None:
            loads[home] += cost
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if homes[i] is None:
            load, rank = heap[0]
            owners[i] = rank
            heapq.heapreplace(heap, (load + costs[i], rank))
    return [owner for owner in owners if owner is not None]


def _cut(places: Places, rows: Sequence[int]) -> Iterator[Matrix]:
    left = iter(rows)
    for position, (layout, leaf) in enumerate(places):
        path, shape = layout.leaves[leaf].path, layout.shape_of(leaf)
        end, total = 0, math.prod(shape[:-1]) if math.prod(shape) else 0
        while end < total:
            count = next(left, 0)
            if not 0 < count <= total - end:
                problem = f"a matrix of {count} rows is cut where {total - end} of {total} rows are left"
                raise FzeroError(path, problem, "give rows that add up to those of the leaf")
            yield Matrix(position, range(end * shape[-1], (end + count) * shape[-1]), count, shape[-1])
            end += count
    if next(left, None) is not None:
        raise FzeroError("owners", f"got {len(rows)} matrices, more than its leaves have", "give rows for each leaf")


def _find_home(layout: Layout, leaf: int, part: range) -> int | None:
    """The rank that holds all of these elements of a leaf; None where several do."""
    holders = _list_holders(layout, leaf, part)
    return holders[0] if len(holders) == 1 else None


def _list_holders(layout: Layout, leaf: int, part: range) -> Sequence[int]:
    """The ranks that hold some of these elements of a leaf that is cut over ranks."""
    parts = [layout.range_in_part(leaf, position, part) for position in range(layout.splits)]
    spans = [shift(each, layout.leaf_ranges[leaf].start) for each in parts]
    along = [range(at.start // layout.shard, (at.stop - 1) // layout.shard + 1) if at else range(0) for at in spans]
    if layout.splits == 1:
        return along[0]
    return [rank for rank, (row, position) in enumerate(layout.cut_positions) if row in along[position]]
