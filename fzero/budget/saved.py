"""Saved values: what the backward pass of a trace uses of the forward pass, and what it costs to compute these values
again, or to move them to the host and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, fx

from fzero.layout.layout import layer_of
from fzero.passes.move_to_host import Saved, Uses
from fzero.passes.order import find_changes
from fzero.program import ops
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.rates import Rates
from fzero.program.records import is_call, record, storage
from fzero.program.work import work
from fzero.values.regions import Turn, get_mark

LEAST_SECONDS = 1e-9
"""The time of what costs nothing, so that bytes a second are a number."""


HIDDEN_WEIGHT = 0.05
"""What a second of a copy costs that compute hides: rates are guesses, and a machine hides less than they say."""


class Level(NamedTuple):
    """Saved values of a segment that a step does not keep.

    * `lost` are the nodes whose values are computed again, with the bytes that are not kept then (`nbytes`), and the
      `seconds` that it takes.
    * `moved` are the nodes whose values go to the host, with their bytes (`away`), and the seconds for which compute
      waits for copies (`exposed`).

    Nodes are numbers: positions in the trace, or in the segment while its levels are looked for.
    """

    lost: frozenset[int] = frozenset()
    nbytes: int = 0
    seconds: float = 0.0
    moved: frozenset[int] = frozenset()
    away: int = 0
    exposed: float = 0.0

    @property
    def freed(self) -> int:
        """The bytes that the device does not keep."""
        return self.nbytes + self.away

    @property
    def cost(self) -> float:
        """The seconds that it takes."""
        return self.seconds + self.exposed


class Segment(NamedTuple):
    """A part of the forward pass whose values are computed again, or go to the host, together: the nodes that use one
    layer, or those of a region of `remat` whose policy is "budget".

    Nodes are numbers: positions in the trace. `saved` are the nodes that the backward pass uses and that can be
    computed again, `users` the nodes of the backward pass that use them. Each of the `levels` keeps less than the one
    before.
    """

    members: tuple[int, ...]
    saved: frozenset[int]
    users: tuple[int, ...]
    levels: tuple[Level, ...]


def find_segments(traced: Program, rates: Rates, has_host: bool = False) -> list[Segment]:
    """The segments of a trace in which something can be computed again, or with `has_host` moved to the host, in order.
    Equal segments are looked at once."""
    trace = _Trace(traced, has_host)
    known: dict[Any, list[Level]] = {}
    segments = list[Segment]()
    for members in _list_members(trace):
        part = _Part(trace, members, rates)
        segments += part.describe_others()
        if not part.values:
            continue
        levels = known.get(part.signature)
        if levels is None:
            levels = known[part.signature] = list(_keep_hull(part.find_levels()))
        if levels:
            segments.append(part.describe(levels))
    return segments


def list_saved_values(traced: Program) -> list[tuple[tuple[int, ...], frozenset[int]]]:
    """The members of each segment of a trace that has values to compute again, and the nodes of these values
    (`Segment.saved`)."""
    trace = _Trace(traced, False)
    parts = (_Part(trace, members, traced.rates) for members in _list_members(trace))
    return [(tuple(map(trace.number.__getitem__, part.members)), part.saved) for part in parts if part.values]


def _list_members(trace: _Trace) -> Iterator[list[Node]]:
    """The nodes of each segment. A segment ends where a node uses another layer, and where a turn of a loop or a
    region of `remat` begins or ends."""
    members: list[Node] = []
    where: Any = None
    layer: Any = None
    for node in trace.nodes:
        mark = get_mark(node)
        if node.op != "call_function" or mark.in_backward or mark.port is not None or node in trace.layer:
            continue
        regions = [region for region in mark.regions if not region.is_local]  # these keep what a rank computes
        if regions and not regions[0].by_budget:
            continue  # the policy of the outermost region decides
        used = [trace.layer[source] for source in node.all_input_nodes if source in trace.layer]
        layer = layer if layer in used or not used else used[0]
        here = mark.turns, regions[:1] or layer
        if members and here != where:
            yield members
            members = []
        where = here
        members.append(node)
    if members:
        yield members


class _Trace:
    """What is known of all nodes of a trace."""

    def __init__(self, program: Program, has_host: bool) -> None:
        self.host = Saved(program) if has_host else None
        self.nodes = list(program.graph.nodes)
        self.number = {node: i for i, node in enumerate(self.nodes)}
        self.changed = find_changes(program.graph)
        self.maker: dict[Any, Node] = {}  # memory -> the first node whose value lies in it
        self.alive = set[Any]()  # memory that lives into the backward pass as it is
        self.layer: dict[Node, str] = {}
        """The layer of a gathered leaf, and of what is made of the leaf whenever that is used."""
        for node in self.nodes:
            memory = storage(node)
            self.maker.setdefault(memory, node)
            if node.op != "call_function" or any(get_mark(user).in_backward for user in node.users):
                self.alive.add(memory)
            if is_call(node, ops.gather):
                self.layer[node] = layer_of(program.layout_of(node).bucket)
            elif node.op == "call_function" and record(node).is_derived and len(node.all_input_nodes) == 1:
                (source,) = node.all_input_nodes
                if source in self.layer:
                    self.layer[node] = self.layer[source]


class _Chain(NamedTuple):
    """The nodes that compute a value again, the memory that has to live until then and would not otherwise, all memory
    that the nodes begin from, the bytes that are not kept then, and the seconds of the nodes."""

    nodes: set[Node]
    needs: set[Any]
    ends: set[Any]
    gain: int
    seconds: float

    def changes_with(self, memory: Any, other: _Chain) -> bool:
        """Whether this chain is another one once the value in `memory` is computed again by the `other` chain."""
        is_apart = self.nodes.isdisjoint(other.nodes) and self.needs.isdisjoint(other.needs)
        return memory in self.ends or not is_apart


class _Move(NamedTuple):
    """A value that goes to the host: its memory, the bytes that the device does not keep then, and the seconds for
    which compute waits."""

    memory: Any
    gain: int
    seconds: float

    def rate(self) -> float:
        """Bytes a second."""
        return self.gain / max(self.seconds, LEAST_SECONDS)


class _Part:
    """A segment while its levels are found. Memory names a value: that of a node and of the views of it."""

    def __init__(self, trace: _Trace, members: list[Node], rates: Rates) -> None:
        self.trace, self.members, self.rates = trace, members, rates
        self.position = {node: i for i, node in enumerate(members)}
        self.groups: dict[Any, list[Node]] = {}
        for node in members:
            self.groups.setdefault(storage(node), []).append(node)
        self.stays = {memory for memory, nodes in self.groups.items() if self._must_stay(memory, nodes)}
        self.values = [memory for memory in self.groups if memory not in self.stays and self._find_users(memory)]
        self.uses = {memory: self._find_uses(memory) for memory in self.groups} if trace.host else {}
        """The uses of the values that may move to the host."""

    def _must_stay(self, memory: Any, nodes: Sequence[Node]) -> bool:
        """Whether a value is made elsewhere, written to, gathered, sent, or used elsewhere in the forward pass."""
        if self.trace.maker[memory] not in self.position or memory in self.trace.changed:
            return True
        if any(record(node).moves is not None for node in nodes):
            return True
        users = (user for node in nodes for user in node.users)
        return any(user not in self.position and not get_mark(user).in_backward for user in users)

    def _find_uses(self, memory: Any) -> Uses | None:
        """The uses of a value that may move to the host: that the segment makes, and no collective."""
        maker = self.trace.maker[memory]
        is_here = maker in self.position and record(maker).moves is None
        return self.trace.host.find_uses(maker) if self.trace.host and is_here else None

    def _find_users(self, memory: Any) -> list[Node]:
        """The nodes of the backward pass that use a tensor in this memory."""
        nodes = (node for node in self.groups[memory] if isinstance(node.meta.get("val"), Tensor))
        return [user for node in nodes for user in node.users if get_mark(user).in_backward]

    @cached_property
    def signature(self) -> Any:
        """What is the same for equal layers, and decides about their levels."""
        others: dict[Node, int] = {}

        def name(node: Node) -> tuple[Any, ...]:
            if node in self.position:
                return ("member", self.position[node])
            known = storage(node) in self.trace.alive, node in self.trace.layer
            return ("other", others.setdefault(node, len(others)), *known)

        values = set(self.values)
        rows = []
        for node in self.members:
            given = repr(fx.map_arg((node.args, node.kwargs), name))
            memory = storage(node)
            known = memory in values, memory in self.stays, self.uses.get(memory) is not None
            rows.append((node.target, given, _describe(node), *known))
        return get_mark(self.members[0]).turns, tuple(rows)

    def find_levels(self) -> Iterator[Level]:
        """The levels, with positions in the segment. From one level to the next the value goes whose bytes save most
        for the time that it takes to compute it again, or to wait for its copies."""
        kept, again, held = set(self.values), set[Node](), set[Any]()
        level = Level()
        found: dict[Any, _Chain] = {}  # in order, so that equal layers are cut alike
        changed = list(self.values)
        while changed or found:
            found |= {memory: self._find_chain(memory, kept, again, held) for memory in changed}
            best = max(found, key=lambda memory: found[memory].gain / max(found[memory].seconds, LEAST_SECONDS))
            moved = max((self._move(x, level) for x in found if self.uses.get(x)), key=_Move.rate, default=None)
            if moved is not None and moved.rate() > found[best].gain / max(found[best].seconds, LEAST_SECONDS):
                del found[moved.memory]
                at = frozenset(self.position[node] for node in self.groups[moved.memory])
                level = level._replace(
                    moved=level.moved | at, away=level.away + moved.gain, exposed=level.exposed + moved.seconds
                )
                changed = []
            else:
                chosen = found.pop(best)
                kept.remove(best)
                again |= chosen.nodes
                held |= chosen.needs
                lost = frozenset(self.position[node] for node in self.groups[best])
                level = level._replace(
                    lost=level.lost | lost, nbytes=level.nbytes + chosen.gain, seconds=level.seconds + chosen.seconds
                )
                changed = [memory for memory, chain in found.items() if chain.changes_with(best, chosen)]
            yield level

    def _move(self, memory: Any, level: Level) -> _Move:
        """What it takes to move a value to the host, where a level has moved others."""
        gain = self._count(memory)
        return _Move(memory, gain, self._expose(level.away + gain) - self._expose(level.away))

    def _expose(self, nbytes: int) -> float:
        """The seconds for which compute waits while so many bytes go to the host and come back, in all turns. The
        forward pass of the segment hides copies to the host, and its backward pass, which takes twice as long, copies
        from there. What is hidden counts too, for little."""
        seconds, own = self.rates.copy(nbytes), self._own_seconds
        exposed = max(0.0, seconds - own) + max(0.0, seconds - 2 * own)
        return exposed + HIDDEN_WEIGHT * 2 * seconds

    @cached_property
    def _own_seconds(self) -> float:
        return self._time(set(self.members))

    def _find_chain(self, memory: Any, kept: set[Any], again: set[Node], held: set[Any]) -> _Chain:
        """What it takes to compute a value again, where the nodes `again` are computed again anyway and the memory
        `held` is alive until then anyway."""
        chain, needs, ends = set[Node](), set[Any](), set[Any]()
        stack = [node for node in self.groups[memory] if any(get_mark(user).in_backward for user in node.users)]
        while stack:
            node = stack.pop()
            own = storage(node)
            if node in chain or node in again or node in self.trace.layer:
                continue
            if node in self.position and (own == memory or own not in kept) and own not in self.stays:
                chain.add(node)
                stack += node.all_input_nodes
                continue
            ends.add(own)
            if own not in self.trace.alive and isinstance(node.meta.get("val"), Tensor):
                needs.add(own)
        gain = self._count(memory) - sum(self._count(x) for x in needs - held)
        return _Chain(chain, needs, ends, gain, self._time(chain))

    def _count(self, memory: Any) -> int:
        """Bytes of a value, in all turns that keep it."""
        maker = self.trace.maker[memory]
        users = [user for node in self.groups.get(memory, ()) for user in node.users if get_mark(user).in_backward]
        within = {turn for user in users for turn in get_mark(user).turns}
        value = next(x.meta["val"] for x in (maker, *self.groups.get(memory, ())) if isinstance(x.meta["val"], Tensor))
        return int(value.untyped_storage().nbytes()) * _count_turns(
            [turn for turn in get_mark(maker).turns if turn not in within]
        )

    def _time(self, nodes: set[Node]) -> float:
        """Seconds of these nodes, in all turns. The sum is exact, and so the same on all ranks in any order."""
        turns = _count_turns(get_mark(self.members[0]).turns)
        return turns * math.fsum(self.rates.compute(work(node)) for node in nodes)

    def describe_others(self) -> Iterator[Segment]:
        """The values that cannot be computed again and may move to the host, each as a segment of its own, such as the
        result of a layer, which the next layer uses. Its members are the nodes behind which the value may go."""
        number = self.trace.number
        for memory, uses in self.uses.items():
            if uses is not None and memory not in self.values:
                gain, at = self._count(memory), frozenset(map(number.__getitem__, uses.here))
                level = Level(moved=at, away=gain, exposed=self._expose(gain))
                users = tuple(map(number.__getitem__, uses.late))
                yield Segment((number[uses.last],), frozenset(), users, (level,))

    @property
    def saved(self) -> frozenset[int]:
        """The values of the segment, in the numbers of the trace."""
        return frozenset(self.trace.number[node] for memory in self.values for node in self.groups[memory])

    def describe(self, levels: Sequence[Level]) -> Segment:
        """The segment with these levels, in the numbers of the trace."""
        number: Callable[[Node], int] = self.trace.number.__getitem__
        users = {number(user) for memory in self.values for user in self._find_users(memory)}

        def find(positions: frozenset[int]) -> frozenset[int]:
            return frozenset(number(self.members[i]) for i in positions)

        own = (level._replace(lost=find(level.lost), moved=find(level.moved)) for level in levels)
        return Segment(tuple(map(number, self.members)), self.saved, tuple(sorted(users)), tuple(own))


def _describe(node: Node) -> Any:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def _count_turns(turns: Sequence[Turn]) -> int:
    return math.prod(turn.length for turn in turns)


def _keep_hull(levels: Iterator[Level]) -> list[Level]:
    """The levels on the convex hull of bytes over seconds, from the first on. Any other level costs more for a byte
    than a mixture of its neighbours."""
    hull = [Level()]
    for level in levels:
        if level.freed <= hull[-1].freed:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], level):
            hull.pop()
        hull.append(level)
    return hull[1:]


def _slope(a: Level, b: Level) -> float:
    """Bytes a second from one level to another."""
    return (b.freed - a.freed) / max(b.cost - a.cost, LEAST_SECONDS)
