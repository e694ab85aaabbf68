"""The prefetch pass: start communication early and wait for it late, by the program's own costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Mapping
from itertools import accumulate

from torch import fx

from fzero.base.torch_private_functions import inputs_of
from fzero.passes.host_updates import order_updates
from fzero.passes.order import find_origins, reorder
from fzero.program import ops
from fzero.program.arguments import start_of
from fzero.program.operation import Node, nbytes
from fzero.program.ops.loops import Loop
from fzero.program.ops.transfers import copy_of, count_bytes, is_of_saved_value
from fzero.program.places import is_placed
from fzero.program.program import Program
from fzero.program.records import find_loops, is_call, starts
from fzero.program.timeline import COMPUTE, Costs, Lanes

SLACK = 2.0
"""Start an all-gather early enough to hide SLACK times its estimated seconds, because rates are estimates."""
SPARE = 0.005
"""The part of a step's compute for which it may wait, so that gradients are sent before gathered weights arrive. Steps
with state elsewhere do not: the budget's estimates of what copies cost know nothing of such waits."""


def prefetch(program: Program, *, memory: int | None = None) -> Program:
    """Start each all-gather as early as it takes to hide it behind compute, and no earlier. Start copies of state to
    the device in front of that in the same way, and reads of state from a disk in front of these. Wait for each
    reduce-scatter where its result is used, where another one starts and it is done, or where a gathered buffer arrives
    and it is almost done. Update state on the host as gradients arrive there.

    A loop over layers gathers the layer of the next turn while it computes. It copies the layer behind that one from
    the host, and reads the layer behind this one from a disk.

    Saved values that move to the host (`remat`) leave the device where their copies are done, and start to come back
    early in the same way. At most `memory` bytes of them wait to leave at once, and as many come back ahead of their
    use; by default twice the largest of them and twice their mean.

    `program.rates` gives the seconds. At most `memory` bytes of gathered buffers await their first use at once, at
    most `memory` bytes of copies, and at most `memory` bytes of gradients are being sent; by default twice the largest
    bucket. The peak grows by at most the sum of these. On the host at most `memory` bytes that were read in front of
    all-gathers await their use, and at most as many are being written; by default twice the largest read. Same results,
    bit for bit. All-gathers keep their order, and so do reduce-scatters, copies, reads and writes.
    """
    program = program.take()
    costs = program.costs()
    limit = 2 * _find_largest(program) if memory is None else memory
    gathers = {node: _list_with_copies(node, costs) for node in program.graph.nodes if starts(node) == "gathered"}
    _start_early(program.graph, gathers, costs, limit)
    to_device = program.graph.find_nodes(op="call_function", target=ops.to_device)
    of_state = (node for node in to_device if not is_of_saved_value(node))
    copies = {node: moving for node in of_state if _takes_state(moving := _list_with_copies(node, costs))}
    _start_early(program.graph, copies, costs, limit)
    reads = program.graph.find_nodes(op="call_function", target=ops.read)
    staged = 2 * max((nbytes(node.meta["val"]) for node in reads), default=0) if memory is None else memory
    _start_early(program.graph, {node: [node] for node in reads}, costs, staged)
    arrivals = set() if is_placed(program) else {wait for start in gathers for wait in start.users}
    reorder(program.graph, _wait_late(program, costs, arrivals, limit))
    reorder(program.graph, order_updates(program, costs))
    if program.graph.find_nodes(op="call_function", target=ops.write):
        reorder(program.graph, _wait_for_writes(program.graph, staged))
    _schedule_values(program.graph, costs, memory)
    for node in find_loops(program.graph):
        node.args = tuple(_gather_early(Loop(*node.args), costs, memory))
    return program


def _schedule_values(graph: fx.Graph, costs: Costs, memory: int | None) -> None:
    """Let saved values of the forward pass go late, and bring them back early."""
    waits = list(filter(is_of_saved_value, graph.find_nodes(op="call_function", target=ops.arrive)))
    if not waits:
        return
    sizes = [nbytes(wait.meta["val"]) for wait in waits]
    limit = 2 * max(sizes) + 2 * sum(sizes) // len(sizes) if memory is None else memory
    away = {wait: [wait, *wait.users] for wait in waits if is_call(start_of(wait), ops.to_host)}
    reorder(graph, _let_go_late(graph, away, costs, limit))
    back = {start_of(wait): [start_of(wait)] for wait in waits if wait not in away}
    _start_early(graph, back, costs, limit, is_queue=True)


