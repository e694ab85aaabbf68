"""Frozen leaves: leaves that no step trains. `fzero.grad` gives None for them, and an optimizer leaves them alone.

A plain leaf is frozen where it is an `nn.Parameter` that does not require grad, as in a module after
`requires_grad_(False)`. The layout of a `Sharded` leaf says that it is frozen, and so does a source of values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_frozen(leaf: Any) -> bool:
    """Whether a leaf is frozen: a tensor, a `Sharded`, or a source of values."""
    if isinstance(leaf, nn.Parameter):
        return not leaf.requires_grad
    described = getattr(leaf, "leaf", leaf)  # a Sharded has a leaf of its layout
    return getattr(described, "is_frozen", False)


def freeze(tensor: Tensor, like: Any) -> Tensor:
    """`tensor`, frozen where `like` is. Shares memory with `tensor`."""
    return nn.Parameter(tensor, requires_grad=False) if is_frozen(like) else tensor
