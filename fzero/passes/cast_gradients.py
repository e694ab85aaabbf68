"""The cast_gradients pass: means of gradients over ranks are taken, and travel, in a dtype of the user's choice."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from fzero.passes.order import find_changes
from fzero.program import ops
from fzero.program.arguments import operand_of
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import find_calls, is_call, mean_of, storage

_to_copy = torch.ops.aten._to_copy.default


def cast_gradients(program: Program, *, dtype: torch.dtype | None = None) -> Program:
    """Cast each gradient to `dtype` before its mean over ranks, and the mean back to the gradient's dtype. Where
    `fzero.precision` names another dtype for a leaf, the leaf's gradients are cast to that.

    * A gradient is cast where it is computed, so that its mean is taken there: the trace takes all means at its end.
    * A mean that the step casts further is not rounded to the gradient's dtype in between. So float32 leaves that are
      used as bfloat16 get float32 gradients from `dtype=torch.float32`, also over several mesh axes.
    * Complex gradients stay as they are. So do all-reduces of 0-d values, which may be too large for float16.

    Same results up to rounding to `dtype`. FSDP2's `MixedPrecisionPolicy(reduce_dtype=...)` does the same.
    """
    if dtype is None and not program.reduce_dtypes:
        return program
    program = program.copy()
    changed = find_changes(program.graph)
    means = find_calls(program.graph, lambda known: known.mean_of is not None)
    for node in reversed(means):  # of means over two axes the later first: its cast uses the earlier mean
        leaf, value = mean_of(program, node), node.meta["val"]
        to = None if leaf is None else program.reduce_dtypes.get(leaf, dtype)
        if to is not None and value.is_floating_point() and (value.ndim > 0 or is_call(node, ops.scatter)):
            _cast_mean(program, node, to, changed)
    program.graph.eliminate_dead_code()
    return program


def _cast_mean(program: Program, node: Node, dtype: torch.dtype, changed: Container[Any]) -> None:
    """Let a node that takes a mean take it in `dtype`. `changed` is the memory that some node writes into."""
    given, gradient = node.meta["val"].dtype, operand_of(node)
    if given == dtype:
        return
    is_final = gradient.op == "call_function" and storage(gradient) not in changed
    with program.graph.inserting_before(gradient.next if is_final else node):
        cast = program.emit(_to_copy, gradient, dtype=dtype)
    with program.graph.inserting_before(node):
        _, *how = node.args
        mean = program.emit(node.target, cast, *how, **node.kwargs)
        back = program.emit(_to_copy, mean, dtype=given)
    for user in list(node.users):
        if is_call(user, _to_copy) and user.kwargs.get("dtype"):
            user.replace_input_with(node, mean)
            if _describe(user) == _describe(mean):
                program.substitute(user, mean)
    program.substitute(node, back)


def _describe(node: Node) -> tuple[object, ...]:
    value = node.meta["val"]
    return value.dtype, value.device, value.stride()
