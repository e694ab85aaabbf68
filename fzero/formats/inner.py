"""Inner: a tensor whose elements lie within a leaf that ranks have in slices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fzero.layout.strides import Copy
from fzero.values.sharded import Sharded


@dataclass(frozen=True)
class Inner:
    """A tensor of this `shape`, whose elements are those of the whole leaf that `copies` say: from the leaf to it."""

    leaf: Sharded
    shape: torch.Size
    copies: tuple[Copy, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.leaf.dtype
