"""Private names of torch about higher-order operators, which take functions, and about its compiler, each behind a
small function, as in `torch_private`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch._functorch.pyfunctorch
import torch._higher_order_ops.flex_attention
import torch._higher_order_ops.invoke_subgraph
import torch._ops
from torch import Tensor, fx

_flex: Any = sys.modules["torch._higher_order_ops.flex_attention"]  # torch hides it behind the operator of this name
flex_attention: Any = _flex.flex_attention
flex_attention_backward: Any = _flex.flex_attention_backward
"""The operators of FlexAttention. Public replacement: their names in `torch.ops`."""

operators: dict[str, Any] = torch._ops._higher_order_ops
"""Name -> higher-order operator, of those imported by now. Public replacement: `dir(torch.ops.higher_order)`."""

outside_of_transforms: Callable[[], AbstractContextManager[Any]] = (
    torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
)
"""No transform of torch.func is active within a block. Public replacement: such a context in `torch.func`."""


def index_by_tensors() -> AbstractContextManager[Any]:
    """In a block `x[i]` of 0-d tensors `i` gathers and reads no numbers, as in a `score_mod` or a `mask_mod`.

    Public replacement: such a mode in `torch.nn.attention.flex_attention`.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def differentiate_score(
    score: Callable[..., Tensor], given: Sequence[Tensor], captured: Sequence[Tensor]
) -> Callable[..., Any]:
    """The derivative of a `score_mod` as `flex_attention_backward` takes it: a graph of the score, four indices, the
    cotangent and the captured tensors. Public replacement: none is needed once `flex_attention` takes a backward."""
    with torch.enable_grad():
        return _flex.create_fw_bw_graph(score, tuple(given), tuple(captured))[1]


_regions: Any = sys.modules["torch._higher_order_ops.invoke_subgraph"]
_COMPILES_REGIONS = "is_compiling" in _regions.invoke_subgraph_placeholder.__code__.co_names
"""Whether `nested_compile_region` calls the compiler wherever `is_compiling()` is true, as in torch 2.11. With a
compiler that does nothing it would call itself for ever."""


@contextmanager
def _call_regions() -> Iterator[None]:
    """In a block `nested_compile_region` calls its function."""
    placeholder = _regions.invoke_subgraph_placeholder
    if _COMPILES_REGIONS:
        _regions.invoke_subgraph_placeholder = lambda function, *args, **kwargs: function(*args, **kwargs)
    try:
        yield
    finally:
        _regions.invoke_subgraph_placeholder = placeholder


_lock = threading.Lock()
_eager, _stance = list[object](), ExitStack()  # the blocks that run now, and the stance that the first of them took


@contextmanager
def ignore_compile() -> Iterator[None]:
    """In a block `torch.compile` does nothing: compiled functions run as they are written. A trace that came through
    torch's compiler would make it leave these functions uncompiled for ever.

    The stance is one for all threads: the last block of all threads gives it back. Public replacement: a stance of
    `torch.compiler.set_stance` for one thread.
    """
    block = object()
    with _lock:
        if not _eager:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
            _stance.enter_context(_call_regions())
        _eager.append(block)
    try:
        yield
    finally:
        with _lock:
            _eager.remove(block)
            if not _eager:
                _stance.close()


def compile_graph(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph of aten operations by inductor: a function of tensors with the strides of `inputs`, which a
    collective may not have (`hold_strides`). Symbolic sizes among `inputs` belong to the mode of the fake tensors.
    Public replacement: `torch.compile` without its tracing.

    The import of inductor takes a second, so it waits for the first fragment.
    """
    import torch._inductor

    return torch._inductor.compile(module, inputs)


def hold_strides(function: Callable[..., Any], strides: Sequence[tuple[int, ...]]) -> Callable[..., Any]:
    """A function of tensors of any strides, and of further arguments behind these, from one that relies on strides."""

    def restride(x: Tensor, stride: tuple[int, ...]) -> Tensor:
        if x.stride() == stride:
            return x
        return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)

    return lambda *given: function(*map(restride, given, strides), *given[len(strides) :])
