"""Levels: which torch.func transforms the code at hand runs in.

torch has no public way to ask, so that this is the one file that asks its private one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils._mode_utils
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import Tensor, nn

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


# for state

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""Base class of modes that see each aten operation. Public name once torch has one: beside `TorchFunctionMode`."""

dispatch_modes: Callable[[], list[Any]] = torch.utils._python_dispatch._get_current_dispatch_mode_stack
"""The active dispatch modes. Public name once torch has one: beside `torch.overrides.TorchFunctionMode`."""

disable_modes: Callable[[], AbstractContextManager[Any]] = torch.utils._python_dispatch._disable_current_modes
"""Disable all modes within a block. Public name once torch has one: beside `torch.overrides.TorchFunctionMode`."""

no_dispatch: Callable[[], AbstractContextManager[Any]] = torch.utils._mode_utils.no_dispatch
"""Disable `__torch_dispatch__` in a block. Public name once torch has one: beside `DisableTorchFunctionSubclass`."""

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""A `__torch_function__` that does nothing. Public name once torch has one: a class attribute to opt out."""

make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
"""A tensor subclass without memory of its own. Public name once torch has one: `Tensor.make_wrapper_subclass`."""

pytree_leaves: Callable[..., list[Any]] = torch.utils._pytree.tree_leaves
"""The leaves of a pytree of torch. Public name once torch has one: `torch.utils.pytree`."""

map_pytree_only: Callable[..., Any] = torch.utils._pytree.tree_map_only
"""Map the leaves of one type of a pytree of torch. Public name once torch has one: `torch.utils.pytree`."""


def storage_key(tensor: Tensor) -> int:
    """A number that tensors on one storage share, also on the meta device, where `data_ptr` is 0 for all.

    Public name once torch has one: equality of `UntypedStorage`.
    """
    return tensor.untyped_storage()._cdata


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict of a module's own buffers, which may be assigned to. Public name once torch has one: `own_buffers`."""
    return module._buffers
