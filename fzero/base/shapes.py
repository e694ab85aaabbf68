"""Shapes: of leaves that are tensors, `Sharded`, or sources of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fzero.base.embeddings import is_embedding, mark_embedding
from fzero.base.frozen import freeze

T = TypeVar("T")


def global_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of the whole leaf, where a leaf that is split over model axes has the `shape` of a part."""
    return tuple(getattr(leaf, "global_shape", leaf.shape))


def of_whole(choose: Callable[[str, Any], T]) -> Callable[[str, Any], T]:
    """A function `choose(path, leaf)` of a user, which sees a leaf that is split over model axes as a tensor without
    values, of the shape of the whole leaf."""

    def choose_by_whole(path: str, leaf: Any) -> T:
        shape = global_shape(leaf)
        if tuple(leaf.shape) == shape:
            return choose(path, leaf)
        whole = freeze(torch.empty(shape, dtype=leaf.dtype, device="meta"), leaf)
        return choose(path, mark_embedding(whole, is_embedding(leaf)))

    return choose_by_whole
