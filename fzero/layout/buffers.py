"""Buffers: leaves and slices into the flat memory that a collective moves, and out again; views where possible.

slices --block_of--> [S] --all_gather--> [N * S] --join_leaf--> leaf
leaves --blocks_of--> [N * S] --reduce_scatter--> [S] --slice_of--> slice
leaves --blocks_of--> [N * S] --leaves_of--> leaves

N ranks, S elements a block (`Wire.stride`). A partial wire is scattered without its padding, through `flat_parts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.layout.wires import Wire

FILLS: ContextVar[bool] = ContextVar("FILLS", default=False)
"""Whether gaps and padding get a small number instead of zeros: a `_PART` of the smallest magnitude that is packed.

No result may depend on what lies there, so `fzero.testing` runs steps both ways. The largest magnitudes of a block stay
the same, and a scale by them, also where a rank adds up what it did not send in a few steps. A sum, a mean or a norm
that counts padding changes. Leaves of one number each get zeros: they may be a mask of what is no padding.
"""
_PART = 1 / 16


def block_of(slices: Sequence[Tensor], wire: Wire, rank: int, dtype: torch.dtype | None = None) -> Tensor:
    """[S] the block of `rank`: a view where the slices lie as a block already, else a copy, in `dtype` if given.

    Raises:
        FzeroError: for other slices than those of the rank, by their numbers of elements.
    """
    _check(wire, f"slices of rank {rank}", slices, [len(at) for at in wire.block(rank)])
    view = None if dtype else view_of(slices, wire, rank)
    return fill_block(slices[0].new_empty(wire.stride, dtype=dtype), slices, wire, rank) if view is None else view


def view_of(slices: Sequence[Tensor], wire: Wire, rank: int) -> Tensor | None:
    """[S] the block of `rank` as a view of the slices' memory, or None where the slices do not lie as a block.

    The slices lie as a block if they are contiguous, in one memory, apart by just the gaps of the wire, and if the
    memory reaches as far as the block. What lies in gaps and padding is part of the view.
    """
    filled = [(x, at) for x, at in zip(slices, wire.block(rank)) if x.numel()]
    if not filled or FILLS.get():
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


def fill_block(block: Tensor, slices: Sequence[Tensor], wire: Wire, rank: int) -> Tensor:
    """Copy the slices of `rank` into its block [S], cast to the block's dtype, with zeros between. Return the block."""
    where = wire.block(rank)
    _fill_between(block, where, _choose_filler(slices))
    torch._foreach_copy_([block[at.start : at.stop] for at in where], list(slices))
    return block


def join_leaf(buffer: Tensor, wire: Wire, position: int, shape: Sequence[int]) -> Tensor:
    """The leaf at `position` of the wire, in its shape, out of a gathered buffer [N * S]: a view if it is one piece."""
    pieces = [buffer[piece.start : piece.stop] for piece in wire.pieces(position)]
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else buffer[:0]
    return flat.view(shape)


def blocks_of(fulls: Sequence[Tensor], wire: Wire) -> Tensor:
    """[N * S] every rank's block of these leaves, which are given in full. A view for a bucket of one unpadded leaf.

    Raises:
        FzeroError: for other leaves than those of the wire, by their numbers of elements.
    """
    _check(wire, "whole leaves", fulls, [wire.layout.leaves[leaf].numel for leaf in wire.leaves])
    flats = [full.reshape(-1) for full in fulls]
    if wire.is_complete:
        alone = len(flats) == 1 and flats[0].numel() == wire.numel
        return flats[0] if alone else _concatenate(flats, wire.layout.leaf_ranges, wire.numel)
    blocks = [
        _concatenate(parts_of(flats, wire, rank), wire.block(rank), wire.stride) for rank in range(wire.layout.world)
    ]
    return torch.cat(blocks)


def _check(wire: Wire, what: str, given: Sequence[Tensor], expected: list[int]) -> None:
    """Refuse tensors of other sizes: a zip of them would leave elements out, a copy would repeat them."""
    sizes = [x.numel() for x in given]
    if sizes != expected:
        way_out = f"give the {what} that its wire names, in its order"
        raise FzeroError(wire.layout.bucket, f"was given {what} of {sizes} elements for {expected}", way_out)


