"""What a rank does to the gradients that it sends: compress the block of each rank, and keep what that took."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero import Program, ops
from fzero.variants.exchange import define_exchange
from fzero.variants.model_axes import find_pack_kind


class Compressor:
    """`compress(rows, real, *options)` makes [N, B] uint8 of [N, S] float32, B = `count_bytes(S, *options)`. `real`,
    with `masks`, is 0 in padding and else 1. `decompress(packed, S, *options)` is the inverse, up to what is taken.

    A rank keeps [N * S] float32 of error feedback. A subclass may keep it otherwise.
    """

    dtype, counts = torch.float32, False  # of what is kept; whether `store` wants the number of steps

    def __init__(self, name: str, count_bytes: Any, compress: Any, decompress: Any, masks: bool = False) -> None:
        self.count_bytes, self.compress, self.decompress, self.masks = count_bytes, compress, decompress, masks
        self.name, self.exchange = name, define_exchange(f"{name}_reduce_scatter", count_bytes, decompress)
        self.pack = ops.define(
            f"{name}_pack", names="leaves", perform=lambda program, node, rank: partial(self._pack, program, node),
            scratch=lambda program, node: ops.measure_scratch(partial(self._pack, program, node), *node.args),
            fake=self._fake, kind=find_pack_kind,
        )  # fmt: skip

    def size(self, world: int, numel: int) -> int:
        """The elements of what a rank keeps."""
        return world * numel

    def recall(self, kept: Tensor, numel: int) -> Tensor:
        """[N, S] what a rank adds to its gradients, of what it kept."""
        return kept.view(-1, numel)

    def store(self, left: Tensor, kept: Tensor, count: Tensor | None, *options: Any) -> Tensor:
        """What a rank keeps, of [N, S] that compression took, and of what it kept before."""
        return left.view(-1)

    def _fake(self, fulls: Any, bucket: str, leaves: Any, numel: int, world: int, kept: Any, *rest: Any) -> Any:
        packed = fulls[0].new_empty(world * self.count_bytes(numel, *rest[-1]), dtype=torch.uint8)
        return packed if kept is None else [packed, torch.empty_like(kept)]

    def _pack(self, program: Program, node: Any, fulls: Any, bucket: str, leaves: Any, numel: int, world: int,
              kept: Any, count: Any, options: tuple[Any, ...]) -> Any:  # fmt: skip
        along = program.wire_of(node)
        real = ~ops.padding_mask(along, fulls[0].device).view(world, numel) if self.masks else None
        rows = ops.pack_leaves(fulls, along).float().view(world, numel)
        rows = rows if kept is None else rows + self.recall(kept, numel)
        packed = self.compress(rows, real, *options)
        if kept is None:
            return packed.view(-1)
        left = (rows - self.decompress(packed, numel, *options)).nan_to_num(0, 0, 0)  # an overflow is not kept
        return [packed.view(-1), self.store(left if real is None else left * real, kept, count, *options)]
