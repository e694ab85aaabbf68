"""Traces: a step that several tests of a file run is traced once. A helper of the tests.

    pytestmark = pytest.mark.usefixtures("shared_traces")

All files of `tests/passes` do so (`conftest.py`).

Tests of stages, of donation, of places and of passes run one step under many plans. A trace depends on none of these.
A test that makes its step anew makes an equal one: the same code, over equal values. Nothing is shared of a step that
holds a tensor, a module or any other object that may change, nor of a trace that changed what the step holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest
import torch

import fzero
from fzero.base import tree
from fzero.base.ambient import find_ambient
from fzero.program.program import Program
from fzero.program.records import storage
from fzero.tracing.signatures import sign_leaf
from fzero.tracing.trace import trace
from fzero.values.regions import get_mark

_ATOMS = (
    bool, int, float, complex, str, bytes, range, type(None), type(...), type, slice, ModuleType, BuiltinFunctionType,
    torch.dtype, torch.device, torch.Size, torch._ops.OpOverload, torch._ops.OpOverloadPacket, fzero.VirtualMesh,
)  # fmt: skip
"""Classes of values that never change."""


@contextmanager
def share_traces() -> Iterator[list[int]]:
    """Within, equal steps on arguments of one signature share a trace. Gives the number of traces, and of those that
    were taken from an earlier one."""
    known: dict[Any, tuple[Any, Program]] = {}
    counts = [0, 0]

    def trace_once(
        fn: Callable[..., Any], args: tuple[Any, ...], mesh: fzero.VirtualMesh, *more: Any, **how: Any
    ) -> Program:
        key = None if any((*more, *how.values())) else _sign(fn, args, mesh)  # neither open nor on model axes
        if key is None:
            return trace(fn, args, mesh, *more, **how)
        if key in known:
            counts[1] += 1
            return known[key][1].copy()
        program = trace(fn, args, mesh)
        counts[0] += 1
        constants = all(isinstance(result.constant, _ATOMS) for result in program.results if result.is_constant)
        if constants and not program.constants and not program.readings and key == _sign(fn, args, mesh):
            known[key] = (fn, program)  # with the function, whose globals are known by their address
            return program.copy()  # as the next ones get: names of new nodes follow from the copy
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fzero.pipeline.trace", trace_once)
        yield counts


def _sign(fn: Callable[..., Any], args: tuple[Any, ...], mesh: fzero.VirtualMesh) -> Any:
    """What a trace depends on; None where that is not known."""
    leaves, treedef = tree.flatten(args)
    try:
        key = _freeze(fn, ()), find_ambient(), treedef, tuple(map(_sign_leaf, leaves)), mesh
        hash(key)
    except TypeError:
        return None
    return key


def _sign_leaf(leaf: Any) -> Any:
    signature = sign_leaf(leaf)
    return tuple(signature) if isinstance(leaf, torch.Tensor) else (type(leaf), signature)


def _freeze(value: Any, inside: tuple[Any, ...]) -> Any:
    """A key that is equal for equal values. `inside` are the functions that hold the value.

    Raises:
        TypeError: for a value that may change, or of which this is not known.
    """
    if any(value is outer for outer in inside):
        return "one that holds it"
    if isinstance(value, _ATOMS):
        return type(value), value
    freeze = functools.partial(_freeze, inside=(*inside, value))
    if isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        more = value.__defaults__, value.__kwdefaults__, vars(value).get("__wrapped__")
        return value.__code__, id(value.__globals__), *map(freeze, (*held, *more))
    if isinstance(value, functools.partial):
        return functools.partial, *map(freeze, (value.func, value.args, value.keywords))
    if isinstance(value, dict):
        return type(value), *((freeze(key), freeze(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), *map(freeze, value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(freeze, value))
    raise TypeError(f"a {type(value).__name__} may change")


def describe_trace(program: Program) -> list[Any]:
    """All that a trace says of its nodes: what they call, the forms of their values, which of them share memory, the
    user's lines, and the regions and turns that they lie in."""
    memory: dict[Any, int] = {}
    return [(*_describe_node(node), memory.setdefault(storage(node), len(memory))) for node in program.graph.nodes]


def _describe_node(node: Any) -> tuple[Any, ...]:
    called = node.name, node.op, str(node.target), str(node.args), str(node.kwargs)
    value, line, mark = node.meta.get("val"), node.meta.get("stack_trace"), get_mark(node)
    regions = len(mark.regions), mark.in_backward, [turn.number for turn in mark.turns]
    return *called, _describe_value(value), line, regions


def _describe_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, str(value.device), *map(str, (tuple(value.shape), value.stride(), value.storage_offset()))
    return list(map(_describe_value, value)) if isinstance(value, (list, tuple)) else str(value)
