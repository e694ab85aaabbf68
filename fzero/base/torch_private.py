"""Every private name of torch that fzero uses, each behind a small function; `torch_private_functions` has the rest.

A torch release may rename or remove a private name, and this file is then the only one to mend. Each function says
which public name would replace the private one. A section a room; the heading names the room that uses it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
import torch._library.custom_ops
import torch._ops
import torch._subclasses.fake_tensor
import torch.distributed as dist
import torch.fx.experimental.proxy_tensor
import torch.utils._mode_utils
import torch.utils._python_dispatch
import torch.utils._pytree
from einops import _backends
from torch import Tensor, fx, nn

# for ranks: process groups


def group_timeouts(group: dist.ProcessGroup) -> Iterator[timedelta]:
    """How long the collectives of a process group wait for a rank, for each of the group's backends.

    Public replacement: a getter beside `torch.distributed.distributed_c10d.set_pg_timeout`, once there is one.
    """
    return (group._get_backend(device).options._timeout for device in group._device_types)


# for base: pytrees, tensors of torch.func

pytree_nodes: dict[type, Any] = torch.utils._pytree.SUPPORTED_NODES
"""Class -> how torch's pytree takes it apart (`flatten_fn`, `flatten_with_keys_fn`, `unflatten_fn`).

Public replacement: a public `torch.utils.pytree` with a function that lists its classes.
"""


def key_of_entry(entry: Any) -> Any:
    """The dict key, position or field name in an entry of `flatten_with_keys_fn`. Public replacement: as above."""
    return next((getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)), str(entry))


def unwrap(tensor: Tensor) -> Tensor:
    """The tensor that torch.func wrapped, without its wrappers. Public replacement: such a function in `torch.func`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_batch(tensor: Tensor) -> bool:
    """Whether a tensor is what a function under vmap sees: one example of a batch. Public replacement: a `torch.func`
    predicate."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is made of other tensors, as a DTensor is. Public replacement: a predicate in `torch.utils`."""
    return torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)


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


# for values: pytrees, modules, einops

EinopsTorchBackend = _backends.TorchBackend
"""einops' backend for torch tensors, to derive from. Public replacement: a function of einops to register a type."""

NormBase = nn.modules.batchnorm._NormBase
"""The base class of BatchNorm and InstanceNorm. Public replacement: such a base class in `torch.nn`."""

BatchNormBase = nn.modules.batchnorm._BatchNorm
"""The base class of BatchNorm and SyncBatchNorm. Public replacement: as above."""

register_pytree_node = torch.utils._pytree.register_pytree_node
"""Make a class a node of the pytrees that torch.func sees. Public replacement: a public `torch.utils.pytree`."""

map_pytree: Callable[..., Any] = torch.utils._pytree.tree_map
"""Map a function over the leaves of such a pytree. Public replacement: a public `torch.utils.pytree`."""

pytree_leaves: Callable[..., list[Any]] = torch.utils._pytree.tree_leaves
"""The leaves of a pytree of torch. Public replacement: a public `torch.utils.pytree`."""

make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
"""A tensor subclass without memory of its own. Public replacement: `Tensor.make_wrapper_subclass`."""


def is_called_by_functorch() -> bool:
    """Whether code of torch.func, and no other, asks a pytree node for its children or rebuilds it.

    Public replacement: none is needed once `torch.func` asks a class for what to differentiate.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == torch.utils._pytree.__name__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch._functorch.")


def is_called_by_torch() -> bool:
    """Whether code of torch, or of fzero, called the function that called the caller, a method of a tensor. A function
    mode, such as `torch.device`, calls it for somebody else.

    Public replacement: none is needed once torch says of a tensor subclass that its memory is read-only.
    """
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").startswith(("torch.", "fzero."))


def in_backward() -> bool:
    """Whether autograd is running a backward pass. Public replacement: a predicate in `torch.autograd`."""
    return torch._C._current_autograd_node() is not None


def name_of_backward() -> str:
    """The name of the node that autograd is running, such as `MulBackward0`; "" outside of a backward pass.

    Public replacement: as above.
    """
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def has_hooks(tensor: Tensor) -> bool:
    """Whether autograd calls functions with a tensor's gradient. Public replacement: such a predicate on the tensor."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def has_full_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has full backward hooks or backward pre-hooks of its own. Public replacement: as above."""
    return bool(module._backward_pre_hooks or (module._backward_hooks and module._is_full_backward_hook))


def copy_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of one module in a new dict, for `vars(module).update`. Its buffers' and hooks' dicts are copied.

    Public replacement: a context in `torch.func` that resets what a module's forward assigns.
    """
    copied = ("_buffers", *(name for name in vars(module) if name.endswith(("_hooks", "_with_kwargs"))))
    return {**vars(module), **{name: copy.copy(vars(module)[name]) for name in copied}}


def refresh_flat_weights(rnn: nn.RNNBase) -> None:
    """Fill the list that an RNN reads its weights from with the RNN's present attributes.

    Public replacement: none is needed once `functional_call` replaces weights in that list as well.
    """
    rnn._flat_weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]


def assign_conversions(module: nn.Module) -> None:
    """Let `module.to(...)`, and its like, assign the tensors that it makes, and leave the others as they are. torch
    writes into parameters, or swaps them.

    Public replacement: `torch.__future__.set_overwrite_module_params_on_conversion`, once it holds for fake tensors.
    """
    if type(module)._apply in (nn.Module._apply, nn.RNNBase._apply):
        vars(module)["_apply"] = MethodType(_convert, module)


def _convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for child in module.children() if recurse else ():
        child._apply(fn)
    for table in (module._parameters, module._buffers):
        for key, x in table.items():
            converted = None if x is None else fn(x)
            if converted is not x:
                table[key] = converted  # type: ignore[assignment]
    return module


def is_alias(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in one storage; False for tensors that a transform of torch.func wraps.

    Public replacement: equality of `untyped_storage().data_ptr()`, once wrapped tensors have it.
    """
    return torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]  # torch's stubs lack it


