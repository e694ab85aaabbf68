"""Lockstep: run a program for every rank of its mesh in one process, node by node, with exchanges computed across the
ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.base.ambient import disable_autocast
from fzero.base.errors import FzeroError
from fzero.base.mesh import VirtualMesh
from fzero.base.randomness import step_seed
from fzero.base.torch_private import version_of
from fzero.execution import claims
from fzero.execution.failures import name_failure
from fzero.execution.loops import operands, run_turns
from fzero.files import OnDisk
from fzero.program.inference import infer
from fzero.program.kinds import Kind
from fzero.program.memory import find_last_uses
from fzero.program.operation import Node, Operation
from fzero.program.program import Program
from fzero.program.records import body_of, find_writes, record
from fzero.program.refusals import PASS_BUG
from fzero.ranks.exchanges import AllToAll, Exchange, Steps
from fzero.ranks.link import AtOnce, Link

Values = list[Any]  # one a rank
Watch = Callable[[Node, list[dict[Node, Any]]], None]


class Seat(NamedTuple):
    """One virtual rank of a mesh: its number among all ranks, row by row."""

    mesh: VirtualMesh
    number: int

    @property
    def link(self) -> Link:
        """Copies at once, as virtual ranks compute on the host."""
        return AtOnce()

    def along(self, axis: str) -> int:
        """This rank's position along an axis, or along several axes together."""
        return self.mesh.position(self.number, axis)

    @property
    def rank(self) -> int:
        """This rank's position along the axis that state is partitioned over."""
        return self.along(self.mesh.shard_axis)


@functools.cache
def seats(mesh: VirtualMesh) -> tuple[Seat, ...]:
    """The ranks of a mesh in order of their numbers."""
    return tuple(Seat(mesh, number) for number in range(mesh.size()))


@torch.no_grad()
def run(
    program: Program,
    arguments: Sequence[Sequence[Tensor]],
    watch: Watch | None = None,
    own: Sequence[Program] = (),
) -> list[Values]:
    """The tensor results of each rank, given the tensor arguments of each rank. Writes to donated arguments. Where
    batches of ranks have other sizes, `own` has the program of each rank, which differs from `program` in sizes alone.

    `watch(node, values of each rank)` is called after each node, before values are dropped. A program that draws random
    numbers, and has no seeds among its arguments, advances torch's default CPU generator by one draw.

    Raises:
        FzeroError: where a node writes to memory that a collective is sending.
    """
    seeds = [arguments[0][i] for i in program.seeds]  # the same on all ranks
    with disable_autocast(), step_seed(seeds) if program.draws else nullcontext() as seed:
        return _run(program, own, arguments, seed, watch)


def _run(
    program: Program,
    own: Sequence[Program],
    arguments: Sequence[Sequence[Tensor]],
    seed: int | None,
    watch: Watch | None = None,
) -> list[Values]:
    alive: list[dict[Node, Any]] = [dict(zip(program.placeholders, tensors, strict=True)) for tensors in arguments]
    dying, ranks = find_last_uses(program.graph), _Ranks(program, seed, own)
    for node in program.graph.nodes:
        _step(node, program, ranks, alive, watch)
        if watch is not None:
            watch(node, alive)
        for dead, values in itertools.product(dying.get(node, ()), alive):
            del values[dead]
    return [list(fx.map_arg(program.returned, values.__getitem__)) for values in alive]


def _run_turn(
    body: Program,
    own: Sequence[Program],
    watch: Watch | None,
    seed: int | None,
    arguments: Sequence[Sequence[Tensor]],
) -> list[Values]:
    return _run(body, own, arguments, seed, watch)


def _watch_inside(watch: Watch, around: list[dict[Node, Any]], node: Node, inside: list[dict[Node, Any]]) -> None:
    """Watch a node of a loop's body: the values around the loop are alive too."""
    watch(node, [outer | inner for outer, inner in zip(around, inside)])


