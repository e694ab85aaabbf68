"""Timeline: when a program computes, communicates and copies, simulated on lanes from the costs of its nodes.

The lanes: the device computes; collectives use the wire of their mesh axis, or those of their axes; copies between the
device and the host use the link; what updates state on the host runs there; the disk reads and writes files.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from fzero.base.mesh import JOINT
from fzero.program.arguments import sources_of, start_of
from fzero.program.comm import Comm
from fzero.program.operation import Node
from fzero.program.ops.transfers import copy_of, count_bytes
from fzero.program.places import find_places, is_placed
from fzero.program.rates import Rates
from fzero.program.records import early_of, find_loops, find_writes, name_of, record, starts, turns_of
from fzero.program.tables import LINES, fold_layers, limit_lines
from fzero.program.work import work_on_host

if TYPE_CHECKING:
    from fzero.program.program import Program


COMPUTE, WIRE, LINK, HOST, DISK = "compute", "communication", "link", "host", "disk"
"""The lanes."""


class Span(NamedTuple):
    """An operation computes from `start` to `end`, in seconds since the beginning of the step."""

    name: str
    start: float
    end: float


class Transfer(NamedTuple):
    """A collective occupies the wire, or a copy the link or the disk, from `start` to `end`, in seconds. For `exposed`
    of these seconds compute waits.

    `is_ahead`: the program starts the collective and waits for it later, as for all-gathers and reduce-scatters. The
    `comm` of a copy has its `lane`, the link or the disk, in the place of an axis.
    """

    comm: Comm
    start: float
    end: float
    exposed: float
    is_ahead: bool = True
    lane: str = WIRE

    @property
    def name(self) -> str:
        """The collective with its bucket, "all_gather layers.0", or where it has none with its axis."""
        return f"{self.comm.op} {self.comm.bucket or self.comm.axis}"

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start

    @property
    def hidden(self) -> float:
        """The seconds during which something is computed."""
        return self.seconds - self.exposed


@dataclass(frozen=True)
class Timeline:
    """A program's schedule, which takes `seconds`. Prints as a table; `export_chrome_trace` writes a file to view.
    `spans` are on the device, and those `on_host` on the host."""

    name: str
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]
    seconds: float
    on_host: tuple[Span, ...] = ()

    @property
    def compute(self) -> float:
        """The seconds during which something is computed."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def exposed(self) -> float:
        """The seconds during which compute waits for a collective, a copy or the host: the rest of the step."""
        return self.seconds - self.compute

    @property
    def lanes(self) -> dict[str, list[Span | Transfer]]:
        """Lane -> what occupies it, in order. The lanes of a program that does not use them are left out. With
        collectives over several axes those over "tp" are in the lane "communication over tp"."""
        axes = dict.fromkeys(each.comm.axis for each in self.transfers if each.lane == WIRE)
        wires = {axis: f"{WIRE} over {axis}" for axis in axes} if len(axes) > 1 else dict.fromkeys(axes, WIRE)
        names = (COMPUTE, *(dict.fromkeys(wires.values()) or (WIRE,)), LINK, HOST, DISK)
        lanes: dict[str, list[Span | Transfer]] = {name: [] for name in names}
        lanes[COMPUTE], lanes[HOST] = [*self.spans], [*self.on_host]
        for transfer in sorted(self.transfers, key=lambda transfer: transfer.start):
            lanes[wires[transfer.comm.axis] if transfer.lane == WIRE else transfer.lane].append(transfer)
        return {lane: entries for lane, entries in lanes.items() if entries or lane in (COMPUTE, WIRE)}

    def hidden(self, *names: str) -> float:
        """The fraction, from 0 to 1, of the time of collectives that is hidden behind compute. 1 where there are none.

        Counts the collectives and copies of these `names`, such as "all_reduce" or "to_host". Without names it counts
        the collectives that are started ahead of their wait.
        """
        ahead = [each for each in self.transfers if each.is_ahead and each.lane == WIRE]
        chosen = [each for each in self.transfers if each.comm.op in names] if names else ahead
        total = sum(transfer.seconds for transfer in chosen)
        return sum(transfer.hidden for transfer in chosen) / total if total else 1.0

    def __str__(self) -> str:
        return self.table()

    def table(self, *, full: bool = False) -> str:
        """A line for each collective and copy. Where these are more than 40 lines, those of equal layers have one
        together: when the first starts and the last ends, and the sums of what is hidden and exposed. `full` lists
        each by itself."""
        waits = f"{_to_ms(self.compute)} ms of compute and {_to_ms(self.exposed)} ms of waiting"
        hidden = f"{self.hidden():.1%} of gathers and scatters are hidden"
        head = [f"{self.name}: {_to_ms(self.seconds)} ms, {waits}; {hidden}"]
        is_folded = not full and len(self.transfers) + 2 > LINES
        named = [(each.name, each) for each in self.transfers]
        groups = fold_layers(named) if is_folded else [(name, [each]) for name, each in named]
        columns = f"{'times':>6}" if is_folded else ""
        head.append(f"  {'collective':<32}{columns}{'start':>10}{'end':>10}{'hidden':>10}{'exposed':>10}  ms")
        rows = list[str]()
        for name, each in groups:
            span = min(x.start for x in each), max(x.end for x in each)
            times = *span, sum(x.hidden for x in each), sum(x.exposed for x in each)
            count = f"{len(each):>6}" if is_folded else ""
            rows.append(f"  {name:<32}{count}" + "".join(f"{_to_ms(seconds):>10}" for seconds in times))
        return limit_lines(head, rows, full)

    def chrome_trace(self) -> dict[str, Any]:
        """The schedule in the Trace Event Format, with a thread for each lane. The format counts in microseconds."""
        events: list[dict[str, Any]] = []
        for lane, (name, entries) in enumerate(self.lanes.items()):
            where = {"pid": 0, "tid": lane}
            events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
            events.extend(_describe_event(entry) | where for entry in entries)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def export_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write `chrome_trace` to a JSON file, for ui.perfetto.dev or chrome://tracing."""
        with open(path, "w") as file:
            json.dump(self.chrome_trace(), file)


