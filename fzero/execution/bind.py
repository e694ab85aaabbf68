"""Binding: a node's operation as a function for one rank of a live mesh, with its layout looked up once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fzero.execution.claims import hold
from fzero.program.kinds import Kind
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import record
from fzero.ranks.exchanges import Steps, complete
from fzero.ranks.live import Live
from fzero.ranks.transports import Pending


class Call(NamedTuple):
    """A node's operation on one rank: `run` takes the values of the node's arguments and returns its value.

    `label` is the name of the operation in a profile, "" for none. `starts`: `run` returns a `Pending`, for another
    node to wait for. `waits`: `run` waits for a `Pending`.
    """

    run: Callable[..., Any]
    label: str
    starts: bool
    waits: bool


def bind(program: Program, node: Node, on: Live, kinds: Mapping[Node, Kind] | None = None) -> Call:
    """The `Call` of a node whose operation has `perform`, as every operation has that is not aten's. With the `kinds`
    of all nodes, an operation from outside of fzero is held to its record (`fzero.execution.claims`)."""
    operation = record(node)
    run = node.target if operation.perform is None else operation.perform(program, node, on)
    if kinds is not None and operation.is_foreign:
        run = hold(program, node, on, run, kinds[node])
    if operation.starts:
        run = functools.partial(_start, on, run)
    elif operation.moves is not None:
        run = functools.partial(_finish, on, run)
    label = "" if operation.label is None else operation.label(program, node)
    return Call(run, label, operation.starts is not None, operation.waits)


def _start(on: Live, steps_of: Callable[..., Steps], *args: Any, **kwargs: Any) -> Pending:
    """Start the first exchange of an operation. The rest of the operation runs in the wait. One rank may need no
    exchange."""
    steps = steps_of(*args, **kwargs)
    try:
        pending = on.begin(next(steps))
    except StopIteration as end:
        result = end.value
        return Pending(on.members.begin("nothing"), [], lambda: result)
    return Pending(pending.attempt, [], lambda: complete(steps, pending.wait(), on.begin))


def _finish(on: Live, steps_of: Callable[..., Steps], *args: Any, **kwargs: Any) -> Any:
    """Run an operation that communicates to its end."""
    return complete(steps_of(*args, **kwargs), None, on.begin)
