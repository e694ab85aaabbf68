"""Loops: a node with a program as its body, which runs once for each turn.

    loop(body, length, carry, xs, constants, sync) -> [carry behind the last turn, each y stacked]

The arguments of the body are the leaves of the carry, a slice of each of `xs`, and the constants, in this order. Its
results are the new carry and the `y` of the turn. `Argument.kind` and `Result.kind` say how these values relate across
ranks, in every turn. The body has the program's layouts. Where its carry is donated, a turn writes over the carry.

While a step is traced, a loop is the nodes of one turn, with marks of their own around them, which `tracing.loops`
takes away:

    carry    the value of a carry in any turn
    row      the slice of xs in any turn
    last     the value of a carry behind the last turn
    stack    the stacked values of y
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.program.comm import Comm, list_comm
from fzero.program.kinds import Kind, Slice, kind_of_state
from fzero.program.memory import measure_beside
from fzero.program.operation import Node, Operation, Work
from fzero.program.records import body_of, find_bodies, register, register_for_tracing
from fzero.program.refusals import PASS_BUG
from fzero.program.work import work

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.memory import Allocator
    from fzero.program.program import Program


def loop(
    body: Program,
    length: int,
    carry: Sequence[Tensor],
    xs: Sequence[Tensor],
    constants: Sequence[Tensor],
    sync: str | None,
) -> list[Tensor]:
    """The fake results. A result that a turn writes over a carry is that carry."""
    news = [node.meta["val"] for node in body.output.args[0]]
    given = zip(carry, body.arguments, news)
    last = [old if argument.donated else torch.empty_like(new) for old, argument, new in given]
    return last + [new.new_empty((length, *new.shape)) for new in news[len(carry) :]]


def map_bodies(program: Program, rewrite: Callable[[Program], Program]) -> Program:
    """The program with the body of each loop rewritten. The program itself where it has no loop."""
    if not any(find_bodies(program.graph)):
        return program
    program = program.copy()
    for node in program.graph.nodes:
        body = body_of(node)
        if body is None:
            continue
        new = rewrite(body)
        if new.pass_state or len(new.arguments) != len(body.arguments):
            raise FzeroError(f"loop {node.name}", "a pass adds state to its body", "add state to whole programs only")
        node.args = (new, *node.args[1:])
    return program


def operands(node: Node) -> list[Node]:
    """The values that a loop's body gets as arguments, in order: of `xs` it gets slices."""
    return [given for part in node.args[2:5] for given in part]


def _list_writes(node: Node) -> list[Node]:
    """The operands that are written over: the carries that the body updates in place."""
    body, _, carry = node.args[:3]
    return [given for given, argument in zip(carry, body.arguments) if argument.donated]


def _kind(walk: Walk, node: Node) -> Kind:
    body = node.args[0]
    for argument, given in zip(body.arguments, operands(node), strict=True):
        expected, kind = kind_of_state(body, argument), walk.of(given)
        if not _is_within(kind, expected):
            walk.expect(node, given, expected)
    return [kind_of_state(body, result) for result in body.results]


def _is_within(kind: Kind, expected: Kind | None) -> bool:
    """Whether a value of a kind may be an argument of the expected kind, which may differ along more axes."""
    if isinstance(kind, Slice) and isinstance(expected, Slice):
        return kind.over <= expected.over and replace(kind, over=expected.over) == expected
    return isinstance(kind, frozenset) and isinstance(expected, frozenset) and kind <= expected


def _moves(program: Program, node: Node) -> Iterator[Comm]:
    entries = list_comm(node.args[0])
    for _ in range(node.args[1]):
        yield from entries


def _work(node: Node) -> Work:
    done = [work(each) for each in node.args[0].graph.nodes]
    return Work(*(node.args[1] * sum(column) for column in zip(*done)))


def _memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """The results, and what a turn needs beside its arguments, which is free again behind the loop.

    A turn that does not update its carry in place makes a new one. In the last turn that is the result, and the carry
    that the turn was given needs as much memory beside it, unless it is the loop's own operand.
    """
    body, length, carry = node.args[:3]
    made = sum((allocator.bytes_of(x) for x, given in zip(carry, body.arguments) if not given.donated), 0)
    allocator.scratch[node] = measure_beside(body, allocator.ranks.tolist()) - (made if length == 1 else 0)
    places = []
    for i, value in enumerate(node.meta["val"]):
        is_carry = i < len(carry)
        if is_carry and body.arguments[i].donated:
            places.append(allocator.at(carry[i]))
        elif is_carry and body.results[i].bucket is not None:
            places.append(allocator.place((node, i), value, allocator.at(carry[i]).counts))
        else:
            places.append(allocator.new((node, i), value))
    return (places,)


def _line(program: Program, node: Node) -> str:
    return f"{node.args[1]} times:"


register(
    Operation(
        name="loop",
        target=loop,
        fake=loop,
        kind=_kind,
        moves=_moves,
        writes=_list_writes,
        memory=_memory,
        work=_work,
        line=_line,
        body=lambda node: node.args[0],
    )
)


# marks of a trace


def _refuse(program: Program, node: Node, rank: Any) -> NoReturn:
    raise FzeroError(node.name, "a mark of a trace is in a program", PASS_BUG)


def _join_axes(walk: Walk, node: Node) -> Kind:
    kind = walk.of(node.args[0])
    return kind | frozenset(node.args[2]) if isinstance(kind, frozenset) else kind


_SAME: dict[str, Any] = {"kind": lambda walk, node: walk.of(node.args[0]), "perform": _refuse}

carry = register_for_tracing(
    "carry(Tensor x, int turn, str[] axes) -> Tensor",
    lambda x, turn, axes: x.new_empty(x.shape),
    kind=_join_axes,
    perform=_refuse,
)
row = register_for_tracing("row(Tensor xs, int turn) -> Tensor", lambda xs, turn: xs.new_empty(xs.shape[1:]), **_SAME)
last = register_for_tracing("last(Tensor x, int turn) -> Tensor", lambda x, turn: x.new_empty(x.shape), **_SAME)
stack = register_for_tracing(
    "stack(Tensor y, int turn, int length) -> Tensor", lambda y, turn, length: y.new_empty((length, *y.shape)), **_SAME
)
