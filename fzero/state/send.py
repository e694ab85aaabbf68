"""Feed: values that one rank has, to the ranks of a mesh that keep them, a chunk at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.layout.chunks import Overlap, chunks, overlaps
from fzero.layout.layout import Layout
from fzero.ranks.live import Live
from fzero.state.fill import elements
from fzero.state.sources import Source


class Feed:
    """From `source`, a global rank, to all ranks of the mesh of `on`. All of them make the same calls.

    No other rank receives bytes that it does not keep. In front of each message goes a number: 0, or minus the length
    of an error's text, so that ranks which wait for values fail with what the source failed with. Call `end` last.
    """

    def __init__(self, on: Live, source: int) -> None:
        if source not in on.ranks:
            raise FzeroError("source_rank", f"is {source}, the mesh has ranks {list(on.ranks)}", "name one of them")
        self.on, self.source = on, source
        self.is_source = on.ranks[on.number] == source
        self._sent: list[Any] = []

    def leaf(self, out: Tensor, values: Source, layout: Layout, leaf: int, chunk: int) -> None:
        """Fill `out`, this rank's part of a leaf, 1-d, with the `values` of the source, `chunk` bytes at a time."""
        with self.on.members.begin(f"partition of {layout.bucket} from rank {self.source}"):
            for piece in chunks(layout.leaves[leaf].numel, elements(chunk, values.dtype, out.dtype)):
                owned = list(overlaps(layout, leaf, piece))
                if self.is_source:
                    self._give(out, values, piece, owned, layout)
                else:
                    self._take(out, owned, layout)

    def end(self) -> None:
        """Return when every rank has what it keeps."""
        with self.on.members.begin(f"partition from rank {self.source}"):
            if self.is_source:
                for rank in self._others():
                    self._send(rank, 0)
                self._flush()
            else:
                self._expect()

    def _give(self, out: Tensor, values: Source, piece: range, owned: list[Overlap], layout: Layout) -> None:
        read = torch.empty(len(piece), dtype=out.dtype)
        try:
            values.read(piece.start, read)
        except Exception as error:
            self._give_up(error)
            raise
        for overlap in owned:
            data = read[overlap.source.start - piece.start : overlap.source.stop - piece.start]
            for number, rank in enumerate(self.on.ranks):
                if self.on.mesh.position(number, self.on.mesh.shard_axis) != overlap.rank:
                    continue
                if number == self.on.number:
                    _here(out, overlap, layout).copy_(data)
                else:
                    self._send(rank, 0, data)
        self._flush()

    def _take(self, out: Tensor, owned: list[Overlap], layout: Layout) -> None:
        for overlap in owned:
            if overlap.rank == self.on.rank:
                self._expect()
                here = _here(out, overlap, layout)
                data = here if here.device.type == "cpu" else torch.empty(here.shape, dtype=here.dtype)
                self._receive(data)
                if data is not here:
                    here.copy_(data)

    def _give_up(self, error: Exception) -> None:
        """Tell all other ranks why they get nothing more."""
        text = f"{type(error).__name__}: {error}".encode()
        for rank in self._others():
            self._send(rank, -len(text), torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self._flush()

    def _expect(self) -> None:
        number = torch.zeros((), dtype=torch.int64)
        self._receive(number)
        if number < 0:
            text = torch.empty(-int(number), dtype=torch.uint8)
            self._receive(text)
            raise FzeroError(f"rank {self.source}", f"could not read its values: {bytes(text.tolist()).decode()}")

    def _others(self) -> list[int]:
        return [rank for rank in self.on.ranks if rank != self.source]

    def _send(self, rank: int, number: int, data: Tensor | None = None) -> None:
        for message in [torch.tensor(number), *([] if data is None else [data])]:
            self._sent.append((dist.isend(message, rank, group=self.on.members.group), message))

    def _receive(self, data: Tensor) -> None:
        dist.recv(data, self.source, group=self.on.members.group)

    def _flush(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent = []


def _here(out: Tensor, overlap: Overlap, layout: Layout) -> Tensor:
    """Where an overlap lies in its rank's part of the leaf."""
    start = layout.part(overlap.leaf, overlap.rank).start
    return out[overlap.source.start - start : overlap.source.stop - start]
