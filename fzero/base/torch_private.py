"""Levels: which torch.func transforms the code at hand runs in.

torch has no public way to ask, so that this is the one file that asks its private one.
"""

from __future__ import annotations

from typing import Any

import torch

_Kind = torch._C._functorch.TransformType


def depth() -> int:
    """How deep in transforms that differentiate; 0 outside. A value belongs to the one that made it, while vmap leaves
    alone what it does not map over."""
    return max((transform.level() for transform in _differentiating()), default=0)


def in_vmap() -> bool:
    """Whether some of the tensors at hand may be batches, if of tangents only."""
    return any(transform.key() == _Kind.Vmap for transform in _stack())


def in_forward_mode() -> bool:
    """Whether some of them may have tangents."""
    return any(transform.key() == _Kind.Jvp for transform in _stack())


def in_second_order() -> bool:
    """Whether some of them may be differentiated more than once."""
    return len(_differentiating()) > 1


def _stack() -> list[Any]:
    """The transforms, the outermost first."""
    return torch._C._functorch.get_interpreter_stack() or []


def _differentiating() -> list[Any]:
    return [transform for transform in _stack() if transform.key() != _Kind.Vmap]
