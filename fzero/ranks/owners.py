"""Exchanges with owners: slices of matrices come together on the rank that computes with the whole matrix, and go back.

slices --bring_to_owners--> whole matrices, flat --orthogonalize_matrices--> whole matrices --bring_back--> slices
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fzero.layout.owners import Owners, Piece
from fzero.optim.newton_schulz import NewtonSchulz
from fzero.ranks.exchanges import AllToAll, Steps


def bring_to_owners(slices: Sequence[Tensor], plan: Owners, rank: int, axis: str, dtype: torch.dtype) -> Steps:
    """The whole matrices that this rank owns, one behind the other, cast to `dtype`."""
    route, flats = plan.route(rank), [x.reshape(-1) for x in slices]
    owned = flats[0].new_empty(sum(len(at) for _, at in route.matrices), dtype=dtype)
    _copy([owned[piece.owned.start : piece.owned.stop] for piece in route.kept], _take_from_slices(flats, route.kept))
    if plan.moved:
        lent, borrowed = list(_chain(route.lent)), list(_chain(route.borrowed))
        sent = owned.new_empty(sum(len(piece.local) for piece in lent))
        _copy(sent.split([len(piece.local) for piece in lent]), _take_from_slices(flats, lent))
        splits = _count(route.lent), _count(route.borrowed)
        arrived = yield AllToAll("all_to_all of matrices to their owners", axis, sent, splits)
        _copy(_take_from_buffer(owned, borrowed), arrived.split([len(piece.owned) for piece in borrowed]))
    return owned


def orthogonalize_matrices(owned: Tensor, plan: Owners, rank: int, how: NewtonSchulz) -> Tensor:
    """The matrices that this rank owns, orthogonalized: a new tensor."""
    made = torch.empty_like(owned)
    for matrix, at in plan.route(rank).matrices:
        shape, where = (matrix.rows, matrix.columns), slice(at.start, at.stop)
        made[where].view(shape).copy_(how.apply(owned[where].view(shape)))
    return made


def bring_back(
    owned: Tensor,
    plan: Owners,
    rank: int,
    axis: str,
    scales: Sequence[float],
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
) -> Steps:
    """This rank's slices, of these sizes and dtypes, of the matrices on all owners, each matrix times its scale."""
    route = plan.route(rank)
    slices = [owned.new_empty(size, dtype=dtype) for size, dtype in zip(sizes, dtypes)]
    _copy(_take_from_slices(slices, route.kept), _take_from_buffer(owned, route.kept))
    pieces = list(route.kept)
    if plan.moved:
        lent, borrowed = list(_chain(route.lent)), list(_chain(route.borrowed))
        sent = owned.new_empty(sum(len(piece.owned) for piece in borrowed))
        _copy(sent.split([len(piece.owned) for piece in borrowed]), _take_from_buffer(owned, borrowed))
        splits = _count(route.borrowed), _count(route.lent)
        arrived = yield AllToAll("all_to_all of matrices from their owners", axis, sent, splits)
        _copy(_take_from_slices(slices, lent), arrived.split([len(piece.local) for piece in lent]))
        pieces += lent
    for piece, here in zip(pieces, _take_from_slices(slices, pieces)):
        here.mul_(scales[piece.matrix])  # torch's in-place product of a list rounds the number to a narrow dtype first
    return slices


def _take_from_slices(slices: Sequence[Tensor], pieces: Iterable[Piece]) -> list[Tensor]:
    """The pieces in the slices of the rank that holds them: views."""
    return [slices[piece.place][piece.local.start : piece.local.stop] for piece in pieces]


def _take_from_buffer(owned: Tensor, pieces: Iterable[Piece]) -> list[Tensor]:
    """The pieces in the buffer of their owner: views."""
    return [owned[piece.owned.start : piece.owned.stop] for piece in pieces]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _chain(pieces: Sequence[Sequence[Piece]]) -> Iterable[Piece]:
    return itertools.chain.from_iterable(pieces)


def _count(pieces: Sequence[Sequence[Piece]]) -> list[int]:
    """For each rank, the elements of its pieces."""
    return [sum(len(piece.owned) for piece in each) for each in pieces]
