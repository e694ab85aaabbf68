"""What moves in the hops of a scatter: rows of a gradient, as codes or as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import ops


class Codes(NamedTuple):
    """How rows travel: `encode(rows, dtype)` makes [rows, B] of [rows, S], for gradients of a dtype, and B is
    `count(S)`; `decode(codes, S)` gives floating rows. Codes are of `dtype`, or of that of the gradients."""

    count: Callable[[int], int]
    encode: Callable[[Tensor, torch.dtype], Tensor]
    decode: Callable[[Tensor, int], Tensor]
    dtype: torch.dtype | None = None

    def pack(self, fulls: Sequence[Tensor], along: Any, nodes: int) -> Tensor:
        """[L * n * B] the codes of each rank's block, ordered by the position inside of a node first."""
        rows = ops.pack_leaves(fulls, along).view(nodes, -1, along.stride).transpose(0, 1)  # [L, n, S]
        return self.encode(rows.reshape(-1, along.stride), fulls[0].dtype).view(-1)

    def take_mean(self, received: Tensor, count: int, numel: int) -> Tensor:
        """[rows, S] the mean of what `count` ranks sent: of each of them as many rows of codes."""
        return self.decode(received.view(-1, self.count(numel)), numel).view(count, -1, numel).mean(0)


def find_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of a dtype are added up: float32, or a wider one."""
    return torch.promote_types(dtype, torch.float32)