def version_of(tensor: Tensor) -> int:
    """The number of writes to a tensor's memory; -1 for an inference tensor, which does not count them.

    Public replacement: a public name for `Tensor._version`, which torch documents.
    """
    return -1 if tensor.is_inference() else tensor._version


# for tracing: fake tensors, dispatch modes

FakeTensor = torch._subclasses.fake_tensor.FakeTensor
"""A tensor without data. Public replacement: the same name in a public module."""

FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
"""The mode in which operations compute shapes only. Public replacement: the same name in a public module."""

DataDependentOutputException = torch._subclasses.fake_tensor.DataDependentOutputException
"""Raised where Python needs the value of a fake tensor. Public replacement: the same name in a public module."""

DynamicOutputShapeException = torch._subclasses.fake_tensor.DynamicOutputShapeException
"""Raised where a shape depends on a fake tensor's value. Public replacement: the same name in a public module."""


class DispatchMode(torch.utils._python_dispatch.TorchDispatchMode):
    """The base class of modes that see each aten operation. torch keeps dynamo out of the methods of others: that takes
    1.5 us for each operation, and the first one imports dynamo, in two seconds. Public replacement: a class in
    `torch.overrides` with an option for that."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def compiling(flag: bool = True) -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` true, or false, within a block, as torch's own traces do.

    Public replacement: such a context in `torch.compiler`.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = flag
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def gradient_of(operation: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any]] | None:
    """`(setup_context, backward)` of a custom operation; None where it has none. Public replacement: such a getter in
    `torch.library`."""
    made = torch._library.custom_ops._maybe_get_opdef(operation)
    return None if made is None or made._backward_fn is None else (made._setup_context_fn, made._backward_fn)


assert_later: Callable[..., None] = torch._assert_async
"""Raise an error with this message where a 0-d tensor is false, when it is known. Public replacement: the same name
without its underscore."""


def has_known_value(x: Any) -> bool:
    """Whether torch remembers the value of a fake tensor, and computes with it at trace time.

    Public replacement: an option of make_fx to remember no values.
    """
    if x.constant is not None:
        return True
    mode = torch.fx.experimental.proxy_tensor.get_proxy_mode()
    slot = None if mode is None else torch.fx.experimental.proxy_tensor.get_proxy_slot(x, mode.tracer, None)
    return slot is not None and slot.constant is not None


def overload_name(operation: Any) -> str:
    """The overload of an aten operation: "Tensor" for `aten.add.Tensor`. Public replacement: `overload_name` on it."""
    return operation._overloadname


# for optim: kernels

fused_adagrad_: Callable[..., None] = torch._fused_adagrad_
fused_adamw_: Callable[..., None] = torch._fused_adamw_
fused_sgd_: Callable[..., None] = torch._fused_sgd_
"""torch's kernels on lists. Public replacement: functions of tensors behind `torch.optim.AdamW(fused=True)`."""


# for state

function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
"""The active function modes, outermost first. Public replacement: as of `dispatch_modes`."""

dispatch_modes: Callable[[], list[Any]] = torch.utils._python_dispatch._get_current_dispatch_mode_stack
"""The active dispatch modes. Public name once torch has one: beside `torch.overrides.TorchFunctionMode`."""

disable_modes: Callable[[], AbstractContextManager[Any]] = torch.utils._python_dispatch._disable_current_modes
"""Disable all modes within a block. Public name once torch has one: beside `torch.overrides.TorchFunctionMode`."""

no_functions: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
"""Disable `__torch_function__` in a block, of modes too: looks at shapes reach no mode. Public name once torch has one:
beside `DisableTorchFunctionSubclass`."""

no_transforms: Callable[[], AbstractContextManager[Any]] = (
    torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
)
"""Leave all transforms of torch.func in a block. Public name once torch has one: in `torch.func`."""

no_dispatch: Callable[[], AbstractContextManager[Any]] = torch.utils._mode_utils.no_dispatch
"""Disable `__torch_dispatch__` in a block. Public name once torch has one: beside `DisableTorchFunctionSubclass`."""

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""A `__torch_function__` that does nothing. Public name once torch has one: a class attribute to opt out."""

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


# for program and passes: operations, graphs

OpOverload = torch._ops.OpOverload
"""The class of torch's operations, one for each overload. Public replacement: the same name in `torch.library`."""

below_autograd: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd
"""Call operations without autograd within a block. Public replacement: such a context beside `torch.library.impl`."""


def schema_of(operation: Any) -> Any:
    """The schema of an operation of torch, None for any other function. Public replacement: `schema` on it."""
    return getattr(operation, "_schema", None)


def find_root(graph: fx.Graph) -> Any:
    """The node in front of a graph's first node, to append nodes to. Public replacement: `Graph.inserting_before()`
    that takes nodes of the graph."""
    return graph._root


# for execution: the profiler


def is_profiling() -> bool:
    """Whether a profile is being taken. Public replacement: a predicate in `torch.profiler`."""
    return torch.autograd.profiler._is_profiler_enabled
