"""Lists that passes add to loops: an item that each turn takes, an item that each turn returns, and both as state.

    body = copy_body(loop)                                   a body to change
    item = take_rows(loop, path, rows, kind)                 the argument of the body that is rows[i] in turn i
    rows = return_rows(program, loop, path, value, kind)     the list of the body's `value` in each turn

State that a pass adds to a body is kept by turn: row i has the state "path.i" of the step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fzero.base.errors import FzeroError
from fzero.base.torch_private import find_root
from fzero.program.kinds import UNIFORM, Kind, Slice, kind_of_state
from fzero.program.operation import Node
from fzero.program.ops.loops import Loop
from fzero.program.records import find_loops, record, storage
from fzero.program.signature import Argument, Result
from fzero.program.state_layouts import IN_A_TURN, STEP_COUNT, PassState

if TYPE_CHECKING:
    from fzero.program.program import Program


def map_bodies(program: Program, rewrite: Callable[[Program], Program]) -> Program:
    """The program with the body of each loop rewritten. The program itself where that changes nothing.

    State that `rewrite` adds to the body of a `fzero.scan` becomes state of the program, by turn.

    Raises:
        FzeroError: for a `rewrite` that returns no program; for state that it adds to the body of another loop.
    """
    news: dict[str, Program] = {}
    for node, body in find_loops(program.graph).items():
        new = rewrite(body)
        if new is body:
            continue
        if not isinstance(new, type(body)):
            problem = f"the function of map_bodies returned {new!r:.80} for its body"
            raise FzeroError(f"loop {node.name}", problem, "return a program: the body itself, or a changed copy")
        if len(new.arguments) - len(new.pass_state) != len(body.arguments):
            problem = "a pass gives its body other arguments, and the loop does not"
            raise FzeroError(f"loop {node.name}", problem, "give both with ops.take_rows")
        news[node.name] = new
    program = program.copy() if news else program
    for node in find_loops(program.graph):
        if node.name in news:
            node.args = tuple(Loop(*node.args)._replace(body=news[node.name]))
            program = _keep_by_turn(program, node) if news[node.name].pass_state else program
    return program


def copy_body(loop: Node) -> Program:
    """Give a loop a copy of its body, with a graph of its own, for a pass to change. Returns the body.

    Raises:
        FzeroError: for a node that is no loop.
    """
    if record(loop).body is None:
        raise FzeroError(loop.name, "is no loop", "give a node of program.find(ops.loop)")
    given = Loop(*loop.args)
    body = given.body.copy()
    loop.args = tuple(given._replace(body=body))
    return body


def take_rows(loop: Node, path: str, rows: Node | Sequence[Node], kind: Kind) -> Node:
    """A new argument of the body of a loop: the item of a list at the row of each turn. Changes the body's graph.

    `rows` is a list of nodes, or a node whose value is a list. `kind` is that of an item in any turn, with the names of
    the body for buckets.
    """
    given = Loop(*loop.args)
    value = (rows.meta["val"] if isinstance(rows, fx.Node) else [x.meta["val"] for x in rows])[0]
    item = given.body.graph.placeholder(f"list_{len(given.lists)}")
    item.meta["val"] = value
    bucket, leaf = _find_leaf(kind)
    _insert(loop, item, Argument(path, bucket, leaf, kind=kind), lists=[*given.lists, rows])
    return item


def return_rows(program: Program, loop: Node, path: str, value: Node, kind: Kind) -> Node:
    """The list of what a value of the body of a loop is in each turn, by rows. Changes both graphs."""
    given = Loop(*loop.args)
    body, (bucket, leaf) = given.body, _find_leaf(kind)
    taken = {storage(x) for x in (*body.placeholders, *body.returned)}
    whole = value.meta["val"].numel() * value.meta["val"].element_size()
    if storage(value) in taken or value.meta["val"].untyped_storage().nbytes() > whole:
        with body.graph.inserting_before(body.output):  # an item has memory of its own, and no more than it needs
            value = body.emit(torch.ops.aten.clone.default, value)
    body.output.args = ([*body.returned, value],)
    body = replace(body, results=(*body.results, Result(path, bucket, leaf, kind=kind)))
    loop.args = tuple(given._replace(body=body, kept=given.kept + 1))
    program.refresh_with([loop])
    with program.graph.inserting_before(loop.next):
        return program.emit(operator.getitem, loop, len(body.results) - 1)


def _keep_by_turn(program: Program, loop: Node) -> Program:
    """The program with the state of a loop's body as its own: one for each turn, but for the number of steps. Changes
    both graphs."""
    given, body = Loop(*loop.args), Loop(*loop.args).body
    count = len(body.pass_state)
    if given.sync is not None:
        raise FzeroError(f"loop {loop.name}", *IN_A_TURN)
    states = list(zip(body.pass_state, body.arguments[-count:], body.placeholders[-count:], body.returned[-count:]))
    body.output.args = (body.returned[:-count],)
    arguments, results = body.arguments[:-count], body.results[:-count]
    before = replace(body, arguments=arguments, results=results, pass_state=())
    loop.args = tuple(given._replace(body=before))
    for state, argument, item, new in states:
        if state.path == STEP_COUNT:
            body.graph.erase_node(new)
            program, steps = program.step_count()
            _insert(loop, item, Argument(STEP_COUNT, kind=UNIFORM), constants=[*Loop(*loop.args).constants, steps])
            continue
        program, added = _add_rows(program, loop, body, state, argument)
        kind, now = kind_of_state(body, argument), Loop(*loop.args)
        loop.args = tuple(now._replace(layers={**now.layers, state.bucket: [x.bucket for x in added]}))
        rows = [*now.lists, program.placeholders[-given.length :]]
        _insert(loop, item, Argument(state.path, *_find_leaf(kind), kind=kind), lists=rows)
        news = return_rows(program, loop, state.path, new, kind)
        with program.graph.inserting_before(news.next):
            for row, each in enumerate(added):
                program.return_state(each.path, program.emit(operator.getitem, news, row))
    return program


def _add_rows(
    program: Program, loop: Node, body: Program, state: PassState, argument: Argument
) -> tuple[Program, Sequence[PassState]]:
    """The program with a state for each row of a loop, and these, of a state of the body."""
    given, own = Loop(*loop.args), argument.own
    base, over = (own.bucket, own.over) if isinstance(own, Slice) else (state.bucket, own or ())
    how: dict[str, Any] = {"dtype": state.dtype, "initial": state.initial}
    how["differs"] = [axis for axis in program.mesh.names if axis in over]
    is_taken = any(x.path == f"{state.path}.0" for x in program.arguments)  # by another loop over these layers
    stem = f"{state.path}.{loop.name}" if is_taken else state.path
    for row in range(given.length):
        if base in program.layouts:  # it is like a leaf
            layout = program.layouts[given.layers.get(base, [base] * given.length)[row]]
            how["like"] = layout.leaves[state.leaf].path
        else:
            how |= {"shape": state.shape, "replicated": body.layouts[state.bucket].replicated}
        program, _ = program.add_state(f"{stem}.{row}", **how)
    return program, program.pass_state[-given.length :]


def _insert(loop: Node, item: Node, argument: Argument, **lists: Any) -> None:
    """Move a placeholder of a loop's body behind the arguments of its sort: `lists`, or `constants`, which are last."""
    given = Loop(*loop.args)
    body, others = given.body, [x for x in given.body.placeholders if x is not item]
    at = len(given.carry) + len(given.xs) + len(given.lists) if "lists" in lists else len(body.arguments)
    (others[at - 1] if at else find_root(body.graph)).append(item)
    arguments = (*body.arguments[:at], argument, *body.arguments[at:])
    loop.args = tuple(given._replace(body=replace(body, arguments=arguments), **lists))


def _find_leaf(kind: Kind) -> tuple[str | None, int]:
    """The bucket and leaf of a slice; none for other kinds."""
    return (kind.bucket, kind.leaf) if isinstance(kind, Slice) else (None, 0)