class Cost(NamedTuple):
    """The seconds that a node computes, and the collectives that it starts, with the seconds of each. A node on another
    `lane` occupies that one, and the device computes meanwhile."""

    seconds: float
    comms: tuple[tuple[Comm, float], ...]
    lane: str = COMPUTE


Costs = Mapping[Node, Cost]


def cost_nodes(program: Program, rates: Rates) -> Costs:
    """Node -> its cost, by these rates, for the nodes of a program and of its loops' bodies. A loop has the seconds
    that all its turns compute, and no collectives: those are its body's."""

    places, nothing = find_places(program) if is_placed(program) else {}, Cost(0.0, ())

    def cost(node: Node) -> Cost:
        operation = record(node) if node.op == "call_function" else None
        if operation is not None and operation.to is not None:
            is_of_disk = "disk" in (operation.source, operation.to)
            copy, lane = (rates.copy_to_disk, DISK) if is_of_disk else (rates.copy, LINK)
            return Cost(copy(count_bytes(node)), (), lane)
        if places.get(node, "device") != "device":
            return Cost(rates.compute_on_host(work_on_host(node)), (), HOST)
        if operation is None:
            return nothing
        moves = () if operation.moves is None else operation.moves(program, node)
        comms = tuple((comm, rates.communicate(comm, program.mesh)) for comm in moves)
        return Cost(rates.compute(operation.work(node)), comms)

    loops = find_loops(program.graph)
    costs = {node: cost(node) for node in program.graph.nodes if node not in loops}
    for node, body in loops.items():
        inside = cost_nodes(body, rates)
        seconds = sum(inside[each].seconds for each in body.graph.nodes if inside[each].lane == COMPUTE)
        costs |= {**inside, node: Cost(turns_of(node) * seconds, ())}
    return costs


def simulate_timeline(program: Program, costs: Costs) -> Timeline:
    """The timeline of a program whose nodes have these costs.

    Nodes compute on one lane in order. Collectives over an axis use that of the axis, in the order of their starts,
    those over several axes all of theirs; copies, and operations on the host, are on lanes of their own.

    A wait holds up compute until its collective is done. A collective without a wait holds up compute at once. The
    lanes do not slow each other down. The thread that computes on the host also starts what the device computes, and
    starting takes no time.
    """
    lanes = Lanes(costs)
    lanes.run(program.graph.nodes)
    lanes.finish(program.output)
    return Timeline(program.name, tuple(lanes.spans), tuple(lanes.transfers()), lanes.now, tuple(lanes.on_host))