def leaves_of(buffer: Tensor, wire: Wire) -> list[Tensor]:
    """The leaves of a buffer [N * S] of every rank's blocks, in their shapes: the inverse of `blocks_of`. Views where a
    leaf is one piece.

    Raises:
        FzeroError: for a buffer of another size.
    """
    _check(wire, "buffers", [buffer], [wire.numel])
    shapes = [wire.layout.leaves[leaf].shape for leaf in wire.leaves]
    return [join_leaf(buffer, wire, position, shape) for position, shape in enumerate(shapes)]


def padding_of(wire: Wire, device: torch.device | str | None = None) -> Tensor:
    """[N * S] which elements of a buffer of every rank's blocks are padding, and none of a leaf."""
    mask = torch.ones(wire.numel, dtype=torch.bool, device=device)
    for position in range(len(wire.leaves)):
        for piece in wire.pieces(position):
            mask[piece.start : piece.stop] = False
    return mask


def flat_parts(fulls: Sequence[Tensor], wire: Wire) -> list[Tensor]:
    """For each rank, its parts of these leaves in one flat tensor, without padding: a view for a wire of one leaf."""
    flats = [flatten(full) for full in fulls]
    rows = [parts_of(flats, wire, rank) for rank in range(wire.layout.world)]
    return [row[0] if len(row) == 1 else torch.cat(row) for row in rows]


def slice_of(block: Tensor | list[Tensor], wire: Wire, rank: int, position: int) -> Tensor:
    """The rank's slice of the leaf at `position` of the wire, out of the rank's block [S]: a view. Of a list of slices
    the one at `position`."""
    if isinstance(block, list):
        return block[position]
    where = wire.block(rank)[position]
    return block[where.start : where.stop]


def flatten(full: Tensor) -> Tensor:
    """[numel] all elements in order, contiguous: a view where the tensor is contiguous, else a copy."""
    return full.reshape(-1).contiguous()


def parts_of(flats: Sequence[Tensor], wire: Wire, rank: int) -> list[Tensor]:
    """The elements of these flattened leaves that `rank` owns: views."""
    return [flat[part.start : part.stop] for flat, part in zip(flats, wire.parts(rank))]


def slots_of(block: Tensor, wire: Wire, rank: int) -> list[Tensor]:
    """The places of those elements in the rank's block [S]: views."""
    return [block[at.start : at.stop] for at in wire.block(rank)]


def new_block(wire: Wire, rank: int, like: Tensor) -> Tensor:
    """[S] a new block of `rank`, of the dtype and device of `like`: zeros in gaps and padding, else uninitialized."""
    block = like.new_empty(wire.stride)
    _fill_between(block, wire.block(rank), 0)
    return block


def _choose_filler(packed: Sequence[Tensor]) -> float:
    """What lies in gaps and padding: 0, or with `FILLS` a part of the smallest magnitude above 0 of what is packed."""
    if not FILLS.get() or not any(x.is_floating_point() and (x != x.reshape(-1)[:1]).any() for x in packed):
        return 0
    magnitudes = torch.cat([x.reshape(-1).abs() for x in packed])
    return magnitudes[magnitudes > 0].min().item() * _PART if (magnitudes > 0).any() else 0


def _fill_between(block: Tensor, where: Sequence[range], filler: float) -> None:
    """Write a number to the elements of the block that are in none of these ranges, which are in order."""
    end = 0
    for at in (*where, range(block.numel(), block.numel())):
        if at.start > end:
            block[end : at.start].fill_(filler)
        end = max(end, at.stop)


def _concatenate(flats: Sequence[Tensor], where: Sequence[range], size: int) -> Tensor:
    """[size] a new buffer with each of `flats` at its range of `where`, in order, and a filler elsewhere."""
    pieces, end, filler = [], 0, _choose_filler(flats)
    for flat, at in zip(flats, where):
        pieces += [flat.new_full((at.start - end,), filler), flat] if at.start > end else [flat]
        end = at.stop
    return torch.cat([*pieces, flats[0].new_full((size - end,), filler)]) if size > end else torch.cat(pieces)
