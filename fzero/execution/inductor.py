"""Compilation: fragments to functions, by inductor, torch's compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fzero.base.errors import FzeroError
from fzero.execution.outline import Fragment


@torch.no_grad()
def compile_fragment(fragment: Fragment) -> Callable[..., Sequence[Tensor]]:
    """A function that does what the fragment does, up to rounding. Takes seconds; writes to inductor's cache on disk.

    Raises:
        FzeroError: where there is no C++ compiler, or where inductor fails.
    """
    import torch._inductor  # takes a second, so not before someone compiles

    module = fx.GraphModule({}, copy.deepcopy(fragment.graph))  # which inductor changes
    with FakeTensorMode():
        given: list[Any] = [
            torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=x.device) for x in fragment.inputs
        ]
    try:
        function = torch._inductor.compile(module, given)
    except Exception as error:
        raise _refusal(fragment, error) from error
    strides = [x.strides for x in fragment.inputs]

    def call(*tensors: Tensor) -> Sequence[Tensor]:
        return function(*map(_restride, tensors, strides))

    return call


def _restride(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides: a collective may give others than were traced."""
    return (
        x if x.stride() == strides else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    )


def _refusal(fragment: Fragment, error: Exception) -> FzeroError:
    if "InvalidCxxCompiler" in str(error):
        return FzeroError("compile", "inductor finds no C++ compiler", "install g++, or leave compile=True out")
    names = ", ".join(dict.fromkeys(str(node.target) for node in fragment.graph.nodes if node.op == "call_function"))
    reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    return FzeroError("compile", f"inductor failed on a run of {names} with {reason}", "leave compile=True out")
