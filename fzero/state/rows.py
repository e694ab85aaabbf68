"""Rows: a value that lies on several ranks already, as a DTensor of FSDP2 does. Ranks send each other what they keep.

    w, 4 rows         |- - - - - - - - - - - -|
    ranks hold rows   |---- 0 ----|---- 1 ----|
    ranks keep        |-- 0 --|-- 1 --|-- 2 --|      three ranks, of which the third held nothing

A rank holds its rows, what it keeps, and a chunk. No rank holds the whole value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fzero.base.dtypes import describe_form
from fzero.base.errors import FzeroError
from fzero.base.frozen import is_frozen
from fzero.layout.chunks import chunks
from fzero.layout.layout import Layout
from fzero.layout.ranges import intersect
from fzero.ranks.ranks import Ranks
from fzero.state.exchange import Part, Stretch, find_owners, perform, plan, ranks_by_position
from fzero.state.fill import chunk_numel

ON_ITS_RANKS = "partition it on a mesh of all ranks that hold it, or give tensor.full_tensor()"


class RowSource:
    """The values of a DTensor. `fzero.partition` moves them, on all ranks together; nobody else can read them.

    A DTensor whose rows are cut along one mesh axis, as FSDP2 cuts them, is sent as it is. Any other is redistributed
    to rows, when its turn comes: then a rank holds its rows of this one value twice.

    Raises:
        FzeroError: for a DTensor without rows, of partial sums, or on a mesh that this rank is not part of.
    """

    def __init__(self, tensor: Any, path: str = "") -> None:
        self.tensor, self.shape, self.dtype, self.path = tensor.detach(), tensor.shape, tensor.dtype, path
        self.is_frozen = is_frozen(tensor)
        cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
        if not cut or not self.shape or any(placement.is_partial() for placement in tensor.placements):
            raise FzeroError(path, f"is a DTensor of {tensor.placements}, not cut along an axis", ON_ITS_RANKS)
        self.axis, mesh = cut[0], tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise FzeroError(path, f"is a DTensor on {mesh}, which this rank is not part of", ON_ITS_RANKS)
        at_position = mesh.mesh.movedim(self.axis, 0).reshape(mesh.size(self.axis), -1)
        step = -(-self.shape[0] // mesh.size(self.axis)) * self.shape[1:].numel()  # as torch.chunk cuts rows
        held = [intersect(range(i * step, (i + 1) * step), range(self.shape.numel())) for i in range(len(at_position))]
        self.parts = [Part(rank, elements) for rank, elements in zip(at_position[:, 0].tolist(), held)]
        self.start = held[coordinate[self.axis]].start

    def read(self, start: int, out: Tensor) -> None:
        raise FzeroError(self.path, "lies on several ranks, and one alone reads it", ON_ITS_RANKS)

    def fingerprint(self) -> bytes:
        """Nothing: the rows of ranks differ."""
        return b""

    def fill(self, on: Ranks, out: Tensor, layout: Layout, leaf: int, chunk: int) -> None:
        """Fill `out`, this rank's part of a leaf, 1-d, `chunk` bytes at a time. All ranks of `on` call together.

        Raises:
            FzeroError: for a mesh that lacks a rank that holds rows; when a rank is lost.
        """
        if len(on.numbers) > 1 or not {rank for rank, _ in self.parts} <= set(on.ranks):
            problem = f"lies on ranks {[rank for rank, _ in self.parts]}, and is partitioned on {on.mesh}"
            raise FzeroError(self.path, problem, ON_ITS_RANKS)
        mine, ranks = self._rows(), ranks_by_position(layout, on.ranks)
        room = Stretch(layout.part(leaf, layout.rank_of(on)).start, out)
        for piece in chunks(self.shape.numel(), chunk_numel(chunk, self.dtype, out.dtype)):
            have = [Part(rank, part) for rank, elements in self.parts if (part := intersect(elements, piece))]
            part = intersect(range(mine.start, mine.start + len(mine.values)), piece)
            here = Stretch(part.start, mine.at(part).to(out.dtype))
            what = f"partition of {self.path or layout.bucket} from rows"
            perform(on, what, plan(have, find_owners(layout, leaf, piece, ranks)), here, room)

    def _rows(self) -> Stretch:
        """This rank's rows."""
        from torch.distributed.tensor import Replicate, Shard  # here: the import is slow, and few use DTensors

        rows = [Shard(0) if axis == self.axis else Replicate() for axis in range(len(self.tensor.placements))]
        is_cut = list(self.tensor.placements) == rows
        tensor = self.tensor if is_cut else self.tensor.redistribute(placements=rows)
        return Stretch(self.start, tensor.to_local().reshape(-1))

    def __repr__(self) -> str:
        return f"RowSource({self.path or 'DTensor'}: {describe_form(self)})"