def _let_go_late(graph: fx.Graph, away: Mapping[Node, list[Node]], costs: Costs, memory: int) -> list[Node]:
    """The nodes in their new order: waits for copies to the host move back, each with the nodes that its list has, to
    where the copy is done. They come earlier where the copy is used, or more than `memory` bytes would wait."""
    lanes, order = Lanes(costs), list[Node]()
    waiting: dict[Node, int] = {}  # oldest first
    copied = {node: wait for wait, nodes in away.items() for node in nodes}

    def perform(nodes: list[Node]) -> None:
        lanes.run(nodes)
        order.extend(nodes)

    def finish(wait: Node) -> None:
        del waiting[wait]
        perform(away[wait])

    for node in graph.nodes:
        if node in away:
            waiting[node] = nbytes(node.meta["val"])
            while sum(waiting.values()) > memory:
                finish(next(iter(waiting)))
        elif node not in copied:
            for wait in {copied[x]: None for x in node.all_input_nodes if x in copied}:
                if wait in waiting:
                    finish(wait)
            perform([node])
        for wait in [wait for wait in waiting if lanes.done_at[start_of(wait)] <= lanes.now]:
            finish(wait)
    return order


def _gather_early(loop: Loop, costs: Costs, memory: int | None) -> Loop:
    """A loop that gathers the layer of the next turn during each turn, where that or its copies take time and fit."""
    early = loop.find_early()
    seconds = sum(costs[node].seconds + sum(each for _, each in costs[node].comms) for node in early)
    limit = 2 * _find_largest(loop.body) if memory is None else memory
    fits = sum(nbytes(node.meta["val"]) for node in early if starts(node)) <= limit
    return loop._replace(is_early=loop.length > 1 and seconds > 0 and fits)


def _find_largest(program: Program) -> int:
    """Bytes of the largest gathered buffer; where nothing is gathered, of the largest gradients that are scattered."""
    sizes = dict[str, int]()
    for node in program.graph.nodes:
        how = starts(node)
        if how:
            ranks = program.layout_of(node).world if how == "scattered" else 1
            sizes[how] = max(sizes.get(how, 0), ranks * nbytes(node.meta["val"]))
    return sizes.get("gathered", sizes.get("scattered", 0))


def _list_with_copies(start: Node, costs: Costs) -> list[Node]:
    """A start behind the copies from elsewhere that it reads, and behind what the host computes for it. What other
    nodes in front of the start use stays where it is."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        for x in node.all_input_nodes:
            is_of_copy = copy_of(x) is not None or is_call(x, ops.arrive)
            if x not in found and x.op == "call_function" and (is_of_copy or costs[x].lane != COMPUTE):
                visit(x)
        found[node] = None

    visit(start)
    moving = {start}
    for node in reversed(found):  # users first
        if all(user in moving or user > start for user in node.users):
            moving.add(node)
    return [node for node in found if node in moving]


def _takes_state(moving: list[Node]) -> bool:
    """Whether nodes take nothing but arguments and each other's values."""
    return all(x.op == "placeholder" or x in moving for node in moving for x in node.all_input_nodes)


def _wait_for_writes(graph: fx.Graph, memory: int) -> list[Node]:
    """The nodes in their new order: waits for writes to a disk move forward, so that at most `memory` bytes, or one
    write, are on their way."""
    order: dict[Node, None] = {}
    writing: dict[Node, int] = {}  # write that nothing has waited for -> its bytes, oldest first
    for node in graph.nodes:
        if is_call(node, ops.write):
            size = count_bytes(node)
            while writing and sum(writing.values()) + size > memory:
                start = next(iter(writing))
                order.update(dict.fromkeys(start.users))
                del writing[start]
            writing[node] = size
        elif is_call(node, ops.arrive):
            writing.pop(start_of(node), None)
        order.setdefault(node)
    return list(order)