class Lanes:
    """The clocks of the lanes, which `run` advances node by node. Times in seconds."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.now = 0.0  # when compute has done the nodes so far
        self.free = {"to_host": 0.0, "to_device": 0.0, HOST: 0.0, DISK: 0.0}
        """When a lane has done what it was given so far. The link works in both directions at once, the disk in one."""
        self.wires: dict[str, float] = defaultdict(float)
        """The same of the wire of each mesh axis."""
        self.done_at: dict[Node, float] = {}
        """Node that starts a collective, or that is not of the compute lane -> when that is done."""
        self.waited: dict[Node, float] = {}
        """Node -> the seconds for which compute waited there."""
        self.spans: list[Span] = []
        self.on_host: list[Span] = []
        self._sent: dict[tuple[str, str], list[tuple[Comm, float, float, bool]]] = defaultdict(list)
        self._idle: list[tuple[float, float]] = []

    def run(self, nodes: Iterable[Node]) -> None:
        """Advance the clocks by these nodes, in this order."""
        for node in nodes:
            operation, cost = record(node) if node.op == "call_function" else None, self.costs[node]
            if operation is not None and operation.body is not None:
                self._run_turns(node, operation.body(node))
                continue
            if operation is not None and operation.starts:
                self._start(node)
                continue
            if cost.lane != COMPUTE:
                self._run_beside(node)
                continue
            self._compute(node)
            if operation is not None and operation.arrives:
                self._wait(node, self.done_at[start_of(node)])
            elif operation is not None and operation.waits:
                start = start_of(node)
                self._wait(node, self.done_at[start])
                self._wait_at_once(node, self.costs[start].comms[1:])  # a wait does what follows on the first exchange
            else:
                self._wait_at_once(node, cost.comms)

    def _run_turns(self, loop: Node, body: Program) -> None:
        early = sorted(early_of(loop).items(), key=lambda item: item[1])
        rest, deepest = [node for node in body.graph.nodes if node not in dict(early)], max([0, *dict(early).values()])
        done_at: list[dict[Node, float]] = [{} for _ in range(turns_of(loop))]
        for turn in range(-deepest, len(done_at)):
            for node, turns in early:
                if 0 <= turn + turns < len(done_at):
                    self.done_at |= done_at[turn + turns]
                    self._begin(node)
                    done_at[turn + turns][node] = self.done_at[node]
            if turn >= 0:
                self.done_at |= done_at[turn]
                self.run(rest)

    def _begin(self, node: Node) -> None:
        """Start a node of the next turns of a loop, behind the copies that it reads."""
        for copy in dict.fromkeys(filter(None, map(copy_of, node.all_input_nodes))):
            self._wait(node, self.done_at[copy])
        if starts(node):
            self._start(node)
        else:
            self._run_beside(node)

    def _start(self, node: Node) -> None:
        self._compute(node)
        self.done_at[node] = self._send(*self.costs[node].comms[0], is_ahead=True)

    def finish(self, output: Node) -> None:
        """Let compute wait until all lanes have done what the step gave them."""
        self._wait(output, max(*self.free.values(), *self.wires.values()))

    def _run_beside(self, node: Node) -> None:
        """Put a copy or an operation on the host on its lane, behind what it needs, and behind what the thread of the
        host did before. A copy into new memory, or of what the device computed, also waits for compute so far."""
        seconds, _, lane = self.costs[node]
        ready = (self.done_at.get(x, 0.0 if x.op == "placeholder" else self.now) for x in node.all_input_nodes)
        name = name_of(node).rstrip("_")
        clock = name if lane == LINK else lane
        behind = self.now if lane == LINK and not find_writes(node) else 0.0
        start = max(self.free[clock], self.free[HOST], behind, *ready)
        self.free[clock] = self.done_at[node] = start + seconds
        if lane != HOST:
            comm = Comm(name, lane, None, sources_of(node)[0].meta["val"].dtype, count_bytes(node))
            self._sent[lane, clock].append((comm, start, start + seconds, True))
        elif seconds:
            self.on_host.append(Span(name_of(node), start, start + seconds))

    def _compute(self, node: Node) -> None:
        if seconds := self.costs[node].seconds:
            self._wait(node, self.free[HOST])
            self.spans.append(Span(name_of(node), self.now, self.now + seconds))
            self.now += seconds

    def _send(self, comm: Comm, seconds: float, is_ahead: bool = False) -> float:
        """Put a collective on the wires of its axes, behind all earlier ones. Returns the time at which it is done."""
        axes = comm.axis.split(JOINT)
        start = max(self.now, *(self.wires[axis] for axis in axes))
        self.wires.update(dict.fromkeys(axes, start + seconds))
        self._sent[WIRE, comm.axis].append((comm, start, start + seconds, is_ahead))
        return start + seconds

    def _wait_at_once(self, node: Node, comms: Iterable[tuple[Comm, float]]) -> None:
        for comm, seconds in comms:
            self._wait(node, self._send(comm, seconds))

    def _wait(self, node: Node, until: float) -> None:
        if until > self.now:
            self.waited[node] = self.waited.get(node, 0.0) + until - self.now
            self._idle.append((self.now, until))
            self.now = until

    def transfers(self) -> Iterator[Transfer]:
        """The collectives of each wire and the copies of each lane, in order, with the seconds for which compute waited
        during each."""
        return itertools.chain.from_iterable(
            self._measure_exposed(lane, sent) for (lane, _), sent in self._sent.items()
        )

    def _measure_exposed(self, lane: str, sent: Iterable[tuple[Comm, float, float, bool]]) -> Iterator[Transfer]:
        first = 0  # one pass over both lists, which are in order of time
        for comm, start, end, is_ahead in sent:
            while first < len(self._idle) and self._idle[first][1] <= start:
                first += 1
            exposed, at = 0.0, first
            while at < len(self._idle) and self._idle[at][0] < end:
                exposed += min(end, self._idle[at][1]) - max(start, self._idle[at][0])
                at += 1
            yield Transfer(comm, start, end, exposed, is_ahead, lane)


def _describe_event(entry: Span | Transfer) -> dict[str, Any]:
    times = {"ph": "X", "name": entry.name, "ts": 1e6 * entry.start, "dur": 1e6 * (entry.end - entry.start)}
    if isinstance(entry, Span):
        return times
    return times | {"args": {"nbytes": entry.comm.nbytes, "exposed": 1e6 * entry.exposed}}


def _to_ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"