def _step(
    node: Node, program: Program, ranks: _Ranks, alive: list[dict[Node, Any]], watch: Watch | None = None
) -> None:
    """Run one node on all ranks, and store its value on each."""
    body = body_of(node)
    if node.op == "get_attr":
        results: Sequence[Any] = [program.constants[node.target] for _ in alive]
    elif node.op == "call_function":
        written = [[values[x] for x in find_writes(node)] for values in alive]
        ranks.check_writes([[x for x in targets if not isinstance(x, OnDisk)] for targets in written])
        calls = ranks.find_calls(node, alive)
        if body is None:
            results = ranks.call(node, calls)
        else:
            made = list[list[Any]]([] for _ in calls)
            around = [{**values, node: results} for values, results in zip(alive, made)]
            inside = None if watch is None else functools.partial(_watch_inside, watch, around)
            turn = functools.partial(_run_turn, body, ranks.find_bodies(node), inside)
            given = [operands(args) for args, _ in calls]
            results = run_turns(node, turn, ranks.seed["seed"], given, made=made)
        if any(written):
            ranks.note_versions()
    else:
        return
    for values, result in zip(alive, results, strict=True):
        values[node] = result


class _Started(NamedTuple):
    """A started collective of one rank: its result, and the tensors that it sends with their versions at the start."""

    rank: int
    result: Tensor
    sent: Sequence[Tensor]
    versions: list[int]

    def wait(self) -> Tensor:
        """The result. Raises where a node has written to the tensors that are being sent."""
        if [version_of(x) for x in self.sent] != self.versions:
            raise self.refuse()
        return self.result

    def refuse(self) -> FzeroError:
        return FzeroError(f"rank {self.rank}", "memory that a collective is sending was written to", PASS_BUG)


