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


# for values

EinopsTorchBackend = _backends.TorchBackend
"""einops' backend for torch tensors, to derive from. Public name once einops has one: a function to register a type."""

NormBase = nn.modules.batchnorm._NormBase
"""Base class of BatchNorm and InstanceNorm. Public name once torch has one: a base class in `torch.nn`."""

register_pytree_node = torch.utils._pytree.register_pytree_node
"""Make a class a node of the pytrees that torch.func sees. Public name once torch has one: `torch.utils.pytree`."""

map_pytree: Callable[..., Any] = torch.utils._pytree.tree_map
"""Map the leaves of a pytree of torch. Public name once torch has one: `torch.utils.pytree`."""


def in_backward() -> bool:
    """Whether autograd is running a backward pass. Public name once torch has one: `torch.autograd.current_node`."""
    return torch._C._current_autograd_node() is not None


def copy_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of one module in a new dict, for `vars(module).update`; its dict of buffers is copied too.

    Public name once torch has one: a public dict of a module's own buffers that can be assigned to.
    """
    return {**vars(module), "_buffers": dict(module._buffers)}


def refresh_flat_weights(rnn: nn.RNNBase) -> None:
    """Fill the list that an RNN reads its weights from with its present attributes.

    Public name once torch has one: none is needed if `functional_call` replaces the list's entries.
    """
    rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]


# for tracing

FakeTensor = torch._subclasses.fake_tensor.FakeTensor
"""A tensor without data. Public name once torch has one: `torch.fake.FakeTensor`, say."""

FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
"""The mode in which operations compute shapes only. Public name once torch has one: beside `FakeTensor`."""

DataDependentOutputException = torch._subclasses.fake_tensor.DataDependentOutputException
"""Raised where Python needs the value of a fake tensor. Public name once torch has one: beside `FakeTensor`."""

DynamicOutputShapeException = torch._subclasses.fake_tensor.DynamicOutputShapeException
"""Raised where a shape depends on a fake tensor's value. Public name once torch has one: beside `FakeTensor`."""

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""Base class of modes that see each aten operation. Public name once torch has one: beside `TorchFunctionMode`."""


def overload_name(operation: Any) -> str:
    """The overload of an aten operation: "Tensor" for `aten.add.Tensor`. Public name once torch has one: the same."""
    return operation._overloadname


# for optim

fused_adamw_: Callable[..., None] = torch._fused_adamw_
"""torch's AdamW kernel on lists. Public name once torch has one: today only `torch.optim.AdamW(fused=True)` has it."""
