"""Store: memory of tensors that is whole while a constructor works on it, and else cut over the ranks of a mesh.

    blank ---write--> whole ---cut--> pieces ---join--> whole
                       |- - - -|      |-0-|-1-|          |- - - -|

All ranks do the same with the same allocations in the same order. So a cut needs no communication: every rank keeps its
own piece. A join is one all-gather. On a `VirtualMesh` this process has all pieces, and a join concatenates them.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from fzero.base.dtypes import name_dtype
from fzero.base.errors import FzeroError
from fzero.base.placement import Disk
from fzero.files import allocate
from fzero.files.memory import new_buffer
from fzero.layout.ranges import intersect, pad
from fzero.ranks.ranks import Ranks

ALIGN = 16
"""A piece is a multiple of this number of bytes: the size of the widest element, so that no cut splits an element."""


class Allocation:
    """The memory of one tensor and its views, as bytes, in one of three states:

    * blank: nothing was written yet, and neither `flat` nor `pieces` is set;
    * whole: `flat` has all bytes;
    * cut: `pieces` has the pieces that this process keeps, one on a rank, all of them on a virtual mesh.
    """

    __slots__ = ("__weakref__", "device", "flat", "nbytes", "number", "pieces", "store")

    def __init__(self, store: Store, nbytes: int, device: torch.device, flat: Tensor | None = None) -> None:
        self.store, self.nbytes, self.device = store, nbytes, device
        self.flat, self.number = flat, next(store.numbers)
        self.pieces: list[Tensor] | None = None

    @property
    def stride(self) -> int:
        """Bytes of a piece."""
        world = self.store.world
        return self.nbytes if world == 1 else pad(-(-self.nbytes // world), ALIGN)


class Store:
    """The allocations of one construction on a mesh. Pieces lie on the mesh's device, or on a disk with a `place`."""

    def __init__(self, on: Ranks, place: Disk | None = None) -> None:
        self.on, self.place = on, place
        self.world: int = on.mesh.size(on.mesh.shard_axis)
        self.ranks = range(self.world) if on.rank is None else range(on.rank, on.rank + 1)
        self.allocations: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self._whole: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self.is_closed = False
        # by which ranks notice that they gather other allocations
        self.numbers, self._number = itertools.count(), on.count_agreements()

    def blank(self, nbytes: int, device: torch.device) -> Allocation:
        """A new blank allocation. It takes no memory until it is written."""
        allocation = Allocation(self, nbytes, device)
        self.allocations.add(allocation)
        return allocation

    def adopt(self, tensor: Tensor) -> Allocation:
        """A new allocation that takes over the memory of `tensor`. Nobody else may have a view of this memory."""
        allocation = Allocation(self, tensor.untyped_storage().nbytes(), tensor.device, _view_bytes(tensor))
        self.allocations.add(allocation)
        self._whole.add(allocation)
        return allocation

    def bring(self, wanted: Collection[Allocation], overwritten: Allocation | None = None) -> None:
        """Cut all other allocations, then make the wanted ones whole. The old bytes of `overwritten` are dropped, not
        gathered. Collective."""
        for allocation in list(self._whole):
            if allocation not in wanted:
                self.cut(allocation)
        self._whole.update(wanted)
        for allocation in wanted:
            nbytes, device, pieces = allocation.nbytes, allocation.device, allocation.pieces
            if allocation.flat is not None:
                continue
            if allocation is overwritten:
                allocation.pieces, allocation.flat = None, new_buffer(nbytes, torch.uint8, device)
            elif pieces is not None:
                allocation.flat, allocation.pieces = self._gather(allocation, pieces)[:nbytes].to(device), None
            else:
                allocation.flat = new_buffer(nbytes, torch.uint8, device).zero_()

    def cut(self, allocation: Allocation) -> None:
        """Keep only this process's pieces of a whole allocation."""
        if allocation.flat is None:
            return
        device = self.on.choose_device(allocation.device)
        if self.world == 1 and self.place is None:
            allocation.pieces = [allocation.flat.to(device)]
        else:
            allocation.pieces = [
                self._cut_piece(allocation.flat, self._bytes_of(allocation, rank), allocation.stride, device)
                for rank in self.ranks
            ]
        allocation.flat = None
        self._whole.discard(allocation)

    def replace(self, allocation: Allocation, flat: Tensor) -> None:
        """Take over `flat` as all bytes of an allocation, and keep this process's pieces of it."""
        allocation.pieces, allocation.flat = None, flat
        self.cut(allocation)

    def duplicate(self, allocation: Allocation, onto: Allocation | None = None) -> Allocation:
        """`onto`, or a new allocation, with the bytes of `allocation`. Pieces are copied; nothing is gathered."""
        if onto is None:
            onto = self.blank(allocation.nbytes, allocation.device)
        self.cut(allocation)
        onto.flat = None
        self._whole.discard(onto)
        onto.pieces = None if allocation.pieces is None else list(map(_copy, allocation.pieces))
        return onto

    def spans(self, allocation: Allocation, wanted: range, chunk: int) -> Iterator[tuple[range, Tensor]]:
        """Yield the bytes of a range of an allocation as `(range, bytes)`, in any order, `chunk` bytes at a time.
        Collective: every rank iterates to the end, each with a range of its own. A blank allocation yields nothing."""
        self.cut(allocation)
        if allocation.pieces is None:
            return
        size = max(chunk // self.world // ALIGN * ALIGN, ALIGN)
        for begin in range(0, allocation.stride, size):
            columns = self._gather(allocation, [piece[begin : begin + size] for piece in allocation.pieces])
            for rank in range(self.world):
                width = columns.numel() // self.world
                first = rank * allocation.stride + begin
                found = intersect(range(first, min(first + width, allocation.nbytes)), wanted)
                if found:
                    at = rank * width + found.start - first
                    yield found, columns[at : at + len(found)]
            del columns  # freed before the next chunk is gathered

    def release(self, allocation: Allocation) -> None:
        """Free the memory of an allocation."""
        allocation.flat = allocation.pieces = None
        self.allocations.discard(allocation)
        self._whole.discard(allocation)

    def close(self) -> None:
        """Free the memory of every allocation."""
        for allocation in list(self.allocations):
            self.release(allocation)
        self.is_closed = True

    def _bytes_of(self, allocation: Allocation, rank: int) -> range:
        start = min(rank * allocation.stride, allocation.nbytes)
        return range(start, min(start + allocation.stride, allocation.nbytes))

    def _gather(self, allocation: Allocation, pieces: list[Tensor]) -> Tensor:
        """[N * S] the pieces of all ranks, in rank order."""
        where = f"{pieces[0].nbytes} bytes a rank of tensor {allocation.number} of construction {self._number}"
        return self.on.gather_pieces(pieces, "gather of a parameter in fzero.build", where)

    def _cut_piece(self, flat: Tensor, part: range, stride: int, device: torch.device) -> Tensor:
        # Not a view: a view would keep all of `flat` in memory.
        if self.place is None:
            piece = torch.zeros(stride, dtype=torch.uint8, device=device)
        else:
            piece = allocate(self.place, torch.uint8, stride, self.on.rank, "under-construction")
            piece[len(part) :].zero_()
        piece[: len(part)].copy_(flat[part.start : part.stop])
        return piece


def _copy(piece: Tensor) -> Tensor:
    """A copy of a piece, on the same device or disk."""
    return torch.empty_like(piece).copy_(piece)


def _view_bytes(tensor: Tensor) -> Tensor:
    """All of a tensor's memory, as 1-d bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def closed_error(shape: torch.Size, dtype: torch.dtype) -> FzeroError:
    """The error for a use of a tensor after its construction ended."""
    name = f"{name_dtype(dtype)}{list(shape)}"
    return FzeroError(
        "fzero.build",
        f"this {name} is of a module that was built already, and is cut over the ranks",
        "use the params and apply that build returned; keep no module or tensor of the constructor",
    )
