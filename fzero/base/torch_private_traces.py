"""Private names of torch about fake tensors and the traces of make_fx, each behind a small function, as in
`torch_private`."""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
import torch.fx._lazy_graph_module
import torch.fx.experimental.proxy_tensor
import torch.fx.traceback
from torch import Tensor, fx

from fzero.base.torch_private import FakeTensor, FakeTensorMode, no_dispatch, storage_key, unwrap
from fzero.base.torch_private_functions import call_function, name_target


def has_plain_form(x: Any) -> TypeGuard[FakeTensor]:
    """Whether a value is a fake tensor that is no more than its form: `make_fake` makes another one like it."""
    if not isinstance(x, FakeTensor) or x.layout is not torch.strided or x.constant is not None:
        return False
    return not (x.is_inference() or x.requires_grad or x.is_conj() or x.is_neg())


def has_open_sizes(x: Tensor) -> bool:
    """Whether a size, a stride or the offset of a tensor is a symbolic number. Public replacement: a look at each."""
    return x._has_symbolic_sizes_strides


def make_fake(
    like: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    start: int | torch.SymInt = 0,
    storage: torch.UntypedStorage | None = None,
) -> Tensor | None:
    """A fake tensor of the dtype and the device of another one: a view of a storage from the element `start` on, or
    without a storage in memory of its own. It takes a fifth of the time of a call of torch. None where the other one is
    no fake tensor, or more than its form.

    Public replacement: `torch.empty_strided` and `Tensor.set_` under the mode of fake tensors.
    """
    if not has_plain_form(like):
        return None
    with no_dispatch():
        made = _copy_fake(like, _make_meta(like.dtype, shape, stride, start, storage))
        vars(made).update(_list_memos())
        return made


@functools.cache
def _list_memos() -> dict[str, None]:
    """What a fake tensor remembers about itself, as long as nothing was asked. Call it under `no_dispatch`."""
    made = FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), torch.device("cpu"))
    return {name: None for name, x in vars(made).items() if x is None}


