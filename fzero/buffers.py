"""Buffers: leaves and slices into the flat memory that a collective moves and out again, as views where they can be.

slices --block_of--> [S] --all_gather--> [N * S] --whole--> leaf
leaves --blocks_of--> [N * S] --reduce_scatter--> [S] --part--> slice
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.layout import Wire


def block_of(slices: Sequence[Tensor], wire: Wire) -> Tensor:
    """[S] this rank's block: the slices in order, then padding. A view where they adjoin in memory that reaches S."""
    return _adjoining(slices, wire.stride) if _adjoin(slices, wire.stride) else _packed(slices, wire.stride)


def whole(buffer: Tensor, wire: Wire, position: int, shape: Sequence[int]) -> Tensor:
    """The leaf at `position`, in its shape: a view where its pieces adjoin in `buffer` [N * S]."""
    pieces = [buffer[piece.start : piece.stop] for piece in wire.pieces(position)]
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else buffer[:0]
    return flat.view(shape)


def blocks_of(fulls: Sequence[Tensor], wire: Wire) -> Tensor:
    """[N * S] every rank's block of these leaves, which are given in full."""
    flats = [full.reshape(-1) for full in fulls]
    if len(wire.leaves) == len(wire.layout.leaves):
        return flats[0] if len(flats) == 1 and flats[0].numel() == wire.numel else _packed(flats, wire.numel)
    blocks = [
        _packed([flat[part.start : part.stop] for flat, part in zip(flats, wire.parts(rank))], wire.stride)
        for rank in range(wire.layout.world)
    ]
    return torch.cat(blocks)


def part(block: Tensor, wire: Wire, rank: int, position: int) -> Tensor:
    """The slice of the leaf at `position` in this rank's block [S]: a view."""
    where = wire.block(rank)[position]
    return block[where.start : where.stop]


def _packed(flats: Sequence[Tensor], size: int) -> Tensor:
    """[size] a new buffer: `flats` one after the other, then zeros."""
    spare = size - sum(flat.numel() for flat in flats)
    return torch.cat([*flats, flats[0].new_zeros(spare)]) if spare else torch.cat(list(flats))


def _adjoin(slices: Sequence[Tensor], size: int) -> bool:
    """Whether the slices lie one after the other in one storage, which holds `size` elements from the first one on."""
    filled = [x for x in slices if x.numel()]
    if not filled:
        return False
    first = filled[0]
    storage, position = first.untyped_storage(), first.storage_offset()
    if (position + size) * first.element_size() > storage.nbytes():
        return False
    for x in filled:
        if x.storage_offset() != position or x.untyped_storage().data_ptr() != storage.data_ptr():
            return False
        if not x.is_contiguous():
            return False
        position += x.numel()
    return True


def _adjoining(slices: Sequence[Tensor], size: int) -> Tensor:
    first = next(x for x in slices if x.numel())
    return first.as_strided((size,), (1,))
