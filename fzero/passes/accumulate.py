"""The accumulate pass of stage 1: add up full gradients of microbatches, and scatter each leaf's sum once."""

from __future__ import annotations

from typing import Any

import torch

from fzero.passes.order import erase_dead
from fzero.program import ops
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import is_call

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)
_SCALINGS = (_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar, _aten.neg.default)


def accumulate(program: Program) -> Program:
    """Turn sums and multiples of scattered gradients of one leaf into the scatter of the sum: k microbatches cost the
    communication of one.

    Same results up to rounding, because sums over microbatches and means over ranks change places. Full gradients
    stay alive from the first microbatch to the last.
    """
    program = program.copy()
    for node in list(program.graph.nodes):
        if not is_call(node, *_SUMS, *_SCALINGS):
            continue
        scatters = [source for source in node.all_input_nodes if is_call(source, ops.scatter)]
        if scatters and _is_linear(node, scatters):
            _swap(program, node, scatters[0])
    erase_dead(program.graph)
    return program


def _is_linear(node: Node, scatters: list[Node]) -> bool:
    """Whether a node is a sum or a multiple of scattered gradients of one leaf, and the only user of these."""
    if len(scatters) != len(node.all_input_nodes):
        return False
    if any(len(scatter.users) > 1 for scatter in scatters):
        return False
    if node.meta["val"].dtype != scatters[0].meta["val"].dtype:
        return False
    of_one_leaf = len({scatter.args[1:3] for scatter in scatters}) == 1
    given = sum(map(_is_scatter, node.args))
    return of_one_leaf and ((is_call(node, *_SCALINGS) and given == 1) or (is_call(node, *_SUMS) and given == 2))


def _swap(program: Program, node: Node, scatter: Node) -> None:
    """Replace `op(scatter(x), ...)` by `scatter(op(x, ...))`."""
    with program.graph.inserting_before(node):
        args = [arg.args[0] if _is_scatter(arg) else arg for arg in node.args]
        full = program.emit(node.target, *args, **node.kwargs)
        program.substitute(node, program.emit(ops.scatter, full, *scatter.args[1:]))


def _is_scatter(arg: Any) -> bool:
    return hasattr(arg, "op") and is_call(arg, ops.scatter)
