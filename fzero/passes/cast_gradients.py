"""The cast_gradients pass: means of gradients over ranks are taken, and travel, in a dtype of the user's choice."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from fzero.passes.order import find_changes
from fzero.program import ops
from fzero.program.arguments import LeafMove, operand_of
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import is_call, storage

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
    means = program.graph.find_nodes(op="call_function", target=ops.scatter)
    means += program.graph.find_nodes(op="call_function", target=ops.all_reduce)
    changed = find_changes(program.graph)
    for node in reversed(means):  # the mean over a later axis first: its cast is then a user of the earlier mean
        to = program.reduce_dtypes.get(_find_leaf(program, node), dtype)
        if to is not None and _is_mean_of_gradient(node):
            _cast_mean(program, node, to, changed)
    program.graph.eliminate_dead_code()
    return program


def _is_mean_of_gradient(node: Node) -> bool:
    value = node.meta["val"]
    is_marked = is_call(node, ops.scatter) or (bool(node.kwargs.get("leaf")) and value.ndim > 0)
    return is_marked and value.is_floating_point()


def _find_leaf(program: Program, node: Node) -> str:
    """The path of the leaf whose gradient a node takes the mean of."""
    if is_call(node, ops.scatter):
        return program.layout_of(node).leaves[LeafMove(*node.args).leaf].path
    return str(node.kwargs.get("leaf", ""))


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
