"""Private names of torch about custom autograd Functions, checkpoints, graphs and layers, each behind a small function,
as in `torch_private`."""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._dispatch.python
import torch.fx.experimental.proxy_tensor
import torch.utils.checkpoint
from torch import Tensor, fx, nn

from fzero.base.torch_private import DispatchMode, depth

custom_function_call: Callable[..., Any] = torch._functorch.autograd_function.custom_function_call
"""Call a Function that has `setup_context` under torch.func. Public replacement: `Function.apply`."""
_is_separate: Callable[..., bool] = torch.autograd.function._is_setup_context_defined
_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_blocks, _blocks_lock = list[object](), threading.Lock()  # of `replace_custom_call`, which run now
_usual: list[Any] = []  # what `checkpoint` was, for each block of `replace_checkpoint` that runs now


class _NotYet(list[None]):
    """False when asked first, then True: `Function.apply` asks when it binds arguments, then when it would refuse."""

    def __bool__(self) -> bool:
        self.append(None)
        return len(self) > 1


@contextmanager
def mute_fakes() -> Iterator[None]:
    """In a block, fake tensors do not log the traceback of an operation that refuses its operands: who calls it says so
    in an error. Public replacement: none; torch logs before it raises."""
    was, _FAKE_LOG.disabled = _FAKE_LOG.disabled, True
    try:
        yield
    finally:
        _FAKE_LOG.disabled = was


@contextmanager
def replace_custom_call(call: Callable[..., Any], adapt: Callable[[Any], Any]) -> Iterator[None]:
    """In a block, `Function.apply` under torch.func is `call(function, *args, **kwargs)`, also without `setup_context`;
    in an operation's kernel for one transform, autograd applies the class `adapt(function)`.

    `apply` refuses such a class before it asks any mode, and users keep `apply = F.apply`. So names that `apply` looks
    up are replaced, and not the method. The last block of all threads restores them; all blocks are alike.
    Public replacement: none is needed once torch.func takes a Function without `setup_context`.
    """

    def call_or_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode):
            return call(function, *args, **kwargs)
        with torch._functorch.utils.enable_single_level_autograd_function():
            return _apply_once(adapt(function), args, kwargs)

    with _blocks_lock:
        _blocks.append(call)
        _replace_names(call_or_apply)
    try:
        yield
    finally:
        with _blocks_lock:
            _blocks.pop()
            if not _blocks:
                _restore_names()


_module: Any = torch.autograd.function
_APPLIES_IN_C = not isinstance(vars(torch.autograd.Function)["apply"], classmethod)
"""Whether `Function.apply` is no Python code, as since torch 2.15."""


