"""Every private name of torch that fzero uses, each behind a small function.

A torch release may rename or remove a private name, and this file is then the only one to mend. Each function says
which public name would replace the private one. A section a room; the heading names the room that uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# for ranks: process groups


def group_timeouts(group: dist.ProcessGroup) -> Iterator[timedelta]:
    """How long the collectives of a process group wait for a rank, for each of the group's backends.

    Public replacement: a getter beside `torch.distributed.distributed_c10d.set_pg_timeout`, once there is one.
    """
    return (group._get_backend(device).options._timeout for device in group._device_types)


# for values: the torch.func transforms that the code at hand runs in

_Kind = torch._C._functorch.TransformType


def depth() -> int:
    """The nesting depth of differentiating transforms; 0 outside of any.

    A value belongs to the transform that made it. vmap does not count: vmap leaves alone what it does not map over.
    Public replacement: a `torch.func` function that returns the current level, once there is one.
    """
    return max((transform.level() for transform in _differentiating_transforms()), default=0)


def in_vmap() -> bool:
    """Whether a vmap is active: then tensors may be batches, and if they are not, their tangents may be.

    Public replacement: a `torch.func` predicate for vmap, once there is one.
    """
    return any(transform.key() == _Kind.Vmap for transform in _transform_stack())


def in_forward_mode() -> bool:
    """Whether a jvp is active: then tensors may have tangents.

    Public replacement: a `torch.func` predicate for forward mode, once there is one.
    """
    return any(transform.key() == _Kind.Jvp for transform in _transform_stack())


def in_second_order() -> bool:
    """Whether several differentiating transforms are active: then tensors may be differentiated more than once.

    Public replacement: as for `depth`.
    """
    return len(_differentiating_transforms()) > 1


def _transform_stack() -> list[Any]:
    """The active transforms, outermost first."""
    return torch._C._functorch.get_interpreter_stack() or []


def _differentiating_transforms() -> list[Any]:
    return [transform for transform in _transform_stack() if transform.key() != _Kind.Vmap]
