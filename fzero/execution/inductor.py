"""Compilation: fragments to functions, by inductor, torch's compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.torch_private import FakeTensorMode
from fzero.base.torch_private_operators import compile_graph
from fzero.execution.outline import Fragment


@torch.no_grad()
def compile_fragment(fragment: Fragment) -> Callable[..., Sequence[Tensor]]:
    """A function that equals the fragment up to rounding. Takes seconds, and writes to inductor's cache on disk.

    Raises:
        FzeroError: where there is no C++ compiler, or where inductor fails.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # brings sympy with it

    module = fx.GraphModule({}, copy.deepcopy(fragment.graph))  # inductor changes the graph that it is given
    with FakeTensorMode(shape_env=ShapeEnv()):  # which inductor asks for its guards; without, it caches no graph
        given: list[Any] = [
            torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=x.device) for x in fragment.inputs
        ]
    try:
        return compile_graph(module, given)
    except Exception as error:
        raise _refuse(fragment, error) from error


def _refuse(fragment: Fragment, error: Exception) -> FzeroError:
    if "InvalidCxxCompiler" in str(error):
        return FzeroError("compile", "inductor finds no C++ compiler", "install g++, or leave compile=True out")
    names = ", ".join(dict.fromkeys(str(node.target) for node in fragment.graph.nodes if node.op == "call_function"))
    reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    return FzeroError("compile", f"inductor failed on a run of {names} with {reason}", "leave compile=True out")
