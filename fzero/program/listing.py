"""Listing: a program as one reads it, like the pseudo-code of ZeRO-3: gather, compute, release, scatter, update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from fzero.base.mesh import VirtualMesh
from fzero.program import ops
from fzero.program.costs import Layouts, collectives, comm
from fzero.program.ops import Node, is_call, name_of, shares_memory

_QUIET = frozenset({
    "view", "t", "transpose", "permute", "detach", "alias", "unsqueeze", "squeeze", "expand", "slice", "select",
    "_unsafe_view", "as_strided", "getitem", "wait", "whole", "part", "split", "ones_like", "zeros_like", "beside",
})  # fmt: skip


def listing(name: str, graph: fx.Graph, layouts: Layouts, mesh: VirtualMesh, peak: int) -> str:
    """One line for each collective, release and update, one for what is computed between them."""
    total = Counter[str]()
    for entry in comm(graph, layouts, mesh):
        total[entry.op] += entry.nbytes
    moved = ", ".join(f"{op} {size(nbytes)}" for op, nbytes in total.items()) or "nothing"
    head = f"{name} on {mesh}: {len(graph.nodes)} nodes, peak {size(peak)}, moves {moved}"
    return "\n".join([head, *(f"  {line}" for line in _lines(graph, layouts, mesh))])


def size(nbytes: int) -> str:
    """`1536 -> "1.5 KiB"`."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _lines(graph: fx.Graph, layouts: Layouts, mesh: VirtualMesh) -> Iterator[str]:
    releases = _releases(graph)
    computed: Counter[str] = Counter()
    for node in graph.nodes:
        line = _line(node, layouts, mesh)
        if line is None:
            computed.update([name_of(node)] if node.op == "call_function" and name_of(node) not in _QUIET else [])
        if computed and (line is not None or node in releases or node.op == "output"):
            yield f"compute         {_summary(computed)}"
            computed.clear()
        if line is not None:
            yield line
        for bucket in releases.get(node, ()):
            yield f"release         {bucket}"


def _line(node: Node, layouts: Layouts, mesh: VirtualMesh) -> str | None:
    entry = next(collectives(node, layouts, mesh), None)
    if entry is not None:
        values = node.args[0]
        what = entry.bucket or f"{len(values) if isinstance(values, (list, tuple)) else 1} values"
        return f"{entry.op:<15} {what:<24} {size(entry.nbytes):>10} {str(entry.dtype).removeprefix('torch.')}"
    if is_call(node, ops.adamw, ops.adamw_):
        where = ", in place" if is_call(node, ops.adamw_) else ""
        return f"update          adamw, {len(node.args[0])} leaves{where}"
    return None


def _summary(computed: Counter[str]) -> str:
    shown = [name if count == 1 else f"{name} x{count}" for name, count in computed.most_common(4)]
    return ", ".join(shown) + (", ..." if len(computed) > 4 else "")


def _releases(graph: fx.Graph) -> dict[Node, list[str]]:
    """Node -> buckets whose gathered buffer nothing reads after it."""
    bucket: dict[Node, Node] = {}
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source in bucket:
                last[bucket[source]] = node
        if is_call(node, ops.all_gather):
            bucket[node] = node
        elif node.all_input_nodes and node.all_input_nodes[0] in bucket and shares_memory(node):
            bucket[node] = bucket[node.all_input_nodes[0]]
    releases: dict[Node, list[str]] = {}
    for start, node in last.items():
        releases.setdefault(node, []).append(str(start.args[1]))
    return releases