class _Ranks:
    """All ranks of a program's mesh, to run nodes on.

    Values share memory where they do on a live mesh: a rank that is alone on an axis gathers a view of its slices.
    Means are taken in rank order, as the transports of CPU ranks take them, so that both agree bit for bit.
    """

    def __init__(self, program: Program, seed: int | None, own: Sequence[Program] = ()) -> None:
        self.program, self.seats = program, seats(program.mesh)
        self._twins = [dict(zip(program.graph.nodes, each.graph.nodes, strict=True)) for each in own]
        self._nodes = [dict(zip(each.graph.nodes, program.graph.nodes)) for each in own]
        self.seed = {"seed": seed}
        self.find_rows = functools.cache(program.mesh.rows)
        self.sending: list[list[_Started]] = []
        """The collectives that no node has waited for, each on all ranks."""

    def find_calls(self, node: Node, alive: Sequence[dict[Node, Any]]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of a node on each rank, where these values are alive."""
        if not self._twins:
            return [fx.map_arg((node.args, node.kwargs), values.__getitem__) for values in alive]
        calls = []
        for values, twins, nodes in zip(alive, self._twins, self._nodes, strict=True):
            twin = twins[node]
            calls.append(fx.map_arg((twin.args, twin.kwargs), lambda x, nodes=nodes, values=values: values[nodes[x]]))
        return calls

    def find_bodies(self, node: Node) -> list[Program]:
        """The body of a loop on each rank, where it has other sizes there."""
        bodies = (body_of(twins[node]) for twins in self._twins)
        return [body for body in bodies if body is not None]

    def check_writes(self, written: Sequence[Sequence[Tensor]]) -> None:
        """Refuse a node that writes into these tensors of each rank, where a collective of the rank is sending them."""
        for started in self.sending if any(written) else ():
            for each, targets in zip(started, written):
                if any(_overlap(x, target) for x in each.sent for target in targets):
                    raise each.refuse()

    def note_versions(self) -> None:
        """Note the versions that tensors have behind a write elsewhere: the slices of a bucket share one counter."""
        for each in itertools.chain(*self.sending):
            each.versions[:] = [version_of(x) for x in each.sent]

    def call(self, node: Node, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Values:
        """The values of a node on all ranks, given each rank's arguments."""
        operation = record(node)
        if operation.perform is None and not operation.is_foreign:
            return [self._call_torch(node, seat, *call) for seat, call in zip(self.seats, calls)]
        if operation.waits:
            self.sending = [started for started in self.sending if started[0] is not calls[0][0][0]]
        how = self.seed if operation.draws else {}
        bound = [self._bind(node, seat) for seat in self.seats]
        results = [run(*args, **kwargs, **how) for run, (args, kwargs) in zip(bound, calls)]
        results = results if operation.moves is None else self._communicate(operation, results)
        if operation.is_foreign:
            claims.check_alike(self.program, node, self._kinds[node], results)
        return results

    @staticmethod
    def _call_torch(node: Node, seat: Seat, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return node.target(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            values = {x.node: x.value for x in claims.pair_arguments(node, args, kwargs)}
            named = name_failure(node, seat.number, values.get, error)
            if named is error:
                raise
            raise named from error

    def _bind(self, node: Node, seat: Seat) -> Callable[..., Any]:
        """The function of a node's arguments on one rank. One of an operation from outside is held to its record."""
        operation = record(node)
        run = node.target if operation.perform is None else operation.perform(self.program, node, seat)
        return claims.hold(self.program, node, seat, run, self._kinds[node]) if operation.is_foreign else run

    @functools.cached_property
    def _kinds(self) -> dict[Node, Kind]:
        return infer(self.program)

    def _communicate(self, operation: Operation, ranks: list[Steps]) -> Values:
        """Run an operation that communicates to its end on all ranks, exchange by exchange."""
        asked, results = _advance(ranks, [None] * len(ranks))
        first = asked
        while asked:
            if isinstance(asked[0], AllToAll):
                first = asked  # in front of it a held operation tells its splits
            asked, results = _advance(ranks, self._exchange(operation, asked))
        if not operation.starts:
            return results
        if not first or self.program.mesh.size(first[0].axis) == 1:  # one rank gets the memory that it sends
            sent = [result if isinstance(result, list) else [result] for result in results]
        else:
            sent = [list(each.sent) for each in first]
        versions = [[version_of(x) for x in each] for each in sent]
        self.sending.append([_Started(seat.number, *each) for seat, *each in zip(self.seats, results, sent, versions)])
        return list(self.sending[-1])

    def _exchange(self, operation: Operation, asked: Sequence[Exchange]) -> Values:
        """The results of one exchange, for each rank."""
        by = [getattr(each, "op", None) for each in asked]
        kinds = {(type(each), each.axis, op) for each, op in zip(asked, by)}
        if len(asked) != len(self.seats) or len(kinds) > 1:
            asking = [f"{type(x).__name__} over {x.axis!r}{f' by {op!r}' if op else ''}" for x, op in zip(asked, by)]
            other = next((i for i, x in enumerate(asking) if x != asking[0]), None)
            problem = "some ranks ask for an exchange that others do not ask for"
            if other is not None:
                problem = f"perform yields {asking[0]} on one rank and {asking[other]} on another"
            raise FzeroError(
                f"operation {operation.name!r}", problem, "let every rank yield the same exchanges in order"
            )
        results: Values = [None] * len(asked)
        for row in self.find_rows(asked[0].axis):
            for number, result in zip(row, asked[row[0]].join([asked[number] for number in row])):
                results[number] = result
        return results


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors have elements in the same place."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _advance(ranks: Sequence[Steps], answers: Sequence[Any]) -> tuple[list[Exchange], Values]:
    """Send each rank its answer. Returns the exchanges that ranks ask for next, and the results of ranks that ended."""
    asked, results = list[Exchange](), list[Any]()
    for steps, answer in zip(ranks, answers):
        try:
            asked.append(next(steps) if answer is None else steps.send(answer))
        except StopIteration as end:
            results.append(end.value)
    return asked, results
