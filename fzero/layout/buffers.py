"""Buffers: leaves and slices into the flat memory that a collective moves and out again, as views where they can be.

slices --block_of--> [S] --all_gather--> [N * S] --whole--> leaf
leaves --blocks_of--> [N * S] --reduce_scatter--> [S] --part--> slice
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fzero.layout.layout import Wire


def block_of(slices: Sequence[Tensor], wire: Wire, rank: int, dtype: torch.dtype | None = None) -> Tensor:
    """[S] the block of `rank`: where its slices lie, or a copy where they do not adjoin or are cast to a `dtype`."""
    view = None if dtype else view_of(slices, wire, rank)
    return fill(slices[0].new_empty(wire.stride, dtype=dtype), slices, wire, rank) if view is None else view


def view_of(slices: Sequence[Tensor], wire: Wire, rank: int) -> Tensor | None:
    """[S] the block of `rank` where its slices lie: they in order, then padding, and gaps as the wire has them. None
    where they do not lie so, or their memory ends before S."""
    filled = [(x, at) for x, at in zip(slices, wire.block(rank)) if x.numel()]
    if not filled:
        return None
    first, at = filled[0]
    storage, start = first.untyped_storage(), first.storage_offset() - at.start
    if start < 0 or (start + wire.stride) * first.element_size() > storage.nbytes():
        return None
    for x, at in filled:
        if x.storage_offset() != start + at.start or x.untyped_storage().data_ptr() != storage.data_ptr():
            return None
        if not x.is_contiguous():
            return None
    return first.as_strided((wire.stride,), (1,), start)


def fill(block: Tensor, slices: Sequence[Tensor], wire: Wire, rank: int) -> Tensor:
    """The block [S] of `rank`, with the slices copied into it, cast to its dtype, and zeros where none lies."""
    where = wire.block(rank)
    _clear_between(block, where)
    torch._foreach_copy_([block[at.start : at.stop] for at in where], list(slices))
    return block


def whole(buffer: Tensor, wire: Wire, position: int, shape: Sequence[int]) -> Tensor:
    """The leaf at `position`, in its shape: a view where its pieces adjoin in `buffer` [N * S]."""
    pieces = [buffer[piece.start : piece.stop] for piece in wire.pieces(position)]
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else buffer[:0]
    return flat.view(shape)


def blocks_of(fulls: Sequence[Tensor], wire: Wire) -> Tensor:
    """[N * S] every rank's block of these leaves, which are given in full."""
    flats = [full.reshape(-1) for full in fulls]
    if wire.is_complete:
        alone = len(flats) == 1 and flats[0].numel() == wire.numel
        return flats[0] if alone else _packed(flats, wire.layout.leaf_ranges, wire.numel)
    blocks = [
        _packed([flat[part.start : part.stop] for flat, part in zip(flats, wire.parts(r))], wire.block(r), wire.stride)
        for r in range(wire.layout.world)
    ]
    return torch.cat(blocks)


def part(block: Tensor, wire: Wire, rank: int, position: int) -> Tensor:
    """The slice of the leaf at `position` in this rank's block [S]: a view."""
    where = wire.block(rank)[position]
    return block[where.start : where.stop]


def flat(full: Tensor) -> Tensor:
    """[numel] all elements in order in one piece of memory: a view where they lie so."""
    return full.reshape(-1).contiguous()


def parts_of(flats: Sequence[Tensor], wire: Wire, rank: int) -> list[Tensor]:
    """What `rank` owns of these flattened leaves: views."""
    return [flat[part.start : part.stop] for flat, part in zip(flats, wire.parts(rank))]


def slots(block: Tensor, wire: Wire, rank: int) -> list[Tensor]:
    """Where that lies in the rank's block [S]: views."""
    return [block[at.start : at.stop] for at in wire.block(rank)]


def room(wire: Wire, rank: int, like: Tensor) -> Tensor:
    """[S] a new block of a rank: zeros where no leaf lies, of any values elsewhere."""
    block = like.new_empty(wire.stride)
    _clear_between(block, wire.block(rank))
    return block


def _clear_between(block: Tensor, where: Sequence[range]) -> None:
    """Zeros wherever in the block none of these places is."""
    end = 0
    for at in (*where, range(block.numel(), block.numel())):
        if at.start > end:
            block[end : at.start].zero_()
        end = max(end, at.stop)


def _packed(flats: Sequence[Tensor], where: Sequence[range], size: int) -> Tensor:
    """[size] a new buffer: each of `flats`, in order, where it is to lie, and zeros elsewhere."""
    pieces, end = [], 0
    for flat, at in zip(flats, where):
        pieces += [flat.new_zeros(at.start - end), flat] if at.start > end else [flat]
        end = at.stop
    return torch.cat([*pieces, flats[0].new_zeros(size - end)]) if size > end else torch.cat(pieces)