def _apply_once(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a Function for one transform."""
    if _APPLIES_IN_C:
        return _make_single(function).apply(*args, **kwargs)
    return super(torch.autograd.Function, function).apply(*args, **kwargs)


def _make_single(function: Any) -> Any:
    """A class with the methods of a Function that does not derive from `Function`: under torch.func `apply` in C takes
    such a one for what torch.func asks about, and refuses it without `setup_context`."""
    names = ("forward", "backward", "vjp", "jvp", *["setup_context"] * _is_separate(function.setup_context))
    methods = {name: staticmethod(getattr(function, name)) for name in names}
    return type(function.__name__, (_module._SingleLevelFunction,), methods)


def _replace_names(call: Callable[..., Any]) -> None:
    _module.custom_function_call = call
    if _APPLIES_IN_C:
        _module._SingleLevelFunction.setup_context = _NoContext()
        _module._bind_default_args = _bind_separate
    else:
        _module._is_setup_context_defined = lambda method: _is_separate(method) or _NotYet()


def _restore_names() -> None:
    _module.custom_function_call, _module._is_setup_context_defined = custom_function_call, _is_separate
    if _APPLIES_IN_C:
        _module._SingleLevelFunction.setup_context, _module._bind_default_args = _SETUP_CONTEXT, _bind


class _NoContext:
    """The `setup_context` of a Function without one. `apply` in C compares it with torch's own, which it remembers:
    another method is given under torch.func, where `apply` would refuse the Function."""

    def __get__(self, instance: Any, function: Any) -> Any:
        is_outside = not torch._C._are_functorch_transforms_active()
        if is_outside or torch._C._functorch.get_single_level_autograd_function_allowed():
            return _SETUP_CONTEXT.__func__
        _asked.forward = function.forward
        return _no_context


def _no_context(ctx: Any, inputs: Any, output: Any) -> None:
    raise NotImplementedError  # `replace_custom_call` does not call it


def _bind_separate(forward: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """torch adds default values by the signature of `forward`, which has no `ctx` where there is `setup_context`."""
    return (args, kwargs) if forward == getattr(_asked, "forward", None) else _bind(forward, args, kwargs)


_asked = threading.local()
_SETUP_CONTEXT: Any = vars(_module._SingleLevelFunction)["setup_context"]
_bind: Any = getattr(_module, "_bind_default_args", None)  # of torch 2.15


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any) -> None:
        return None


if _APPLIES_IN_C:
    _Plain.apply()  # torch remembers its own `setup_context` at the first call of all


def requires_grad(tensor: Tensor) -> bool:
    """Whether autograd, in a transform or outside, differentiates by a tensor. Public replacement: as for `unwrap`."""
    while not tensor.requires_grad or (tensor.is_leaf and tensor._base is not None):  # a view made under no_grad
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return True


begins_gradient: Callable[[], bool] = torch._C._functorch.get_inplace_requires_grad_allowed
"""Whether torch.func itself calls `requires_grad_`, to begin a gradient. Public replacement: none is needed once
`requires_grad_` of a value that torch.func differentiates is no error."""

set_forward_mode: Callable[[bool], AbstractContextManager[Any]] = torch.autograd.forward_ad._set_fwd_grad_enabled
"""Allow or forbid forward-mode derivatives in a block. Public replacement: `torch.set_grad_enabled` of forward mode."""


HigherOrderOperator: Any = torch._ops.HigherOrderOperator
"""The class of torch's operations on functions. Public replacement: the same name in `torch.library`."""


@contextmanager
def replace_checkpoint(function: Callable[..., Any]) -> Iterator[None]:
    """In a block, `torch.utils.checkpoint.checkpoint` is `function` where a thread traces, or takes a gradient of
    torch.func.

    `checkpoint` calls what an attribute of it holds. The last block of all threads restores that; all blocks are alike.
    Public replacement: a `checkpoint` that torch.func differentiates.
    """
    checkpoint: Any = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]
    attributes, key = vars(checkpoint), "__dynamo_disable"

    def call(*args: Any, **kwargs: Any) -> Any:
        is_tracing = torch.fx.experimental.proxy_tensor.get_proxy_mode() is not None
        return (function if is_tracing or depth() > 0 else before or checkpoint)(*args, **kwargs)

    with _blocks_lock:
        before = _usual[0] if _usual else attributes.get(key)
        _usual.append(before)
        attributes[key] = call
    try:
        yield
    finally:
        with _blocks_lock:
            _usual.pop()
            if not _usual:
                attributes[key] = before


def policy_of(context: Any) -> Callable[..., Any] | None:
    """The policy of the first context of torch's `create_selective_checkpoint_contexts`; None for another context.

    Public replacement: a public class of that context.
    """
    is_selective = isinstance(context, torch.utils.checkpoint._CachingTorchDispatchMode)
    return context.policy_fn if is_selective else None


_TELLS_OUTPUT = "op_output" in inspect.signature(torch.utils.checkpoint.SelectiveCheckpointContext).parameters


def make_policy_context(result: Any) -> Any:
    """The context that a policy is asked with. It has the result of the operation since torch 2.13.

    Public replacement: a constructor of `SelectiveCheckpointContext` that stays.
    """
    known = {"op_output": result} if _TELLS_OUTPUT else {}
    return torch.utils.checkpoint.SelectiveCheckpointContext(is_recompute=False, **known)


inputs_of: Callable[[fx.Node], dict[fx.Node, None]] = operator.attrgetter("_input_nodes")
"""The operands of a node in order, each once, as the keys of torch's own table, which nobody may change. Walks ask for
all nodes, again and again. Public replacement: `Node.all_input_nodes`, which takes five times as long for a list."""


def list_targets(graph: fx.Graph) -> list[Any]:
    """What the nodes of a graph call, each once, from torch's own table of targets, without a walk over the nodes.

    Public replacement: a list of targets beside `Graph.find_nodes`.
    """
    return [
        target
        for (op, target), nodes in graph._find_nodes_lookup_table.table.items()
        if nodes and op == "call_function"
    ]


def copy_graph(graph: fx.Graph, fill: Callable[[fx.Node, Any], Any] = lambda node, given: given) -> fx.Graph:
    """A copy of a graph, with the names of nodes and with copies of their `meta`. A new node gets the same name in the
    copy as in the graph. torch's own copy looks for symbolic numbers in all arguments, and takes twice as long for the
    2,168 nodes of a step of 80 layers.

    `fill(node, (args, kwargs, meta))`, where it is given, returns these of the copy, before nodes are replaced by
    copies.

    Public replacement: `Graph.graph_copy`.
    """
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    names, known, find = copy._graph_namespace, copy._find_nodes_lookup_table, copies.__getitem__
    names._base_count |= graph._graph_namespace._base_count
    names._used_names |= graph._graph_namespace._used_names
    for node in graph.nodes:
        args, kwargs, meta = fill(node, (node.args, node.kwargs, node.meta))
        args, kwargs = fx.map_arg(args, find), fx.map_arg(kwargs, find)
        copied = copies[node] = fx.Node(copy, node.name, node.op, node.target, args, kwargs, node.type)
        copied.meta.update(meta)
        names.associate_name_with_obj(node.name, copied)
        copy._insert(copied)
        known.insert(copied)
    copy._len = len(copies)
    return copy


