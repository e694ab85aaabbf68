"""Draws: the random operations of a trace, numbered in its order."""

from __future__ import annotations

import operator
from typing import Any

import torch

from fzero.base.errors import FzeroError
from fzero.base.torch_private import schema_of
from fzero.program import ops
from fzero.program.aten import find_functional
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import find_writes, is_random, name_of

_aten = torch.ops.aten


def number_draws(program: Program) -> None:
    """Replace each random operation by `ops.draw` with its number, in the order of the trace."""
    for number, node in enumerate(filter(is_random, program.graph.nodes)):
        with program.graph.inserting_before(node):
            program.substitute(node, _emit_draw(program, number, node))


def _emit_draw(program: Program, number: int, node: Node) -> Node:
    """The node that replaces a random operation.

    `ops.draw` may write only into memory that no other node uses. An in-place operation on such memory, a new empty
    tensor, stays in place; any other draws into a clone, which is then copied into the operand. An operation that
    writes into other operands gives way to its functional form, whose results are then copied into these.

    Raises:
        FzeroError: for an operation that writes into such an operand and has no functional form.
    """
    meta = {key: value for key, value in node.meta.items() if key != "val"}

    def emit(target: Any, *args: Any, **kwargs: Any) -> Node:
        new = program.emit(target, *args, **kwargs)
        new.meta.update(meta)
        return new

    written, (first, *rest) = find_writes(node), node.args
    if not written:
        return emit(ops.draw, number, node.target, *node.args, **node.kwargs)
    if written != [first]:
        functional = find_functional(node.target)
        if functional is None:
            problem = f"{name_of(node)} writes what it draws into an argument other than its first"
            way_out = "draw with an operation that returns it, such as torch.rand_like"
            raise FzeroError(node.stack_trace, problem, way_out)
        value, taken = written[-1].meta["val"], {x.name for x in schema_of(functional).arguments}
        kwargs = {"dtype": value.dtype, "device": value.device, **node.kwargs}
        kwargs = {key: value for key, value in kwargs.items() if key in taken}
        drawn = emit(ops.draw, number, functional, *node.args, **kwargs)
        count = len(schema_of(functional).returns)
        items = [emit(operator.getitem, drawn, i) for i in range(count)] if count > 1 else [drawn]
        copies = [emit(_aten.copy_.default, *pair) for pair in zip(written[::-1], items[::-1])]
        return items[0] if len(written) < count else copies[-1]
    if len(first.users) == 1 and "empty" in name_of(first):
        return emit(ops.draw, number, node.target, *node.args, **node.kwargs)
    clone = emit(_aten.clone.default, first)
    return emit(_aten.copy_.default, first, emit(ops.draw, number, node.target, clone, *rest, **node.kwargs))
