"""The prefetch pass: communication starts early and is waited for late, as the program's own costs say."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from torch import fx

from fzero.passes.order import find_derived, rearrange
from fzero.program.operation import Node, nbytes
from fzero.program.program import Program
from fzero.program.records import starts
from fzero.program.timeline import Costs, Lanes

SLACK = 2.0
"""Start an all-gather early enough to hide SLACK times its estimated seconds, because rates are estimates."""


def prefetch(program: Program, *, memory: int | None = None) -> Program:
    """Start each all-gather as far in front of its use as there is compute to hide it, and no further; wait for each
    reduce-scatter where its result is used, or where another one starts and it is done.

    Seconds are those of `program.rates`. Same results, bit for bit; each kind of collective stays in its order. No more
    than `memory` bytes of gathered buffers await their first use at once, and no more of gradients are on their way: by
    default twice the largest bucket. The peak grows by no more than both.
    """
    program = program.copy()
    costs = program.costs()
    memory = 2 * _largest(program.graph) if memory is None else memory
    rearrange(program.graph, _start_early(list(program.graph.nodes), costs, memory))
    rearrange(program.graph, _wait_late(program, costs, memory))
    return program


def _largest(graph: fx.Graph) -> int:
    """Bytes of the largest buffer that is gathered."""
    gathers = (node for node in graph.nodes if starts(node) == "gathered")
    return max((nbytes(node.meta["val"]) for node in gathers), default=0)


def _start_early(nodes: list[Node], costs: Costs, memory: int) -> list[Node]:
    """The nodes with each all-gather further in front, in the order of use."""
    position = {node: index for index, node in enumerate(nodes)}
    gathers = [node for node in nodes if starts(node) == "gathered"]
    wanted = _find_best_starts(nodes, position, gathers, costs)
    waiting = [0] * len(nodes)  # bytes that are gathered by then and not used yet
    before: list[list[Node]] = [[] for _ in nodes]
    at = sum(node.op == "placeholder" for node in nodes)
    for start in gathers:
        earliest = max([at, wanted[start], *(position[source] + 1 for source in start.all_input_nodes)])
        at, size = position[start], nbytes(start.meta["val"])
        while at > earliest and waiting[at - 1] + size <= memory:
            at -= 1
            waiting[at] += size
        before[at].append(start)
    others = [[node] if node not in wanted else [] for node in nodes]
    return [node for at, stays in enumerate(others) for node in (*before[at], *stays)]


def _find_best_starts(
    nodes: list[Node], position: dict[Node, int], gathers: list[Node], costs: Costs
) -> dict[Node, int]:
    """In front of which node each all-gather should start, so that what is computed until its use hides it."""
    clock = list(accumulate((costs[node].seconds for node in nodes), initial=0.0))  # in front of each node
    wanted, at = dict[Node, int](), len(nodes)
    for start in reversed(gathers):
        latest = bisect_right(clock, clock[position[start]] - SLACK * costs[start].comms[0][1]) - 1
        wanted[start] = at = min(latest, at)
    return wanted


def _wait_late(program: Program, costs: Costs, memory: int) -> list[Node]:
    """The nodes with each wait for a reduce-scatter, and what is derived from it alone, further behind."""
    origin = find_derived(program.graph, "scattered")
    derived: dict[Node, list[Node]] = {}
    for node, start in origin.items():
        derived.setdefault(start, []).append(node)
    lanes, order = Lanes(costs), list[Node]()
    sending: dict[Node, int] = {}  # bytes of what is on its way, oldest first

    def perform(nodes: list[Node]) -> None:
        lanes.run(nodes)
        order.extend(nodes)

    def finish(start: Node) -> None:
        del sending[start]
        perform(derived[start][1:])

    for node in program.graph.nodes:
        if node in origin and origin[node] is not node:
            continue
        for source in node.all_input_nodes:
            if origin.get(source) in sending:
                finish(origin[source])
        if starts(node) == "scattered":
            size = _count_sending(program, node)
            for start in [start for start in sending if lanes.there[start] <= lanes.now]:
                finish(start)
            while sending and sum(sending.values()) + size > memory:
                finish(next(iter(sending)))
            sending[node] = size
        perform([node])
        if sending.get(node, 0) > memory:
            finish(node)
    return order


def _count_sending(program: Program, start: Node) -> int:
    """Bytes that a reduce-scatter keeps alive until it is waited for: what it sends, and receives from others."""
    world = program.layout_of(start).world
    return nbytes(start.meta["val"]) * (world + max(world - 2, 0))
