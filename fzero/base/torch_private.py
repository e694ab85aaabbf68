"""Levels: which torch.func transforms the code at hand runs in.

torch has no public way to ask, so that this is the one file that asks its private one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._subclasses.fake_tensor
import torch.utils._python_dispatch
import torch.utils._pytree
from einops import _backends
from torch import nn

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


# for values: pytrees, modules, einops

EinopsTorchBackend = _backends.TorchBackend
"""einops' backend for torch tensors, to derive from. Public replacement: a function of einops to register a type."""

NormBase = nn.modules.batchnorm._NormBase
"""The base class of BatchNorm and InstanceNorm. Public replacement: such a base class in `torch.nn`."""

register_pytree_node = torch.utils._pytree.register_pytree_node
"""Make a class a node of the pytrees that torch.func sees. Public replacement: a public `torch.utils.pytree`."""

map_pytree: Callable[..., Any] = torch.utils._pytree.tree_map
"""Map a function over the leaves of such a pytree. Public replacement: a public `torch.utils.pytree`."""


def in_backward() -> bool:
    """Whether autograd is running a backward pass. Public replacement: a predicate in `torch.autograd`."""
    return torch._C._current_autograd_node() is not None


def copy_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of one module in a new dict, for `vars(module).update`. The dict of its buffers is copied too.

    Public replacement: a context in `torch.func` that resets what a module's forward assigns.
    """
    return {**vars(module), "_buffers": dict(module._buffers)}


def refresh_flat_weights(rnn: nn.RNNBase) -> None:
    """Fill the list that an RNN reads its weights from with the RNN's present attributes.

    Public replacement: none is needed once `functional_call` replaces weights in that list as well.
    """
    rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]


# for tracing: fake tensors, dispatch modes

FakeTensor = torch._subclasses.fake_tensor.FakeTensor
"""A tensor without data. Public replacement: the same name in a public module."""

FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
"""The mode in which operations compute shapes only. Public replacement: the same name in a public module."""

DataDependentOutputException = torch._subclasses.fake_tensor.DataDependentOutputException
"""Raised where Python needs the value of a fake tensor. Public replacement: the same name in a public module."""

DynamicOutputShapeException = torch._subclasses.fake_tensor.DynamicOutputShapeException
"""Raised where a shape depends on a fake tensor's value. Public replacement: the same name in a public module."""

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""The base class of modes that see each aten operation. Public replacement: the same name in `torch.overrides`."""


def overload_name(operation: Any) -> str:
    """The overload of an aten operation: "Tensor" for `aten.add.Tensor`. Public replacement: `overload_name` on it."""
    return operation._overloadname


# for optim: kernels

fused_adamw_: Callable[..., None] = torch._fused_adamw_
"""torch's AdamW kernel on lists. Public replacement: a function of tensors behind `torch.optim.AdamW(fused=True)`."""
