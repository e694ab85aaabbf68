"""The release pass: how long a gathered bucket lives, and when gradients are scattered. The stages of ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import fx

from fzero.base.errors import FzeroError
from fzero.passes.order import find_derived, rearrange, sink_gathers
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import starts


def release(program: Program, *, stage: int) -> Program:
    """Stage 3: drop each gathered bucket when another one is used and gather it again for its next use.
    Stage 2: gather once and keep to the last use. Stage 1: also keep whole gradients and scatter all at the end.

    Same results, bit for bit. Comm grows from 2P at stages 1 and 2 to at most 3P where the backward pass uses each
    bucket once more, and live gathered bytes fall from P to the two largest neighbouring buckets.

    Raises:
        FzeroError: for a stage other than 1, 2 or 3.
    """
    if stage not in (1, 2, 3):
        raise FzeroError("stage", f"is {stage!r}", "stages are 1, 2 and 3")
    program = program.copy()
    if stage == 3:
        _regather(program)
    if stage == 1:
        _scatter_last(program)
    return program


def _regather(program: Program) -> None:
    origin = find_derived(program.graph, "gathered")
    uses = [(node, {origin[n] for n in node.all_input_nodes if n in origin}) for node in program.graph.nodes]
    uses = [(node, buckets) for node, buckets in uses if buckets and node not in origin]
    for bucket, span in _later_spans(uses):
        _gather_again(program, bucket, span, origin)
    sink_gathers(program.graph)


def _later_spans(uses: list[tuple[Node, set[Node]]]) -> Iterator[tuple[Node, list[Node]]]:
    """Each all-gather with each run of its uses that a use of only other buckets parts from an earlier one."""
    positions: dict[Node, list[int]] = {}
    for position, (_, buckets) in enumerate(uses):
        for bucket in buckets:
            positions.setdefault(bucket, []).append(position)
    for bucket, at in positions.items():
        spans: list[list[Node]] = []
        for before, after in pairwise(at):
            if after > before + 1:
                spans.append([])
            if spans:
                spans[-1].append(uses[after][0])
        yield from ((bucket, span) for span in spans)


def _gather_again(program: Program, bucket: Node, users: list[Node], origin: dict[Node, Node]) -> None:
    """Give these users their own copy of an all-gather and of what they use that is derived from it."""
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        chain = [node]
        while chain[-1] is not bucket and chain[-1] not in copies:
            chain.append(chain[-1].all_input_nodes[0])
        for link in reversed(chain):
            if link not in copies:
                args = fx.map_arg(link.args, lambda n: copies.get(n, n))
                copies[link] = program.emit(link.target, *args, **link.kwargs)
        return copies[node]

    with program.graph.inserting_before(users[0]):
        for user in users:
            for source in user.all_input_nodes:
                if origin.get(source) is bucket:
                    user.replace_input_with(source, copy(source))


def _scatter_last(program: Program) -> None:
    """Move every reduce-scatter, and what needs one, behind everything that needs none."""
    late: set[Node] = set()
    for node in program.graph.nodes:
        if starts(node) == "scattered" or any(n in late for n in node.all_input_nodes):
            late.add(node)
    rearrange(program.graph, sorted(program.graph.nodes, key=late.__contains__))
