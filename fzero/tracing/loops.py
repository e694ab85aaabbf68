"""Loops in a trace: `fzero.scan` traces one turn between marks, and `roll` makes one loop of the nodes of the turn."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.torch_private import FakeTensor
from fzero.program import ops
from fzero.program.inference import infer
from fzero.program.kinds import Kind, Slice
from fzero.program.operation import Node
from fzero.program.ops import loops
from fzero.program.program import Argument, Program, Result
from fzero.program.records import is_call, storage
from fzero.program.refusals import line_of
from fzero.tracing.kinds import Kinds
from fzero.values.loops import Leaves, TurnOf, run_turns
from fzero.values.regions import Turn, get_mark, open_turn, set_mark
from fzero.values.sharded import Sharded


class TurnRecorder:
    """The `LoopRecorder` of a trace. `find_kinds` returns the kinds of the trace while the step runs, and `forget` lets
    leaves be gathered anew: a value that is gathered in a turn belongs to the turn."""

    def __init__(self, find_kinds: Callable[[], Kinds | None], forget: Callable[[], None]) -> None:
        self._find_kinds, self._forget = find_kinds, forget
        self.turns: list[Turn] = []
        """All turns of the trace. A turn's number is its position."""
        self.given_up: set[Turn] = set()
        """Turns that were traced again."""

    def record(self, turn: TurnOf, carry: Leaves, xs: Leaves, length: int, sync: str | None) -> tuple[Leaves, Leaves]:
        """Trace one turn. Trace again:

        * where the carry behind the turn differs along more axes than the carry in front of it: what meets the carry
          is another value then.
        * turn by turn, where autograd follows tensors of the step into the turn: it would see the derivative of one
          turn instead of all. What it follows to captured parameters alone stays a loop, without a derivative.
        """
        if _is_followed([*carry, *xs]):
            return run_turns(turn, carry, xs, length, sync)
        carry, xs = [_map_local(torch.Tensor.contiguous, x) for x in carry], [x.contiguous() for x in xs]
        axes: list[frozenset[str]] = [frozenset()] * len(carry)
        while True:
            this = Turn(length, len(self.turns), sync)
            self.turns.append(this)
            given = [self._enter(x, this, each) for x, each in zip(carry, axes)]
            slices = [loops.row(x, this.number) for x in xs]
            self._forget()
            with open_turn(this):
                news, ys = turn(given, slices)
                news, ys = [_map_local(torch.Tensor.contiguous, x) for x in news], [y.contiguous() for y in ys]
            self._forget()
            if _is_followed([*news, *ys]):
                self.given_up.add(this)
                return run_turns(turn, carry, xs, length, sync)
            behind = [self._find_axes(x) for x in news]
            if all(new <= self._find_axes(x) for x, new in zip(given, behind)):
                break
            axes = [each | new for each, new in zip(axes, behind)]
            self.given_up.add(this)
        ends = [_map_local(lambda local: loops.last(local, this.number), x) for x in news]
        stacked = [loops.stack(y, this.number, length) for y in ys]
        return list(map(_refuse_derivative, ends, news)), list(map(_refuse_derivative, stacked, ys))

    def _enter(self, x: Any, turn: Turn, axes: frozenset[str]) -> Any:
        return _map_local(lambda local: loops.carry(local, turn.number, sorted(axes)), x)

    def _find_axes(self, x: Any) -> frozenset[str]:
        """The axes along which a plain tensor differs between ranks."""
        kinds = self._find_kinds()
        node = None if kinds is None or isinstance(x, Sharded) else kinds.node_of(x)
        if kinds is None or node is None:
            return frozenset()
        kinds.node_varies(node)  # follow the trace up to here
        kind = kinds.of(node)
        return kind if isinstance(kind, frozenset) else frozenset()


def _is_followed(values: Leaves) -> bool:
    """Whether autograd follows one of these to a tensor of the step, for `torch.autograd.grad` to differentiate."""
    roots = [_take_local(x) for x in values if torch.is_grad_enabled() and x.requires_grad]
    if any(root.grad_fn is None for root in roots):
        return True
    found, waiting = set[Any](), [root.grad_fn for root in roots]
    while waiting:
        new = waiting.pop()
        if new is None or new in found:
            continue
        if isinstance(getattr(new, "variable", None), FakeTensor):  # captured parameters have data
            return True
        found.add(new)
        waiting += [source for source, _ in new.next_functions]
    return False


