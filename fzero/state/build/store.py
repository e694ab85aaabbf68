"""The store: tensors that are in memory whole while they are worked on, and else cut over the ranks of a mesh.

    blank ---write--> whole ---cut--> held ---join--> whole
                       |- - - -|      |-0-|-1-|        |- - - -|

Ranks do the same with the same entries in the same order. So a cut needs no communication, every rank keeps its piece,
and a join is one all-gather. On a `VirtualMesh` all pieces are here, and a join only puts them together again.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.layout.ranges import intersect, pad

ALIGN = 16
"""Bytes that a piece is a multiple of: those of the widest element, so that no cut goes through one."""
CHUNK = 4 << 20
"""Bytes that are on their way at once when parts are read, unless the user says otherwise."""


class Entry:
    """The memory of one tensor and its views, in bytes. Blank, before anything was written; whole, where `flat` has
    them; or held, where `pieces` has those that this process keeps: one on a rank, all on a virtual mesh."""

    __slots__ = ("__weakref__", "device", "flat", "nbytes", "pieces", "store")

    def __init__(self, store: Store, nbytes: int, device: torch.device, flat: Tensor | None = None) -> None:
        self.store, self.nbytes, self.device = store, nbytes, device
        self.flat = flat
        self.pieces: list[Tensor] | None = None

    @property
    def stride(self) -> int:
        """Bytes of a piece."""
        world = self.store.world
        return self.nbytes if world == 1 else pad(-(-self.nbytes // world), ALIGN)


class Store:
    """The entries of one construction on a mesh. `on` is a `Live` or a `Virtual`."""

    def __init__(self, on: Any) -> None:
        self.on = on
        self.world: int = on.mesh.size(on.mesh.shard_axis)
        self.ranks = range(self.world) if on.rank is None else range(on.rank, on.rank + 1)
        self.entries: weakref.WeakSet[Entry] = weakref.WeakSet()
        self._whole: weakref.WeakSet[Entry] = weakref.WeakSet()
        self.is_closed = False

    def blank(self, nbytes: int, device: torch.device) -> Entry:
        """A new entry that takes no memory before it is written."""
        entry = Entry(self, nbytes, device)
        self.entries.add(entry)
        return entry

    def adopt(self, tensor: Tensor) -> Entry:
        """A new entry of the memory that `tensor`, which nobody else has, lies in."""
        entry = Entry(self, tensor.untyped_storage().nbytes(), tensor.device, _bytes(tensor))
        self.entries.add(entry)
        self._whole.add(entry)
        return entry

    def bring(self, wanted: Collection[Entry], overwritten: Entry | None = None) -> None:
        """Make these entries whole, after cutting all others. What `overwritten` held is given up. Collective."""
        for entry in list(self._whole):
            if entry not in wanted:
                self.cut(entry)
        self._whole.update(wanted)
        for entry in wanted:
            if entry is overwritten and entry.flat is None:
                entry.pieces, entry.flat = None, torch.empty(entry.nbytes, dtype=torch.uint8, device=entry.device)
            elif entry.pieces is not None:
                entry.flat, entry.pieces = self._gathered(entry.pieces)[: entry.nbytes].to(entry.device), None
            elif entry.flat is None:
                entry.flat = torch.zeros(entry.nbytes, dtype=torch.uint8, device=entry.device)

    def cut(self, entry: Entry) -> None:
        """Keep only this process's pieces of an entry, on the mesh's device."""
        if entry.flat is None:
            return
        device = self.on.device or entry.device
        if self.world == 1:
            entry.pieces = [entry.flat.to(device)]
        else:
            entry.pieces = [
                _piece(entry.flat, self._bytes_of(entry, rank), entry.stride, device) for rank in self.ranks
            ]
        entry.flat = None
        self._whole.discard(entry)

    def duplicate(self, entry: Entry, onto: Entry | None = None) -> Entry:
        """`onto`, or a new entry, with the bytes of `entry`: copied piece by piece, never whole."""
        if onto is None:
            onto = self.blank(entry.nbytes, entry.device)
        self.cut(entry)
        onto.flat = None
        self._whole.discard(onto)
        onto.pieces = None if entry.pieces is None else [piece.clone() for piece in entry.pieces]
        return onto

    def spans(self, entry: Entry, wanted: range, chunk: int) -> Iterator[tuple[range, Tensor]]:
        """The bytes of a range of an entry as `(range, bytes)`, in any order, `chunk` bytes at a time. Collective: all
        ranks iterate to the end, each for a range of its own."""
        self.cut(entry)
        if entry.pieces is None:
            return
        size = max(chunk // self.world // ALIGN * ALIGN, ALIGN)
        for begin in range(0, entry.stride, size):
            columns = self._gathered([piece[begin : begin + size] for piece in entry.pieces])
            for rank in range(self.world):
                width = columns.numel() // self.world
                first = rank * entry.stride + begin
                found = intersect(range(first, min(first + width, entry.nbytes)), wanted)
                if found:
                    at = rank * width + found.start - first
                    yield found, columns[at : at + len(found)]
            del columns  # before the next ones come

    def release(self, entry: Entry) -> None:
        """Give up what an entry has."""
        entry.flat = entry.pieces = None
        self.entries.discard(entry)
        self._whole.discard(entry)

    def close(self) -> None:
        """Give up everything."""
        for entry in list(self.entries):
            self.release(entry)
        self.is_closed = True

    def _bytes_of(self, entry: Entry, rank: int) -> range:
        start = min(rank * entry.stride, entry.nbytes)
        return range(start, min(start + entry.stride, entry.nbytes))

    def _gathered(self, pieces: list[Tensor]) -> Tensor:
        """[N * S] the pieces of all ranks."""
        if self.on.rank is None:
            return torch.cat(pieces)
        sharding = self.on.transports[self.on.mesh.shard_axis]
        attempt = self.on.members.begin("all_gather of a parameter in fzero.build")
        found = sharding.all_gather(pieces[0], attempt).wait()
        sharding.settle()
        return found


def _piece(flat: Tensor, part: range, stride: int, device: torch.device) -> Tensor:
    piece = torch.zeros(stride, dtype=torch.uint8, device=device)
    piece[: len(part)].copy_(flat[part.start : part.stop])
    return piece


def _bytes(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor lies in, as 1-d bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def used_up(shape: torch.Size, dtype: torch.dtype) -> FzeroError:
    """The error of a tensor that outlived its construction."""
    name = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return FzeroError(
        "fzero.build",
        f"this {name} is of a module that was built already, and is cut over the ranks",
        "use the params and apply that build returned; keep no module or tensor of the constructor",
    )
