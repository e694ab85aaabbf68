"""Failures: an operation of torch that a user's pass put into a program, and that raises as it runs, by its name and
sizes. What the step itself calls raises as it does in plain torch.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.base.dtypes import describe_form
from fzero.base.errors import FzeroError
from fzero.program.operation import EMITTED_BY, Node


def name_failure(node: Node, rank: int, find: Callable[[Node], Any], error: Exception) -> Exception:
    """The error that a node raised on a rank, in words; `error` itself where no pass of a user's put the node there.

    `find(x)` is the value of an operand on that rank.
    """
    emitted_by = node.meta.get(EMITTED_BY)
    if emitted_by is None or isinstance(error, (FzeroError, torch.OutOfMemoryError)):
        return error
    given = [(x.meta.get("val"), find(x)) for x in node.all_input_nodes]
    pairs = [(fake, value) for fake, value in given if isinstance(fake, Tensor) and isinstance(value, Tensor)]
    there, here = (", ".join(map(describe_form, column)) for column in zip(*pairs)) if pairs else ("no tensors",) * 2
    problem = f"raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}, of {here} on rank {rank}"
    way_out = "emit an operation that torch has for these operands"
    if here != there and not isinstance(error, NotImplementedError):
        problem += f", where rank 0 has {there}"
        way_out = "size nothing by node.meta['val'], which shows rank 0's part: slices differ in size between ranks"
    return FzeroError(f"{node.name} of pass {emitted_by!r}", problem, way_out)


def name_failure_of_line(error: Exception, code: Any, nodes: Sequence[Node], rank: int) -> Exception:
    """`name_failure` of an error in generated code, whose lines each compute one of `nodes`: the variable of its
    name."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    if trace is None:
        return error
    name = linecache.getline(code.co_filename, trace.tb_lineno).partition("=")[0].strip()
    values = trace.tb_frame.f_locals
    node = next((x for x in nodes if x.name == name), None)
    return error if node is None else name_failure(node, rank, lambda x: values.get(x.name), error)
