"""Compilation: fragments to functions, by inductor, torch's compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.symbols import Symbols
from fzero.base.torch_private import FakeTensorMode
from fzero.base.torch_private_operators import compile_graph, hold_strides
from fzero.execution.outline import Fragment


def compile_fragment(fragment: Fragment) -> Callable[..., Sequence[Tensor]]:
    """A function that equals the fragment up to rounding. Takes seconds, and writes to inductor's cache on disk.

    Raises:
        FzeroError: where there is no C++ compiler, or where inductor fails.
    """
    own, find = Symbols(remembers=False), lambda x: x  # of no sizes: without an environment inductor caches no graph
    return hold_strides(_compile(fragment, own, find), [x.strides for x in fragment.inputs])


def compile_open(fragment: Fragment, symbols: Symbols) -> Callable[[Sequence[int]], Callable[..., Sequence[Tensor]]]:
    """A function of sizes that returns what `compile_fragment` returns, for a fragment with open sizes.

    Inductor compiles with open sizes: once, and again for sizes that do not fulfil the conditions which it asked for
    others. Raises as `compile_fragment`.
    """
    keys = {key: None for x in fragment.inputs for key in x.strides if not isinstance(key, int)}
    evaluate = symbols.evaluator(keys)
    compiled: list[tuple[Symbols, Callable[..., Any]]] = []

    def at(sizes: Sequence[int]) -> Callable[..., Sequence[Tensor]]:
        function = next((function for own, function in compiled if own.find_broken(sizes) is None), None)
        if function is None:
            own, find = symbols.copy(sizes)
            function = _compile(fragment, own, find)
            compiled.append((own, function))
        known = dict(zip(keys, evaluate(sizes)))
        strides = [tuple(known.get(step, step) for step in x.strides) for x in fragment.inputs]
        return hold_strides(lambda *given: function(*given, *sizes), strides)

    return at


@torch.no_grad()
def _compile(fragment: Fragment, own: Symbols, find: Callable[[Any], Any]) -> Callable[..., Any]:
    """What inductor makes of a fragment. `find` returns the number in the place of a key. The function takes the sizes
    of `own` behind all else: inductor's cache asks its conditions of them."""
    graph = copy.deepcopy(fragment.graph)  # inductor changes the graph that it is given
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        for i in range(len(own.sizes)):
            graph.placeholder(f"size_{i}")
    with FakeTensorMode(shape_env=own.env):
        given: list[Any] = [
            torch.empty_strided(*(tuple(map(find, x)) for x in described[:2]), dtype=described[2], device=described[3])
            for described in fragment.inputs
        ]
    try:
        return compile_graph(fx.GraphModule({}, graph), [*given, *map(find, fragment.keys), *own.sizes])
    except Exception as error:
        raise _refuse(fragment, error) from error


def _refuse(fragment: Fragment, error: Exception) -> FzeroError:
    if "InvalidCxxCompiler" in str(error):
        return FzeroError("compile", "inductor finds no C++ compiler", "install g++, or leave compile=True out")
    names = ", ".join(dict.fromkeys(str(node.target) for node in fragment.graph.nodes if node.op == "call_function"))
    reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    return FzeroError("compile", f"inductor failed on a run of {names} with {reason}", "leave compile=True out")