def call_function(graph: fx.Graph, target: Any, args: Any, kwargs: Any, name: str | None = None) -> fx.Node:
    """A new node at the insert point of a graph that calls a function. torch's own way looks for symbolic numbers in
    all arguments, and takes twice as long.

    Public replacement: `Graph.call_function`.
    """
    name = graph._graph_namespace.create_name(name_target(target) if name is None else name, None)
    return _insert(graph, fx.Node(graph, name, "call_function", target, args, kwargs))


@functools.lru_cache(4096)
def name_target(target: Any) -> str:
    """The name that a node of a target begins with, as torch writes it. Public replacement: none; a new node has it."""
    return fx.Graph()._target_to_str(target)


def _insert(graph: fx.Graph, node: fx.Node) -> fx.Node:
    graph._graph_namespace.associate_name_with_obj(node.name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


class GraphMaker:
    """Makes a graph node by node: each has the name that it is given, and nothing looks for symbolic numbers in its
    arguments. Public replacement: `Graph.create_node`."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def add(self, name: str, op: str, target: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> fx.Node:
        """The next node."""
        node = fx.Node(self.graph, name, op, target, args, kwargs)
        node.meta.update(meta)
        self.graph._graph_namespace.create_name(name, None)
        return _insert(self.graph, node)


_SPECTRAL_NORM = nn.utils.parametrizations._SpectralNorm
_OLD_SPECTRAL_NORM: Any = sys.modules["torch.nn.utils.spectral_norm"].SpectralNorm  # torch hides it behind a function


def list_vectors(module: nn.Module) -> list[str]:
    """The names of the buffers in which `spectral_norm`, the present or the former one, keeps its vectors of a module.
    Public replacement: public classes of both."""
    if isinstance(module, _SPECTRAL_NORM):
        return ["_u", "_v"]
    hooks = module._forward_pre_hooks.values()
    names = [hook.name for hook in hooks if isinstance(hook, _OLD_SPECTRAL_NORM)]
    return [f"{name}_{vector}" for name in names for vector in "uv"]


class _Calls(DispatchMode):
    """Lists the aten operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [func] * (func.namespace == "aten")
        return func(*args, **(kwargs or {}))


def _find_last_operation(function: Callable[..., Tensor], *tensors: Tensor) -> Any:
    with _Calls() as calls:
        function(*tensors)
    return calls.seen[-1]


unflatten_linear: Callable[[Tensor, Sequence[Any]], Tensor] = _find_last_operation(
    nn.functional.linear, *(torch.zeros(shape, device="cpu") for shape in ((1, 1, 1), (1, 1), (1,)))
)
"""The operation with which `linear` gives three dimensions to its product: `aten._unsafe_view` in torch 2.15,
`aten.view` in 2.13. Public replacement: none is needed once `linear` takes sizes that a trace leaves open."""


MATMUL_READS_SIZES = torch.__version__ < "2.13"
"""Whether `matmul` asks for the values of sizes that a trace leaves open. Public replacement: none is needed for torch
2.13."""


dispatch_in_python: Callable[[], AbstractContextManager[Any]] = torch._dispatch.python.enable_python_dispatcher
"""In a block, operations without a kernel for symbolic sizes run torch's Python code for them. Public replacement:
make_fx's `tracing_mode="symbolic"`, once it takes fake tensors of a given mode."""


_NUMBERS: dict[Any, torch.dtype] = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}


def take_dtypes(given: Sequence[Any]) -> list[torch.dtype]:
    """The floating dtypes that an operation is given as `ScalarType[]`: torch 2.11 gives their numbers. Public
    replacement: none is needed for torch 2.13."""
    return [_NUMBERS.get(x, x) for x in given]


def list_modes() -> list[str]:
    """The names of what sees each operation that runs now: modes of torch, but for its default device, and hooks of
    saved tensors. Public replacement: none."""
    functions = torch.overrides._get_current_function_mode_stack()
    modes = [*functions, *torch.utils._python_dispatch._get_current_dispatch_mode_stack()]
    names = [type(mode).__name__ for mode in modes if not isinstance(mode, torch.utils._device.DeviceContext)]
    return names + ["saved_tensors_hooks"] * (torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)


_TABLES = vars(nn.modules.module)
_HOOKS = [name for name, held in _TABLES.items() if name.startswith("_global_") and isinstance(held, dict)]


def list_global_hooks() -> list[tuple[str, dict[int, Any]]]:
    """`(name, hooks)` that all modules call. Public replacement: none."""
    return [(name, held) for name in _HOOKS if (held := _TABLES[name])]