class _NoDerivative(torch.autograd.Function):
    """A value that refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, follows: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> NoReturn:
        problem = "a loop of a step is differentiated with respect to parameters that its body captures"
        raise FzeroError("scan", problem, "give these to the step as arguments")


def _refuse_derivative(x: Any, follows: Any) -> Any:
    """`x`, which refuses its derivative where `follows` has one."""
    if not (torch.is_grad_enabled() and follows.requires_grad):
        return x
    return _map_local(lambda local: _NoDerivative.apply(local, _take_local(follows)), x)


def _take_local(x: Any) -> Tensor:
    return x.local if isinstance(x, Sharded) else x


def _map_local(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """A function of a tensor, or of the slice of a `Sharded`, whose shape it keeps."""
    return x.with_local(function(x.local)) if isinstance(x, Sharded) else function(x)


def roll(program: Program, turns: Sequence[Turn], given_up: set[Turn]) -> Program:
    """Replace the nodes of each turn by one `ops.loop`. Changes the program's graph. `turns` has all turns by number.

    Raises:
        FzeroError: where a value of a turn is used outside of the loop without being a result of it.
    """
    if given_up:
        _erase_turns(program, given_up)
    found = dict.fromkeys(filter(None, (_find_turn(node, turns) for node in program.graph.nodes)))
    kinds = infer(program) if found else {}
    for turn in found:
        _roll_turn(program, turn, kinds, turns)
    return program


def _erase_turns(program: Program, given_up: set[Turn]) -> None:
    numbers = {turn.number for turn in given_up}
    nodes = [
        node
        for node in program.graph.nodes
        if node.op != "get_attr" and (given_up.intersection(get_mark(node).turns) or _turn_number(node) in numbers)
    ]
    _check_users(nodes, set(nodes))
    for node in reversed(nodes):
        program.graph.erase_node(node)


def _find_turn(node: Node, turns: Sequence[Turn]) -> Turn | None:
    """The outermost turn that a node belongs to, or is a mark of. A turn that computes nothing has marks only."""
    number, inside = _turn_number(node), get_mark(node).turns
    return inside[0] if inside else None if number is None else turns[number]


def _roll_turn(program: Program, turn: Turn, kinds: dict[Node, Kind], turns: Sequence[Turn]) -> None:
    members = [node for node in program.graph.nodes if get_mark(node).turns[:1] == (turn,) and node.op != "get_attr"]
    marks = [node for node in program.graph.nodes if _turn_number(node) == turn.number]
    carries, rows = ([node for node in marks if is_call(node, target)] for target in (loops.carry, loops.row))
    ends = [node for node in marks if is_call(node, loops.last, loops.stack)]
    _check_users([*members, *carries, *rows], {*members, *ends})
    kept = {end: carry for end, carry in zip(ends, carries) if end.args[0] is carry}  # the same in all turns
    carries, ends = ([node for node in nodes if node not in (*kept, *kept.values())] for nodes in (carries, ends))
    for end, carry in kept.items():
        program.substitute_all({end: carry.args[0], carry: carry.args[0]})
    used = [*(source for node in members for source in node.all_input_nodes), *(end.args[0] for end in ends)]
    own = {*members, *carries, *rows}
    constants = [node for node in dict.fromkeys(used) if node not in own]
    if ends:
        body = _make_body(program, [carries, rows, constants], members, ends, kinds)
        with program.graph.inserting_before(ends[0]):
            given = [node.args[0] for node in carries], [node.args[0] for node in rows], constants
            call = program.emit(ops.loop, roll(body, turns, set()), turn.length, *given, turn.sync)
            items = [program.emit(operator.getitem, call, i) for i in range(len(ends))]
        call.stack_trace = ends[0].stack_trace
        kinds |= {item: kinds[end] for end, item in zip(ends, items)}
        program.substitute_all(dict(zip(ends, items)))
    for node in reversed([*carries, *rows, *members]):
        program.graph.erase_node(node)


def _turn_number(node: Node) -> int | None:
    """The number of the turn that a node is a mark of; None for any other node."""
    is_mark = is_call(node, loops.carry, loops.row, loops.last, loops.stack)
    return node.args[1] if is_mark else None


def _check_users(nodes: list[Node], known: set[Node]) -> None:
    """Refuse a value of a turn that the step uses behind the loop: there is one for each turn."""
    for node in nodes:
        for user in node.users:
            if user not in known:
                problem = (
                    f"a value that the body of a scan computes{line_of(node)} is used outside of it{line_of(user)}"
                )
                raise FzeroError("scan", problem, "return it from the body: as y it is stacked over the turns")


def _make_body(
    program: Program, given: list[list[Node]], inner: list[Node], ends: list[Node], kinds: dict[Node, Kind]
) -> Program:
    """The program of a turn. A result has memory of its own: neither that of an argument nor of another result."""
    paths = {node: argument.path for node, argument in zip(program.placeholders, program.arguments)}
    graph, values, arguments = fx.Graph(), dict[Node, Node](), list[Argument]()
    for name, nodes in zip(("carry", "xs", "constant"), given):
        for i, node in enumerate(nodes):
            path = paths.get(node, f"{name}.{i}")
            values[node] = graph.placeholder(f"{name}_{i}")
            values[node].meta["val"] = node.meta["val"]
            bucket, leaf = _find_leaf(kinds[node])
            arguments.append(Argument(path, bucket, leaf, kind=kinds[node]))
    for node in inner:
        values[node] = graph.node_copy(node, values.__getitem__)
        mark = get_mark(node)
        set_mark(values[node].meta, mark._replace(turns=mark.turns[1:]))
    results, returned, taken = list[Result](), list[Node](), set(map(storage, values.values())) - _own(inner)
    body = replace(
        program, name="turn", graph=graph, arguments=tuple(arguments), results=(), constants={}, pass_state=(), read=()
    )
    for i, end in enumerate(ends):
        node = values[end.args[0]]
        if storage(node) in taken:
            node = body.emit(torch.ops.aten.clone.default, node)
        taken.add(storage(node))
        returned.append(node)
        is_carry = is_call(end, loops.last)
        kind = arguments[i].kind if is_carry else kinds[end]
        bucket, leaf = _find_leaf(kind)
        results.append(Result(f"carry.{i}" if is_carry else f"y.{i}", bucket, leaf, kind=kind))
    graph.output(returned)
    return replace(body, results=tuple(results))


def _own(inner: Sequence[Node]) -> set[Any]:
    """The memory that the nodes of a turn make."""
    made = {storage(node) for node in inner}
    given = {storage(source) for node in inner for source in node.all_input_nodes if source not in set(inner)}
    return made - given


def _find_leaf(kind: Kind) -> tuple[str | None, int]:
    """The bucket and leaf of a slice; none for other kinds."""
    return (kind.bucket, kind.leaf) if isinstance(kind, Slice) else (None, 0)
