"""Embeddings: which leaves are weights of an `nn.Embedding`, alone or tied. An optimizer may treat them differently.

`fzero.lower` knows, and marks each leaf. The layout of a `Sharded` leaf keeps the mark. A tensor that a step or a user
computed has no mark.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def is_embedding(leaf: Any) -> bool | None:
    """Whether a leaf is the weight of an `nn.Embedding`: a tensor, a `Sharded`, or a source of values. None where
    nothing says."""
    described = getattr(leaf, "leaf", leaf)  # a Sharded has a leaf of its layout
    return getattr(described, "is_embedding", None)


def mark_embedding(leaf: T, is_embedding: bool | None) -> T:
    """Note on a tensor, or on a source, whether it is the weight of an `nn.Embedding`. Returns the leaf itself."""
    leaf.is_embedding = is_embedding  # type: ignore[attr-defined]  # an attribute of our own
    return leaf
