"""Feed: values that one rank has, sent chunk by chunk to the ranks that keep them."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.layout.chunks import chunks
from fzero.layout.layout import Layout
from fzero.ranks.ranks import Ranks
from fzero.state.exchange import Message, Part, Stretch, find_owners, perform, plan, ranks_by_position, report
from fzero.state.fill import chunk_numel
from fzero.state.sources import Source
from fzero.state.splits import part_of


class Feed:
    """Values from `source`, a global rank of the mesh of `on`, to all its ranks. All ranks make the same calls, `end`
    last."""

    def __init__(self, on: Ranks, source: int) -> None:
        self.on, self.source = on, source
        self.is_source = on.ranks[on.number] == source
        self._others = [rank for rank in on.ranks if rank != source]

    def fill(self, out: Tensor, values: Source, layout: Layout, leaf: int, chunk: int) -> None:
        """Fill `out`, this rank's slice of a leaf, 1-d, with the `values` of the source, `chunk` bytes at a time. Parts
        of a split leaf follow one another.

        Raises:
            FzeroError: on the other ranks when the source failed to read, with the text of its error; when a rank is
                lost.
            Exception: on the source, whatever `values.read` raises.
        """
        what = f"partition of {layout.bucket} from rank {self.source}"
        room = Stretch(layout.part(leaf, layout.rank_of(self.on)).start, out)
        numel, step = layout.leaves[leaf].numel, chunk_numel(chunk, values.dtype, out.dtype)
        # All chunks share one buffer, so that memory holds one chunk and not two.
        buffer = torch.empty(min(step, numel) if self.is_source else 0, dtype=out.dtype, device="cpu")
        for position in range(layout.splits):
            part, ranks = part_of(values, layout, leaf, position), ranks_by_position(layout, self.on.ranks, position)
            for piece in chunks(numel, step):
                have = Stretch(piece.start, buffer[: len(piece)])
                if self.is_source:
                    self._read(have, part, what)
                messages = plan([Part(self.source, piece)], find_owners(layout, leaf, piece, ranks))
                perform(self.on, what, messages, have, room)

    def end(self) -> None:
        """Return when every rank has what it keeps: a rank without a part in the last chunks hears of an error here."""
        done = [Message(self.source, rank, range(0)) for rank in self._others]
        perform(self.on, f"partition from rank {self.source}", done)

    def _read(self, have: Stretch, values: Source, what: str) -> None:
        try:
            values.read(have.start, have.values)
        except Exception as error:
            report(self.on, what, error, self._others)
            raise