def _start_early(
    graph: fx.Graph, chosen: Mapping[Node, list[Node]], costs: Costs, memory: int, is_queue: bool = False
) -> None:
    """Move the `chosen` starts forward. They stay in the order of their uses. With each move the nodes that its list
    has. With `is_queue` a start leaves time for those behind it, too.

    Each start moves from its place at the first use towards its best place, as long as the bytes that await their use
    leave room for it.
    """
    if not chosen:
        return
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    wanted = _find_best_starts(nodes, position, list(chosen), costs, is_queue)
    waiting = [0] * len(nodes)  # at each node: bytes that are there and not used yet
    before: list[list[Node]] = [[] for _ in nodes]
    at = sum(node.op == "placeholder" for node in nodes)  # nothing starts before the arguments, or the last start
    for start, moving in chosen.items():
        needed = {source for node in moving for source in node.all_input_nodes if source not in moving}
        earliest = max([at, wanted[start], *(position[source] + 1 for source in needed)])
        at, size = position[start], nbytes(start.meta["val"])
        while at > earliest and waiting[at - 1] + size <= memory:
            at -= 1
            waiting[at] += size
        before[at] += moving
    moved = {node for moving in chosen.values() for node in moving}
    others = [[node] if node not in moved else [] for node in nodes]
    reorder(graph, [node for at, stays in enumerate(others) for node in (*before[at], *stays)])


def _find_best_starts(
    nodes: list[Node], position: dict[Node, int], chosen: list[Node], costs: Costs, is_queue: bool
) -> dict[Node, int]:
    """Start -> the position of the node in front of which it should start, to be hidden by the compute between there
    and its use. With `is_queue` that is in front of where the next one has to start."""
    seconds = [costs[node].seconds if costs[node].lane == COMPUTE else 0.0 for node in nodes]
    clock = list(accumulate(seconds, initial=0.0))  # in front of each node
    wanted, at, begin = dict[Node, int](), len(nodes), clock[-1]
    for start in reversed(chosen):  # from the last on, because none may start later than the one behind it
        comms, duration = costs[start].comms, costs[start].seconds
        end = min(begin, clock[position[start]]) if is_queue else clock[position[start]]
        begin = end - SLACK * (comms[0][1] if comms else duration)
        wanted[start] = at = max(0, min(bisect_right(clock, begin) - 1, at))
    return wanted


def _wait_late(program: Program, costs: Costs, arrivals: Container[Node], memory: int) -> list[Node]:
    """The nodes in their new order: waits for reduce-scatters, and the nodes derived from their results, move back.

    The wait for a reduce-scatter comes at the first of these: its result is used; another reduce-scatter starts and
    this one is done by then; one of `arrivals` comes, the waits for gathered buffers, and `SPARE` is enough to wait for
    this one first; the bytes that are being sent would exceed `memory`.
    """
    origin = find_origins(program.graph, "scattered")
    derived: dict[Node, list[Node]] = {}
    for node, start in origin.items():
        derived.setdefault(start, []).append(node)
    lanes, order = Lanes(costs), list[Node]()
    sending: dict[Node, int] = {}  # reduce-scatter that nothing has waited for -> its bytes, oldest first
    spare = SPARE * sum(cost.seconds for cost in map(costs.__getitem__, program.graph.nodes) if cost.lane == COMPUTE)

    def perform(nodes: list[Node]) -> None:
        lanes.run(nodes)
        order.extend(nodes)

    def finish(start: Node) -> None:
        del sending[start]
        perform(derived[start][1:])  # the first is the start itself

    for node in program.graph.nodes:
        if node in origin and origin[node] is not node:
            continue
        for source in inputs_of(node):
            if origin.get(source) in sending:
                finish(origin[source])
        for start in list(sending) if node in arrivals else ():
            late = max(lanes.done_at[start] - lanes.now, 0.0)
            if late <= spare:
                spare -= late
                finish(start)
        if starts(node) == "scattered":
            size = _count_sending(program, node)
            for start in [start for start in sending if lanes.done_at[start] <= lanes.now]:
                finish(start)
            while sending and sum(sending.values()) + size > memory:
                finish(next(iter(sending)))
            sending[node] = size
        perform([node])
        if sending.get(node, 0) > memory:
            finish(node)
    return order


def _count_sending(program: Program, start: Node) -> int:
    """Bytes that a reduce-scatter keeps alive until its wait: N blocks that it sends, N - 2 that it receives beside its
    result."""
    world = program.layout_of(start).world
    return nbytes(start.meta["val"]) * (world + max(world - 2, 0))
