"""The prefetch pass: communication starts early and is waited for late."""

from __future__ import annotations

from itertools import pairwise

from torch import fx

from fzero import ops
from fzero.ops import Node, is_call
from fzero.program import Program


def prefetch(program: Program, *, ahead: int = 1) -> Program:
    """Start each all-gather when the one `ahead` of it is first used; wait for each reduce-scatter when the next one
    starts or its result is used.

    Same results, bit for bit. Live gathered bytes grow by `ahead` buckets, and by one block of gradients.
    """
    program = program.copy(f"prefetch {ahead}")
    _start_gathers_early(program.graph, ahead)
    _wait_for_scatters_late(program.graph)
    return program


def _start_gathers_early(graph: fx.Graph, ahead: int) -> None:
    """Behind the wait of the gather that is `ahead` of it, or as early as its slices are there, in the order of use."""
    nodes = list(graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    starts = [node for node in nodes if is_call(node, ops.all_gather)]
    waits = {node.args[0]: node for node in nodes if is_call(node, ops.wait)}
    triggers = starts[:1] * ahead + [waits[start] for start in starts]
    last: dict[int, Node] = {}  # position -> what was put behind the node there last
    at = 0
    for start, trigger in zip(starts[1:], triggers[1:]):
        at = min(max(at, position[trigger], *map(position.__getitem__, start.all_input_nodes)), position[start])
        if at < position[start]:
            last.get(at, nodes[at]).append(start)
            last[at] = start


def _wait_for_scatters_late(graph: fx.Graph) -> None:
    """In front of the next reduce-scatter, or of the first use, with the views of its result."""
    starts = [node for node in graph.nodes if is_call(node, ops.reduce_scatter)]
    following = dict(pairwise(starts))
    for start in starts:
        (wait,) = start.users
        family = [wait, *wait.users]
        users = [user for node in family for user in node.users if user not in wait.users]
        before = min([following.get(start, users[0]), *users])
        for node in family:
            before.prepend(node)
