"""Costs: what a program communicates and how many bytes it keeps alive, read off its graph before anything runs."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.base.mesh import VirtualMesh
from fzero.layout.layout import Layout, Wire, wire
from fzero.program import ops
from fzero.program.ops import Node, is_call, name_of

Layouts = Mapping[str | None, Layout]


class Comm(NamedTuple):
    """One collective: `nbytes` is the size of the full buffer, what every rank's part adds up to, padding included."""

    op: str  # "all_gather", "reduce_scatter" or "all_reduce"
    axis: str
    bucket: str | None
    dtype: torch.dtype
    nbytes: int


class Memory(NamedTuple):
    """Bytes of tensors alive on the rank that has most: `peak`, at node `at`; `timeline` has them behind each node.

    Ranks differ in their slices of a leaf, and so in what is computed from those.
    """

    peak: int
    at: str
    timeline: list[int]


def comm(graph: fx.Graph, layouts: Layouts, mesh: VirtualMesh) -> list[Comm]:
    """The graph's collectives, in order."""
    return [entry for node in graph.nodes for entry in collectives(node, layouts, mesh)]


def collectives(node: Node, layouts: Layouts, mesh: VirtualMesh) -> Iterator[Comm]:
    """The collectives that a node starts, in order."""
    axis, others = mesh.shard_axis, [name for name in mesh.names if name != mesh.shard_axis]
    if is_call(node, ops.all_gather, ops.gather):
        yield Comm("all_gather", axis, node.args[1], node.meta["val"].dtype, _wire_nbytes(node, layouts))
    elif is_call(node, ops.reduce_scatter, ops.scatter):
        bucket, dtype, size = node.args[1], node.meta["val"].dtype, _wire_nbytes(node, layouts)
        yield Comm("reduce_scatter", axis, bucket, dtype, size)
        for other in others:
            yield Comm("all_reduce", other, bucket, dtype, size // mesh.size(axis))
    elif is_call(node, ops.all_reduce, ops.all_reduce_list):
        value = node.meta["val"]
        first = value[0] if isinstance(value, list) else value
        yield Comm("all_reduce", node.args[2], None, first.dtype, nbytes(value))


def _wire_nbytes(node: Node, layouts: Layouts) -> int:
    return _wire_of(node, layouts).numel * node.meta["val"].element_size()


def nbytes(value: Any) -> int:
    """Bytes of a fake tensor's elements, or of a list of them."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(nbytes, value)) if isinstance(value, (list, tuple)) else 0


def memory(
    graph: fx.Graph, layouts: Layouts, state: Sequence[tuple[str | None, int]], ranks: Sequence[int] | None = None
) -> Memory:
    """Walk the graph as generated code runs it: a value dies at its last use, arguments and results do not.

    `state` is the bucket, None for a batch, and leaf of each placeholder; slices lie as `partition` puts them, those of
    a bucket in one block with its padding. Counts what a kernel returns and what a collective needs between start and
    wait, not a kernel's own scratch. `ranks` are those of which one has most, by default all: of ranks that hold as
    much of each leaf the first is looked at, so that thousands cost as much as a few.
    """
    held = _Held(graph, layouts, state, turns(layouts) if ranks is None else ranks)
    nodes, changes = list(graph.nodes), list(_changes(graph, held.keys))
    rank = int(_peaks(changes, held).argmax())
    nbytes = {key: size if isinstance(size, int) else int(size[rank]) for key, size in held.nbytes.items()}
    timeline, behind = [], 0
    for made, freed in changes:
        during = behind + sum(nbytes[key] for key in made)
        behind = during - sum(nbytes[key] for key in freed)
        timeline.append((during, behind))
    at = max(range(len(nodes)), key=lambda i: timeline[i][0])
    return Memory(timeline[at][0], nodes[at].name, [behind for _, behind in timeline])


def turns(layouts: Layouts) -> list[int]:
    """Ranks in order, with every other of which the last of them before it has slices of equal sizes."""
    return sorted({0}.union(*(layout.representative_ranks(range(len(layout.leaves))) for layout in layouts.values())))


def _peaks(changes: Iterable[tuple[list[Key], list[Key]]], held: _Held) -> Tensor:
    """The most bytes alive on each rank."""
    live: Any = torch.zeros(len(held.ranks), dtype=torch.int64)
    peak = live
    for made, freed in changes:
        if made:
            live = live + sum(held.nbytes[key] for key in made)
            peak = torch.maximum(peak, live)
        if freed:
            live = live - sum(held.nbytes[key] for key in freed)
    return peak


def _changes(graph: fx.Graph, keys: Mapping[Node, Sequence[Key]]) -> Iterator[tuple[list[Key], list[Key]]]:
    """The storages that each node makes, and those that nothing needs behind it."""
    dying, users = last_uses(graph), Counter[Key]()
    for node in graph.nodes:
        made = [key for key in keys[node] if not users[key]]
        users.update(keys[node])
        freed: list[Key] = []
        for dead in dying.get(node, ()):
            users.subtract(keys[dead])
            freed += [key for key in keys[dead] if not users[key]]
        yield made, freed


def last_uses(graph: fx.Graph) -> dict[Node, list[Node]]:
    """Node -> the values that nothing needs after it. Arguments and results belong to the caller: never among them."""
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            last[node] = node
        for source in node.all_input_nodes:
            if source.op != "placeholder":
                last[source] = node
    for source in graph.output_node().all_input_nodes:
        last.pop(source, None)
    dying: dict[Node, list[Node]] = {}
    for source, node in last.items():
        dying.setdefault(node, []).append(source)
    return dying


Key = Any
"""What stands for a storage."""


class _At(NamedTuple):
    """A tensor in memory: its storage, how many of its elements each rank has, and where they begin there."""

    key: Key
    counts: Tensor | int
    starts: Tensor | int | None = None  # None: somewhere


class _Held:
    """The memory of every value of a graph, on some ranks along the axis that state is partitioned over.

    The graph shows the sizes of one rank's slices. What is computed from a slice elementwise is as long as the slice.
    """

    def __init__(
        self, graph: fx.Graph, layouts: Layouts, state: Sequence[tuple[str | None, int]], ranks: Sequence[int]
    ) -> None:
        self.layouts, self.ranks = layouts, torch.tensor(ranks)
        self._known: dict[tuple[range, int], Tensor] = {}  # where a leaf lies, elements of a shard -> counts
        self.nbytes: dict[Key, Tensor | int] = {}  # storage -> bytes on each rank
        self.keys: dict[Node, tuple[Key, ...]] = {}  # node -> storages that its value keeps alive
        self._at: dict[Node, Any] = {}  # an _At, a list of them, or None
        self._place_arguments(graph.find_nodes(op="placeholder"), state)
        for node in graph.nodes:
            if node not in self._at:
                self._at[node], *beside = self._found(node)
                self.keys[node] = tuple(dict.fromkeys([*(at.key for at in _flat(self._at[node])), *beside]))

    def _place_arguments(self, placeholders: Sequence[Node], state: Sequence[tuple[str | None, int]]) -> None:
        groups: dict[Key, dict[Node, int]] = {}
        seen = Counter[Key]()
        for node, (bucket, leaf) in zip(placeholders, state):
            if bucket is not None:
                key = (bucket, node.meta["val"].dtype, leaf)
                groups.setdefault((*key[:2], seen[key]), {})[node] = leaf
                seen[key] += 1
        for (bucket, dtype, _), members in groups.items():
            self._place_block(self.layouts[bucket], dtype, members)

    def _place_block(self, layout: Layout, dtype: torch.dtype, members: dict[Node, int]) -> None:
        """The slices of some leaves of a bucket as `partition` puts them: one behind the other in one block."""
        order = sorted(members, key=members.__getitem__)
        along, block = wire(layout, tuple(members[node] for node in order)), ("block", *members)
        for node, leaf, start in zip(order, along.leaves, self._starts(along)):
            self._at[node], self.keys[node] = _At(block, self._counts(layout, leaf), start), (block,)
        filled = layout.shard if along.is_complete else sum(self._at[node].counts for node in order)
        self.nbytes[block] = filled * dtype.itemsize

    def _starts(self, along: Wire) -> list[Tensor | int]:
        """Where each leaf's part begins in each rank's block of a wire."""
        layout = along.layout
        if along.has_gaps:
            begins = self.ranks * layout.shard
            return [(layout.leaf_ranges[leaf].start - begins).clamp(min=0) for leaf in along.leaves]
        return list(itertools.accumulate((self._counts(layout, leaf) for leaf in along.leaves[:-1]), initial=0))

    def _counts(self, layout: Layout, leaf: int) -> Tensor | int:
        """Elements of a leaf that each rank holds."""
        if layout.replicated:
            return layout.leaves[leaf].numel
        where, size = layout.leaf_ranges[leaf], layout.shard
        if (where, size) not in self._known:
            begins = self.ranks * size
            counts = (begins + size).clamp(max=where.stop) - begins.clamp(min=where.start)
            self._known[where, size] = counts.clamp(min=0)
        return self._known[where, size]

    def _found(self, node: Node) -> tuple[Any, ...]:
        """Where a node's value lies, and other storages that it keeps alive."""
        value = node.meta.get("val")
        if node.op == "get_attr":
            return (self._new(("constant", node.target), value),)
        if is_call(node, ops.all_gather, ops.reduce_scatter):
            return self._started(node)
        if is_call(node, ops.gather):
            return (self._new(node, value, _wire_of(node, self.layouts).numel),)
        if is_call(node, ops.scatter):
            counts = self._counts(self.layouts[node.args[1]], node.args[2])
            return (self._new(node, value, _wire_of(node, self.layouts).stride)._replace(counts=counts),)
        if is_call(node, ops.whole) and not _wire_of(node, self.layouts).is_joined(node.args[3]):
            return (self._new(node, value, value.numel()),)  # in pieces, which are copied together
        if is_call(node, ops.take, ops.part):
            leaf = node.args[2] if is_call(node, ops.take) else node.args[2][node.args[3]]
            return (self._view(node)._replace(counts=self._counts(self.layouts[node.args[1]], leaf)),)
        if is_call(node, operator.getitem):
            given = self._at[node.args[0]]
            return (given[node.args[1]] if isinstance(given, list) else given,)
        if ops.shares_memory(node):
            same = self._at[node.args[0]]
            return ([same] * len(value) if isinstance(value, (list, tuple)) else same,)
        return (self._made(node, value, self._counts_of(node)),)

    def _view(self, node: Node) -> _At:
        """Where a part of what a node is given lies: a copy of that, where it is not in one piece."""
        given = node.args[0].meta["val"]
        return (self._at[node.args[0]] if given.is_contiguous() else self._new(node, given))._replace(starts=None)

    def _made(self, key: Key, value: Any, counts: Any) -> Any:
        """New memory for a value: each of a list, with the counts of its position."""
        if isinstance(value, (list, tuple)):
            is_nested = any(isinstance(item, (list, tuple)) for item in value)
            given = [counts] * len(value) if is_nested or counts is None else counts
            return [self._made((key, i), item, count) for i, (item, count) in enumerate(zip(value, given, strict=True))]
        if not isinstance(value, Tensor):
            return None
        if counts is None:
            return self._new(key, value)
        self.nbytes[key] = counts * value.element_size()
        return _At(key, counts, 0)

    def _new(self, key: Key, value: Tensor, numel: int | None = None) -> _At:
        """New memory of the same size on all ranks: that of a fake tensor's storage, or of `numel` elements."""
        self.nbytes[key] = value.untyped_storage().nbytes() if numel is None else numel * value.element_size()
        return _At(key, value.numel(), 0)

    def _counts_of(self, node: Node) -> Any:
        """Elements on each rank of what is computed from slices, None where that is of one size: as those of the
        same shape, of lists position by position, or all together where they are joined."""
        lists = [arg for arg in node.args if isinstance(arg, (list, tuple)) and any(map(self._is_slice, arg))]
        value = node.meta.get("val")
        if name_of(node) == "cat" and lists:
            return sum(self._at[x].counts for x in lists[0])
        if isinstance(value, (list, tuple)) and lists:
            return [next((self._at[x].counts for x in row if self._is_slice(x)), None) for row in zip(*lists)]
        like = [x for x in node.all_input_nodes if self._is_slice(x) and x.meta["val"].shape == _shape(value)]
        return self._at[like[0]].counts if like else None

    def _is_slice(self, x: Any) -> bool:
        """Whether this is the node of a value whose size may differ between ranks."""
        at = self._at.get(x) if isinstance(x, fx.Node) else None
        return isinstance(at, _At) and isinstance(at.counts, Tensor)

    def _started(self, node: Node) -> tuple[Any, ...]:
        """Where the result of a collective that is under way lies, and what it needs besides."""
        value, along = node.meta["val"], _wire_of(node, self.layouts)
        if is_call(node, ops.all_gather):
            views = [] if ops.cast_of(node) else self._sent_as_they_lie(node, along)
            alone = along.layout.world == 1 and views  # one rank: what it gets is what it sends
            return (views[0],) if alone else (self._new(node, value), *(at.key for at in views))
        sent = self._scattered(node, along)
        if along.layout.mesh.size() == 1:
            return (sent[0],)
        received = (node, "received")  # from other ranks than one
        self.nbytes[received] = max(along.layout.world - 2, 0) * nbytes(value)
        return self._new(node, value), received, *(at.key for at in sent)

    def _sent_as_they_lie(self, node: Node, along: Wire) -> list[_At]:
        """The first slices of what an all-gather sends from where it lies, on ranks where slices adjoin. On the others
        they are packed in the place that they have in the result."""
        slices, size = [self._at[x] for x in node.args[0]], node.meta["val"].element_size()
        begins = [-1 if at.starts is None else at.starts - start for at, start in zip(slices, self._starts(along))]
        storages = list(dict.fromkeys(at.key for at in slices))
        counts, begin, stored, storage = map(self._rows, (  # [S, R]  S slices, R ranks
            [at.counts for at in slices], begins, [self.nbytes[at.key] for at in slices],
            [storages.index(at.key) for at in slices],
        ))  # fmt: skip
        filled = counts > 0
        first = filled.long().argmax(0)  # which slice is the first with elements
        base, room, home = (rows.gather(0, first[None])[0] for rows in (begin, stored, storage))
        adjoin = filled.any(0) & (base >= 0) & ((base + along.stride) * size <= room)
        adjoin &= (~filled | ((begin == base) & (storage == home))).all(0)
        return [slices[i] for i in first[adjoin].unique().tolist()]

    def _rows(self, values: Sequence[Tensor | int]) -> Tensor:
        """A row for each value, with what it is on each rank."""
        return torch.stack([torch.as_tensor(value).expand(len(self.ranks)) for value in values])

    def _scattered(self, node: Node, along: Wire) -> list[_At]:
        """What a reduce-scatter sends: on CPU the leaves as they lie, if that is in order; else a packed copy, unless
        it is one leaf that fills the buffer."""
        given = [x.meta["val"] for x in node.args[0]]
        if given[0].device.type == "cpu" and along.layout.mesh.size() > 1:
            flats = ((node, i) for i in range(len(given)))
            return [
                self._at[x] if full.is_contiguous() else self._new(key, full)
                for key, x, full in zip(flats, node.args[0], given)
            ]
        alone = len(given) == 1 == len(along.layout.leaves) and given[0].numel() == along.numel
        if alone and given[0].is_contiguous():
            return [self._at[node.args[0][0]]]
        return [self._new((node, "packed"), given[0], along.numel)]


def _wire_of(node: Node, layouts: Layouts) -> Wire:
    leaves = node.args[2]
    return wire(layouts[node.args[1]], (leaves,) if isinstance(leaves, int) else tuple(leaves))


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _flat(at: Any) -> Iterator[_At]:
    if isinstance(at, _At):
        yield at
    elif isinstance(at, (list, tuple)):
        for item in at:
            yield from _flat(item)
