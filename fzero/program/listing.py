"""Listing: a program as text, like the pseudo-code of ZeRO-3: gather, compute, release, scatter, update."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fzero.base.dtypes import name_dtype
from fzero.base.sizes import format_size
from fzero.program.arguments import bucket_of, operand_of
from fzero.program.comm import Comm
from fzero.program.operation import Node
from fzero.program.records import body_of, comm_of, name_of, record, shares_memory, starts

if TYPE_CHECKING:
    from fzero.program.program import Program

LONGEST = 64
"""The most lines of a turn: the lines that equal layers repeat. Longer turns are not found."""
LEAST_TURNS, LEAST_SAVED = 3, 6
"""Equal turns are listed once from so many turns on, and where that saves so many lines: short programs stay whole."""
_NUMBER = re.compile(r"\d+$")


class Line(NamedTuple):
    """A line of a listing: `text` with a gap for the name of a bucket. `layer` is the number at the end of the name."""

    text: str
    name: str = ""
    layer: int | None = None

    def __str__(self) -> str:
        return self.text.format(self.name if self.layer is None else f"{self.name}{self.layer}")


def list_program(program: Program) -> str:
    """A line for each collective, release and update, and a line for the computations between two of these. Turns that
    differ only in the number of a layer are listed once. The program's remarks come first."""
    lines = [*program.remarks, *_fold(list(_list_lines(program)))]
    return "\n".join([summarize_program(program), *(f"  {line}" for line in lines)])


def summarize_program(program: Program) -> str:
    """One line: the mesh, the number of nodes, the peak, the bytes that each kind of collective moves, and those that
    rank 0 reads from files and writes."""
    total = Counter[str]()
    for entry in program.comm():
        total[entry.op] += entry.nbytes
    moved = ", ".join(f"{op} {format_size(nbytes)}" for op, nbytes in total.items()) or "nothing"
    files = {name: nbytes for name, nbytes in program.copies().items() if name in ("read", "write")}
    moved += "".join(f", {name}s {format_size(nbytes)}" for name, nbytes in files.items())
    peak = program.memory().summary
    return f"{program.name} on {program.mesh}: {len(program.graph.nodes)} nodes, peak {peak}, moves {moved}"


def _list_lines(program: Program) -> Iterator[Line]:
    releases = _find_releases(program)
    computed: Counter[str] = Counter()
    for node in program.graph.nodes:
        lines = _describe_node(program, node)
        if not lines and node.op == "call_function" and not record(node).is_quiet:
            computed[name_of(node)] += 1
        if computed and (lines or node in releases or node.op == "output"):
            yield Line(f"compute         {_summarize(computed)}")
            computed.clear()
        if lines:
            yield from lines
            body = body_of(node)
            for each in _list_lines(body) if body is not None else ():
                yield each._replace(text=f"  {each.text}")
        for bucket in releases.get(node, ()):
            yield _name_layer("release         {}", bucket)


def _describe_node(program: Program, node: Node) -> list[Line]:
    """The lines of a node of its own, one for each collective; none where the node is part of a "compute" line."""
    entries = [] if body_of(node) is not None else list(comm_of(program, node))
    if entries:
        values = operand_of(node)
        count = len(values) if isinstance(values, (list, tuple)) else 1
        return [_describe_collective(program, entry, f"{count} values") for entry in entries]
    line = record(node).line if node.op == "call_function" else None
    return [] if line is None else [Line(line(program, node).replace("{", "{{").replace("}", "}}"))]  # not a gap


def _describe_collective(program: Program, entry: Comm, values: str) -> Line:
    """The line of a collective of these `values`, with its axis where the mesh has several."""
    size, dtype = format_size(entry.nbytes), name_dtype(entry.dtype)
    axis = f" over {entry.axis}" if len(program.mesh.names) > 1 else ""
    return _name_layer(f"{entry.op:<15} {{:<24}} {size:>10} {dtype}{axis}", entry.bucket or values)


def _name_layer(text: str, bucket: str) -> Line:
    """A line about a bucket, with the number of its layer apart from the rest of its name."""
    number = _NUMBER.search(bucket)
    return Line(text, bucket) if number is None else Line(text, bucket[: number.start()], int(number[0]))


def _summarize(computed: Counter[str]) -> str:
    shown = [name if count == 1 else f"{name} x{count}" for name, count in computed.most_common(4)]
    return ", ".join(shown) + (", ..." if len(computed) > 4 else "")


def _find_releases(program: Program) -> dict[Node, list[str]]:
    """Node -> the buckets whose gathered buffer has its last use there."""
    bucket: dict[Node, Node] = {}
    last: dict[Node, Node] = {}
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            if source in bucket:
                last[bucket[source]] = node
        if starts(node) == "gathered":
            bucket[node] = node
        elif node.all_input_nodes and node.all_input_nodes[0] in bucket and shares_memory(node):
            bucket[node] = bucket[node.all_input_nodes[0]]
    releases: dict[Node, list[str]] = {}
    for start, node in last.items():
        releases.setdefault(node, []).append(str(bucket_of(start)))
    return releases


def _fold(lines: Sequence[Line]) -> Iterator[str]:
    """The lines, with turns over equal layers listed once. Greedy: at each line it folds the run that saves most."""
    at = 0
    while at < len(lines):
        turns, size, step = max((_count_turns(lines, at, size) for size in range(1, LONGEST)), key=_count_saved_lines)
        if turns < LEAST_TURNS or _count_saved_lines((turns, size, step)) < LEAST_SAVED:
            yield str(lines[at])
            at += 1
            continue
        yield f"{turns} times, each one layer {'on' if step > 0 else 'back'}:"
        yield from (f"  {line}" for line in lines[at : at + size])
        at += turns * size


def _count_saved_lines(run: tuple[int, int, int]) -> int:
    turns, size, _ = run
    return (turns - 1) * size - 1  # one line says how often the turn repeats


def _count_turns(lines: Sequence[Line], at: int, size: int) -> tuple[int, int, int]:
    """`(turns, size, step)`: how often the `size` lines from `at` on repeat, each time `step` layers further."""
    best = (1, size, 1)
    for step in (1, -1):
        turns = 1
        while _is_turn(lines[at : at + size], lines[at + turns * size :][:size], turns * step):
            turns += 1
        best = max(best, (turns, size, step))
    return best


def _is_turn(first: Sequence[Line], other: Sequence[Line], by: int) -> bool:
    """Whether `other` has the lines of the first turn, with the numbers of layers shifted `by`."""
    if len(other) < len(first) or all(line.layer is None for line in first):
        return False
    return all(
        a.text == b.text and a.name == b.name and (a.layer is None) == (b.layer is None)
        and (a.layer is None or b.layer == a.layer + by)
        for a, b in zip(first, other)
    )  # fmt: skip