def make_empty(mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    """A fake tensor of a device, without elements, that no trace records. Public replacement: as of `make_fake`."""
    with no_dispatch():
        return FakeTensor(mode, torch.empty(0, device="meta"), device)


def make_pair(
    like: FakeTensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    start: int | torch.SymInt,
    storage: torch.UntypedStorage | None,
) -> tuple[FakeTensor, FakeTensor]:
    """Two fake tensors of one memory, as `make_fake` makes one. `like` has their device and their mode: a plain fake
    tensor about which nothing was asked. Public replacement: as of `make_fake`."""
    with no_dispatch():
        meta = _make_meta(dtype, shape, stride, start, storage)
        return _copy_fake(like, meta), _copy_fake(like, meta)


class OpenForms:
    """Makes pairs of fake tensors, as `make_pair` does, with open sizes. torch takes 0.4 ms for what follows from the
    open sizes of a tensor: for each form once here, and in a tenth of it again.

    Public replacement: as of `make_fake`.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Tensor]] = {}  # a meta tensor of each form, by the form's `id`
        self._lying: dict[int, Tensor] = {}  # a meta tensor in each memory

    def make(self, like: FakeTensor, form: Any, operand: Tensor | None) -> tuple[FakeTensor, FakeTensor]:
        """Two fake tensors of the dtype, shape, strides and start of `form`, in new memory, or in that of an operand,
        with the device and mode of `like`."""
        with no_dispatch():
            meta = self._make_meta(form, operand)
            return _copy_fake(like, meta), _copy_fake(like, meta)

    def make_one(self, like: FakeTensor, form: Any, operand: Tensor | None) -> FakeTensor:
        """One of the tensors that `make` makes. Call it under `no_dispatch`."""
        return _copy_fake(like, self._make_meta(form, operand))

    def _make_meta(self, form: Any, operand: Tensor | None) -> Tensor:
        meta = self._make_new(form) if operand is None else self._make_view(form, operand)
        self._lying.setdefault(storage_key(meta), meta)
        return meta

    def _make_new(self, form: Any) -> Tensor:
        _, made = self._made.get(id(form), (None, None))
        if made is None:
            made = _make_meta(form.dtype, form.shape, form.stride, form.start, None)
            self._made[id(form)] = form, made
        return made._lazy_clone()  # which copies the sizes, and has a storage of its own

    def _make_view(self, form: Any, operand: Tensor) -> Tensor:
        lying = self._lying.get(storage_key(operand))
        if lying is None or lying.dtype != form.dtype:
            return _make_meta(form.dtype, form.shape, form.stride, form.start, operand.untyped_storage())
        return lying.as_strided(form.shape, form.stride, form.start)


def is_plain(x: Any) -> TypeGuard[FakeTensor]:
    """As `has_plain_form`, for a value that may remember its element, as a number that code wrote does: only a trace
    asks for that."""
    if type(x) is not FakeTensor or x.layout is not torch.strided:
        return False
    return not (x.is_inference() or x.requires_grad or x.is_conj() or x.is_neg())


def make_as(
    like: FakeTensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    start: int | torch.SymInt,
    storage: torch.UntypedStorage | None,
) -> FakeTensor:
    """A fake tensor of a memory, or in memory of its own, with the device and the mode of `like`, a plain one about
    which nothing was asked. Call it under `no_dispatch`. Public replacement: as of `make_fake`."""
    return _copy_fake(like, _make_meta(dtype, shape, stride, start, storage))


def _make_meta(
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    start: int | torch.SymInt,
    storage: torch.UntypedStorage | None,
) -> Tensor:
    if storage is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return torch.empty(0, dtype=dtype, device="meta").set_(storage, start, shape, stride)


def _copy_fake(like: FakeTensor, meta: Tensor) -> FakeTensor:
    """`FakeTensor(like.fake_mode, meta, like.device)`, in a quarter of the time."""
    made: Any = Tensor._make_subclass(FakeTensor, meta, dispatch_device=True, device_for_backend_keys=like.fake_device)
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(vars(like))
    return made


def import_tracer() -> None:
    """Import what make_fx imports at its first trace, in two seconds. A thread of its own has no modes, under which
    what the import calls would be traced, and no arguments of a step: torch keeps the frames of the import alive.
    Public replacement: none."""
    if "torch._dynamo" not in sys.modules:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(importlib.import_module, "torch._dynamo").result()


one_trace = threading.RLock()
"""Held by the thread that traces: make_fx patches classes, and what surrounds a trace sets flags, for all threads."""


def make_graph(fn: Callable[[], Any]) -> fx.GraphModule:
    """What make_fx records of a function. torch's mode that notes for each node which function of torch called it is
    left out: it runs at each look at a tensor's shape, and nothing asks for its notes. Public replacement: none of the
    option."""
    return torch.fx.experimental.proxy_tensor.make_fx(fn, _disable_torch_fn_metadata_mode=True)()


@contextmanager
def without_log_of_failures() -> Iterator[None]:
    """A block in which torch does not log the operations that it cannot trace: the block's caller has another way.
    Public replacement: none."""
    log = torch._subclasses.fake_tensor.log
    with one_trace:
        before, log.disabled = log.disabled, True
        try:
            yield
        finally:
            log.disabled = before


def take_value(x: Tensor) -> Any:
    """The value that the node of a fake tensor has: one that no later write to its form changes. Public replacement:
    `Tensor.detach` under the mode of fake tensors."""
    return torch.fx.experimental.proxy_tensor.extract_val(x)


without_proxies = torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing
"""In a block, make_fx does not record how open sizes are computed. Public replacement: none."""


def without_code() -> AbstractContextManager[Any]:
    """In a block, make_fx generates no code for what it traces until that is called. Public replacement: an option of
    make_fx to return the graph."""
    return torch.fx._lazy_graph_module._use_lazy_graph_module(True)


class TraceGraph:
    """The graph that make_fx is recording. Make it inside of the function that make_fx traces.

    Public replacement: a function of `torch.fx.experimental.proxy_tensor` from a traced tensor to its node.
    """

    def __init__(self) -> None:
        mode = torch.fx.experimental.proxy_tensor.get_proxy_mode()
        assert mode is not None  # inside of make_fx
        self._mode, self._tracer = mode, mode.tracer
        self.graph: fx.Graph = self._tracer.graph
        self.graph.eliminate_dead_code = self._drop_unused

    def _drop_unused(self, is_impure: Callable[[fx.Node], bool]) -> bool:
        """What make_fx does behind the function, which asks of each node whether it is pure. Public replacement: an
        option of make_fx to return the graph as it is."""
        unused = [node for node in reversed(self.graph.nodes) if not node.users]
        count = len(self.graph.nodes)
        while unused:
            node = unused.pop()
            if is_impure(node):
                continue
            inputs = node.all_input_nodes
            self.graph.erase_node(node)
            unused += [x for x in inputs if not x.users]
        return len(self.graph.nodes) < count

    def inline_numbers(self) -> None:
        """Record nothing of how numbers are computed from open sizes. Where such a number is an operand, it has a node
        that calls `int`, and is the value of that node."""
        self._tracer.symnode_tracker = _Numbers(self._tracer)
        self._mode.__sym_dispatch__ = lambda function, types, args, kwargs: function(*args, **kwargs)

    def node_of(self, x: Tensor) -> Any:
        """The node of a traced tensor, which transforms of torch.func may have wrapped; None where it has no node."""
        slot = torch.fx.experimental.proxy_tensor.get_proxy_slot(unwrap(x), self._tracer, None)
        return None if slot is None else slot.proxy.node

    def find_last(self) -> Any:
        """The last node, None where there is no node."""
        last = self.graph._root.prev
        return None if last is self.graph._root else last

    def nodes_after(self, node: Any) -> Iterator[Any]:
        """The nodes behind a node, in order; all of them for None."""
        following = self.graph._root.next if node is None else node.next
        while following is not self.graph._root:
            yield following
            following = following.next

    def slot_of(self, x: Tensor) -> Any:
        """What the trace knows of a tensor that no transform wraps: `proxy.node`, and `constant`, which is its value
        where torch remembers that. None for a tensor that the trace has not seen."""
        return self._tracer.tensor_tracker.get(x)

    def emit(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Any:
        """A new node that calls an operation of torch, with its fake value, as make_fx records one."""
        return self._create(operation, args, kwargs, operation.overloadpacket.__name__, value)

    def emit_argument(self, name: str, value: Any) -> Any:
        """A new node for an argument of the function, in front of all others."""
        node = self.graph.create_node("placeholder", name, (), {}, name)
        node.meta["val"] = value
        return node

    def emit_further_argument(self, name: str, value: Any) -> Any:
        """A new node for an argument of the function, behind its other arguments."""
        arguments = self.graph.find_nodes(op="placeholder")
        behind = self.graph.inserting_after(arguments[-1]) if arguments else self.graph.inserting_before()
        with behind:
            return self.emit_argument(name, value)

    def emit_item(self, items: Any, i: int, value: Any) -> Any:
        """A new node that takes an item of the value of another one."""
        return self._create(operator.getitem, (items, i), {}, operator.getitem, value)

    def emit_as(self, node: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> Any:
        """A new node that calls what another node of the trace calls."""
        new = call_function(self.graph, node.target, args, kwargs, _find_name(node.target))
        new.meta.update(meta)
        return new

    def constant_of(self, node: Any) -> Any:
        """The tensor that a node takes from outside of the trace."""
        return getattr(self._tracer.root, node.target)

    def emit_constant(self, x: Tensor, meta: dict[str, Any]) -> Any:
        """A new node that takes a tensor from outside of the trace, as make_fx records one."""
        new = self._tracer.create_arg(x)
        new.meta.clear()
        new.meta.update(meta)
        return new

    def _create(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], named: Any, value: Any) -> Any:
        node = call_function(self.graph, target, args, kwargs, name_target(named))
        here = torch.fx.traceback.current_meta
        node.meta |= {"val": value, "stack_trace": here["stack_trace"]}
        if "custom" in here:
            node.meta["custom"] = dict(here["custom"])
        return node

    def track(self, x: Tensor, node: Any) -> None:
        """Let a node be that of a tensor."""
        slot = torch.fx.experimental.proxy_tensor._ProxyTensor(self._tracer.proxy(node), None)
        torch.fx.experimental.proxy_tensor.set_proxy_slot(x, self._tracer, slot)


def _find_name(target: Any) -> str:
    """The name that a node of a trace begins with."""
    return name_target(target if target is operator.getitem else target.overloadpacket.__name__)


class _Numbers:
    """A table, in the place of make_fx's own, that knows every number which is computed from open sizes."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    def __contains__(self, number: Any) -> bool:
        return True

    def get(self, number: Any, default: Any = None) -> Any:
        return SimpleNamespace(force=lambda: self._emit(number))

    def _emit(self, number: Any) -> Any:
        node = self._tracer.graph.create_node("call_function", int, (0,), {}, "number")
        node.meta["val"] = number
        return self._tracer.proxy(node)
