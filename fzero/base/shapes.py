"""Shapes: of leaves that are tensors, `Sharded`, or sources of values."""

from __future__ import annotations

from typing import Any


def global_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of the whole leaf, where a leaf that is split over model axes has the `shape` of a part."""
    return tuple(getattr(leaf, "global_shape", leaf.shape))
