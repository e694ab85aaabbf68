"""Binding: the operation of a node to one rank of a live mesh, with its layout looked up once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import record
from fzero.ranks.exchanges import Steps, complete
from fzero.ranks.live import Live
from fzero.ranks.transports import Pending


class Call(NamedTuple):
    """`run` does on one rank what a node does, given the values of its arguments. A profile calls that `label`, ""
    where it has no name. `starts`: the result has to be waited for; `waits`: `run` waits for one."""

    run: Callable[..., Any]
    label: str
    starts: bool
    waits: bool


def bind(program: Program, node: Node, on: Live) -> Call:
    """What runs for a node whose operation is not aten's."""
    operation = record(node)
    assert operation.perform is not None  # the caller asks for no other
    run = operation.perform(program, node, on)
    if operation.starts:
        run = functools.partial(_start, on, run)
    elif operation.moves is not None:
        run = functools.partial(_finish, on, run)
    label = "" if operation.label is None else operation.label(program, node)
    return Call(run, label, operation.starts is not None, operation.waits)


def _start(on: Live, steps_of: Callable[..., Steps], *args: Any, **kwargs: Any) -> Pending:
    """Start the first exchange of an operation; what follows on it is done when it is waited for."""
    steps = steps_of(*args, **kwargs)
    pending = on.begin(next(steps))
    return Pending(pending.attempt, [], lambda: complete(steps, pending.wait(), on.begin))


def _finish(on: Live, steps_of: Callable[..., Steps], *args: Any, **kwargs: Any) -> Any:
    """Run an operation to its end."""
    return complete(steps_of(*args, **kwargs), None, on.begin)
