"""Parts: which rows of a global batch a rank takes, and the order of examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import FzeroError, VirtualMesh
from fzero.base.mesh import devices_of, mesh_shape
from fzero.data.position import mix


class BatchPlace(NamedTuple):
    """Where one batch lies in an epoch: examples from `begin` to `stop`, over all ranks.

    Of the rows that this rank takes the first `valid` are data. `is_last`: the epoch has no further batch.
    """

    begin: int
    stop: int
    valid: int
    is_last: bool


def find_part(batch: int, mesh: Any, data: Sequence[str] | None) -> range:
    """The rows of a global batch that this rank takes: part `r` of `n` in order, for rank `r` of `n` along the data
    axes. Ranks along other axes take the same rows. On a `VirtualMesh` the rows of all ranks.

    Raises:
        FzeroError: for a batch that does not divide by the ranks; for a mesh without this rank.
    """
    shape = mesh_shape(mesh)
    axes = shape.data_axes(data)
    ranks = [shape.size(axis) for axis in axes]
    total = torch.Size(ranks).numel()
    if not isinstance(batch, int) or batch < 1 or batch % total:
        problem = f"is {batch!r}, which does not divide by {total} ranks along {axes}"
        raise FzeroError("batch", problem, f"give the number of examples of all ranks, a multiple of {total}")
    if isinstance(mesh, VirtualMesh):
        return range(batch)
    coordinate = devices_of(mesh).get_coordinate()
    if coordinate is None:
        raise FzeroError("mesh", "does not have this rank", "make the loader on the ranks of its mesh")
    number = 0
    for axis, size in zip(axes, ranks):
        number = number * size + coordinate[shape.names.index(axis)]
    rows = batch // total
    return range(number * rows, (number + 1) * rows)


def order(seed: int, epoch: int, length: int) -> Tensor:
    """The examples of an epoch in order, `[length]`: a permutation by `seed` and `epoch`. A negative seed keeps the
    dataset's order."""
    if seed < 0:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(mix("order", seed, epoch)))


def list_places(length: int, start: int, batch: int, part: range, drop_last: bool) -> Iterator[BatchPlace]:
    """The place of each batch of an epoch of `length` examples, from example `start` on."""
    end = start + (length - start) // batch * batch if drop_last else length
    for begin in range(start, end, batch):
        stop = min(begin + batch, length)
        yield BatchPlace(begin, stop, len(range(part.start, min(part.stop, stop - begin))), stop == end)


def find_indices(order: Tensor, place: BatchPlace, part: range) -> list[int]:
    """The examples in this rank's rows of a batch. Rows that are no data have the batch's first example, for padding
    to take the shapes of."""
    first = place.begin + part.start
    mine = order[first : first + place.valid].tolist()
    missing = len(part) - len(mine)
    return mine + [int(order[place.begin])] * missing if missing else mine
