"""Loops: a node with a program as its body, which runs once for each turn.

    loop(*Loop) -> [carry behind the last turn, each y stacked, each list]

The arguments of the body are the leaves of the carry, a slice of each of `xs`, one item of each of `lists`, and the
constants, in this order. Its results are the new carry, the `y` of the turn, and what the turn adds to each list that
the loop returns. `Argument.kind` and `Result.kind` say how these values relate across ranks, in every turn. The body
has the program's layouts. Where its carry is donated, a turn writes over the carry.

A loop over equal layers has their slices as lists. Its body names the buckets of the first layer, and `Loop.layers`
says which buckets these are in each turn.

While a step is traced, a loop is the nodes of one turn, with marks of their own around them, which the pass `roll`
takes away:

    carry    the value of a carry in any turn
    row      the slice of xs in any turn
    pick     the item of a list in any turn
    last     the value of a carry behind the last turn
    stack    the stacked values of y
    collect  the list of a value of each turn
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.program.comm import Comm
from fzero.program.kinds import Kind, Slice, kind_of_state
from fzero.program.memory import Allocator, measure_beside
from fzero.program.operation import Node, Operation, Work, nbytes
from fzero.program.ops.transfers import copy_of
from fzero.program.places import CHAIN, Where, is_placed, where_of
from fzero.program.records import comm_of, record, register, register_for_tracing, starts
from fzero.program.refusals import PASS_BUG, describe_kind, line_of
from fzero.program.work import work

if TYPE_CHECKING:
    from fzero.program.inference import Walk
    from fzero.program.program import Program


class TiledLoss(NamedTuple):
    """The cross entropy of a turn's tokens, and whether the turn returns its gradients by `hidden`, `head` and `bias`.

    The carry of the turn is the loss and the gradients by the head and its bias. The turn takes rows of `hidden` and of
    the labels, and returns the gradient by its rows of `hidden`.
    """

    ignore_index: int
    z_loss: float
    label_smoothing: float
    wanted: tuple[bool, bool, bool]


class Loop(NamedTuple):
    """The arguments of a loop's node: `Loop(*node.args)`.

    * `lists`: each is a list of nodes, or a node whose value is a list, with one item for each turn.
    * `sync`: as in `fzero.accumulate`; `TILES` of a loop of `fzero.tiled`.
    * `is_reversed`: the loop takes the rows of `xs` and the items of lists from the last to the first, and returns rows
      and lists in the order of those.
    * `kept`: so many of the last results of the body are items of lists that the loop returns.
    * `layers`: a bucket that the body names -> the bucket of each row.
    * `is_early`: the all-gathers of a turn that read nothing but lists start one turn early, those of the first turn in
      front of the loop. The copies to the device that these all-gathers read start one turn earlier still, and so do
      the reads from a disk that these copies read.
    * `loss`: what the turns compute of a cross entropy (`Turn.loss`).
    """

    body: Program
    length: int
    carry: Sequence[Any]
    xs: Sequence[Any]
    lists: Sequence[Any]
    constants: Sequence[Any]
    sync: str | None = None
    is_reversed: bool = False
    kept: int = 0
    layers: Mapping[str, Sequence[str]] = {}
    is_early: bool = False
    loss: TiledLoss | None = None

    @property
    def operands(self) -> tuple[Any, ...]:
        """What the placeholders of the body stand for, in their order."""
        return (*self.carry, *self.xs, *self.lists, *self.constants)

    def rows(self) -> Sequence[int]:
        """The row that each turn takes, in order."""
        return range(self.length)[:: -1 if self.is_reversed else 1]

    def frees(self, rows: Any) -> bool:
        """Whether the items of a list die in their turns: another loop made the list, and nothing else uses it."""
        return isinstance(rows, fx.Node) and len(rows.users) == 1

    def find_early(self) -> dict[Node, int]:
        """The all-gathers of the body that read nothing but lists, and the copies that they read -> so many turns early
        each starts: one turn in front of what reads it."""
        first = len(self.carry) + len(self.xs)
        items = set(self.body.placeholders[first : first + len(self.lists)])
        early = dict[Node, int]()
        for gather in self.body.graph.nodes:
            if starts(gather) == "gathered":
                chain, read = _find_chain(gather)
                early |= chain if read <= items else {}
        return early

    def rename(self, kind: Kind, row: int) -> Kind:
        """A kind of the body, of the layer at a row."""
        is_layer = isinstance(kind, Slice) and kind.bucket in self.layers
        return replace(kind, bucket=self.layers[kind.bucket][row]) if is_layer else kind


def _find_chain(start: Node) -> tuple[dict[Node, int], set[Node]]:
    """A start and the copies that it reads, by way of others -> its place in the chain, counted from 1; and what these
    nodes read besides."""
    chain, read = [(start, 1)], set[Node]()
    for node, at in chain:  # the list grows while it is read
        copies = {x: copy_of(x) for x in node.all_input_nodes}
        read |= {x for x, copy in copies.items() if copy is None}
        chain += [(copy, at + 1) for copy in dict.fromkeys(copies.values()) if copy is not None]
    return dict(chain), read


def loop(*args: Any) -> list[Any]:
    """The fake results. A result that a turn writes over a carry is that carry."""
    given = Loop(*args)
    body, carry = given.body, given.carry
    news = [node.meta["val"] for node in body.returned]
    last = [
        old if argument.donated else torch.empty_like(new) for old, argument, new in zip(carry, body.arguments, news)
    ]
    stacked, listed = news[len(carry) : len(news) - given.kept], news[len(news) - given.kept :]
    return [
        *last,
        *(new.new_empty((given.length, *new.shape)) for new in stacked),
        *([_empty_as(new) for _ in range(given.length)] for new in listed),
    ]


def _empty_as(x: Tensor) -> Tensor:
    """An empty tensor of the same sizes and strides."""
    return x.new_empty_strided(x.shape, x.stride())


def _find_early(node: Node) -> dict[Node, int]:
    given = Loop(*node.args)
    return given.find_early() if given.is_early else {}


def _list_writes(node: Node) -> list[Node]:
    """The operands that are written over: the carries that the body updates in place."""
    given = Loop(*node.args)
    return [old for old, argument in zip(given.carry, given.body.arguments) if argument.donated]


def _kind(walk: Walk, node: Node) -> Kind:
    given = Loop(*node.args)
    expected = iter([kind_of_state(given.body, argument) for argument in given.body.arguments])
    for x in (*given.carry, *given.xs):
        _check_operand(walk, node, walk.of(x), next(expected))
    for rows in given.lists:
        kind = next(expected)
        for row, found in enumerate(_find_kinds(walk, rows)):
            _check_operand(walk, node, found, given.rename(kind, row))
    for x in given.constants:
        _check_operand(walk, node, walk.of(x), next(expected))
    kinds = [kind_of_state(given.body, result) for result in given.body.results]
    single = len(kinds) - given.kept
    return kinds[:single] + [[given.rename(kind, row) for row in range(given.length)] for kind in kinds[single:]]


def _check_operand(walk: Walk, node: Node, kind: Kind, expected: Kind) -> None:
    if kind != expected and not _is_within(kind, expected):
        takes, wanted = describe_kind(walk.program, kind), describe_kind(walk.program, expected)
        raise walk.refuse(node, f"takes {takes} for {wanted}")


def _is_within(kind: Kind, expected: Kind | None) -> bool:
    """Whether a value of a kind may be an argument of the expected kind, which may differ along more axes."""
    if isinstance(kind, Slice) and isinstance(expected, Slice):
        return kind.over <= expected.over and replace(kind, over=expected.over) == expected
    return isinstance(kind, frozenset) and isinstance(expected, frozenset) and kind <= expected


def _moves(program: Program, node: Node) -> Iterator[Comm]:
    given, early = Loop(*node.args), _find_early(node)
    first = [entry for each in early for entry in comm_of(program, each)]
    rest = [entry for each in given.body.graph.nodes if each not in early for entry in comm_of(program, each)]
    rows = given.rows()
    for turn in range(-1, given.length):
        for row, entries in ((turn + 1, first), (turn, rest)):
            for entry in entries if row in range(given.length) else ():
                of_layers = given.layers.get(entry.bucket or "")
                yield entry if of_layers is None else entry._replace(bucket=of_layers[rows[row]])


def _work(node: Node) -> Work:
    given = Loop(*node.args)
    done = [work(each) for each in given.body.graph.nodes]
    return Work(*(given.length * sum(column) for column in zip(*done)))


def _memory(allocator: Allocator, node: Node) -> tuple[Any, ...]:
    """The results, and what a turn needs beside its arguments, which is free again behind the loop.

    A turn that does not update its carry in place makes a new one. In the last turn that is the result, and the carry
    that the turn was given needs as much memory beside it, unless it is the loop's own operand.

    Items of a turn that are parts of one buffer keep the buffer alive.

    While lists grow and die turn by turn, fewer bytes of them are alive than the whole lists have.
    """
    given = Loop(*node.args)
    body, carry, single = given.body, given.carry, len(given.body.results) - given.kept
    places, zeros = list[Any](), torch.zeros(len(allocator.ranks), dtype=torch.int64, device="cpu")
    grown: dict[Where, Any] = dict.fromkeys(CHAIN, zeros)
    inside, held = Allocator(body, allocator.ranks.tolist()), dict[Any, list[Any]]()
    for i, (value, result) in enumerate(zip(node.meta["val"], body.results)):
        if i < len(carry) and body.arguments[i].donated:
            places.append(allocator.at(carry[i]))
        elif i < len(carry) and result.bucket is not None:
            places.append(allocator.place((node, i), value, allocator.at(carry[i]).counts))
        elif i < single:
            places.append(allocator.new((node, i), value))
        else:
            rows = allocator.new_rows((node, i), value, result.kind)
            key = inside.at(body.returned[i]).key
            if key in held:  # parts of one buffer
                rows = [row._replace(key=first) for row, first in zip(rows, held[key])]
            else:
                held[key] = [row.key for row in rows]
                allocator.nbytes.update(dict.fromkeys(held[key], inside.nbytes[key]))
                grown[where_of(result)] = grown[where_of(result)] + inside.nbytes[key]
            places.append(rows)
    made = sum((allocator.bytes_of(x) for x, argument in zip(carry, body.arguments) if not argument.donated), 0)
    ahead: dict[Where, int] = dict.fromkeys(CHAIN, 0)  # bytes of what starts early, for the turns to come
    for each, turns in _find_early(node).items():
        ahead[record(each).to or "device"] += min(turns, given.length - 1) * nbytes(each.meta["val"])
    for where in CHAIN if is_placed(body) else ("device",):
        beside = measure_beside(inside, where) + ahead[where]
        allocator.scratch_at[where][node] = beside - _count_absent(allocator, given, grown[where], where)
    if given.length == 1:
        allocator.scratch[node] = allocator.scratch[node] - made
    return (places,)


def _count_absent(allocator: Allocator, given: Loop, grown: Any, where: Where) -> Any:
    """[R] the bytes of lists there that are not alive in the turn that needs most: of the lists that the loop returns,
    which grow by `grown` a turn, those of the other turns that the lists that it frees leave no room for."""
    arguments = given.body.arguments[len(given.carry) + len(given.xs) :]
    pairs = [(rows, argument) for rows, argument in zip(given.lists, arguments) if where_of(argument) == where]
    freed = sum((allocator.nbytes[allocator.at(rows)[0].key] for rows, _ in pairs if given.frees(rows)), 0)
    return given.length * grown - (given.length - 1) * (grown - freed).clamp(min=0)


def _line(program: Program, node: Node) -> str:
    given = Loop(*node.args)
    layers = f", each one layer {'back' if given.is_reversed else 'on'}" if given.layers else ""
    words = {1: "gathers one turn", 2: "copies two turns", 3: "reads three turns"}
    early = "".join(f", {words[turns]} early" for turns in sorted({*_find_early(node).values()}, reverse=True))
    return f"{given.length} times{layers}{early}:"


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
        early=_find_early,
    )
)


# marks of a trace


def number_of(mark: Node) -> int:
    """The number of the turn that a mark is at the border of."""
    _, number, *_ = mark.args
    return int(number)


def check_users(nodes: list[Node], known: set[Node]) -> None:
    """Refuse a value of a turn that the step uses outside of it: there is one for each turn.

    `nodes` are those of a turn, `known` the nodes that may use them.
    """
    for node in nodes:
        for user in node.users:
            if user not in known:
                problem = f"a value that the body of a scan computes{line_of(node)} is used outside of it"
                way_out = "return it from the body: as y it is stacked over the turns"
                raise FzeroError("scan", problem + line_of(user), way_out)


def _refuse(program: Program, node: Node, rank: Any) -> NoReturn:
    raise FzeroError(node.name, "a mark of a trace is in a program", PASS_BUG)


def _join_axes(walk: Walk, node: Node) -> Kind:
    kind = walk.of(node.args[0])
    return kind | frozenset(node.args[2]) if isinstance(kind, frozenset) else kind


def _find_kinds(walk: Walk, rows: Any) -> list[Kind]:
    """The kinds of the items of a list, which is a list of nodes or one node."""
    return walk.of(rows) if isinstance(rows, fx.Node) else [walk.of(x) for x in rows]


def _join_kinds(walk: Walk, node: Node) -> Kind:
    """The kind of an item in any turn: a value that differs between ranks in one turn does so in all."""
    kinds = _find_kinds(walk, node.args[0])
    return kinds[0].union(*kinds) if all(isinstance(kind, frozenset) for kind in kinds) else kinds[0]


def _list_kinds(walk: Walk, node: Node) -> Kind:
    x, _, length, buckets = node.args
    kind = walk.of(x)
    return [replace(kind, bucket=buckets[i]) if isinstance(kind, Slice) else kind for i in range(length)]


_SAME: dict[str, Any] = {"kind": lambda walk, node: walk.of(node.args[0]), "perform": _refuse}

carry = register_for_tracing(
    "carry(Tensor x, int turn, str[] axes) -> Tensor",
    lambda x, turn, axes: x.new_empty(x.shape),
    kind=_join_axes,
    perform=_refuse,
)
row = register_for_tracing("row(Tensor xs, int turn) -> Tensor", lambda xs, turn: xs.new_empty(xs.shape[1:]), **_SAME)
pick = register_for_tracing(
    "pick(Tensor[] rows, int turn) -> Tensor",
    lambda rows, turn: _empty_as(rows[0]),
    kind=_join_kinds,
    perform=_refuse,
)
last = register_for_tracing("last(Tensor x, int turn) -> Tensor", lambda x, turn: x.new_empty(x.shape), **_SAME)
stack = register_for_tracing(
    "stack(Tensor y, int turn, int length) -> Tensor", lambda y, turn, length: y.new_empty((length, *y.shape)), **_SAME
)
collect = register_for_tracing(
    "collect(Tensor x, int turn, int length, str[] buckets) -> Tensor[]",
    lambda x, turn, length, buckets: [_empty_as(x) for _ in range(length)],
    kind=_list_kinds,
    perform=_refuse,
)
"""`buckets` are those of a slice in each turn."""
