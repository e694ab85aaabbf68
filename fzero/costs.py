"""Costs: what a program communicates and how many bytes it keeps alive, read off its graph before anything runs."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero import ops
from fzero.layout import Layout, Wire, wire
from fzero.mesh import VirtualMesh
from fzero.ops import Node, is_call, name_of

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


def memory(graph: fx.Graph, layouts: Layouts, state: Sequence[tuple[str | None, int]]) -> Memory:
    """Walk the graph as generated code runs it: a value dies at its last use, arguments and results do not.

    `state` is the bucket, None for a batch, and leaf of each placeholder; slices lie as `partition` puts them, those of
    a bucket in one block with its padding. Counts what a kernel returns and what a collective needs between start and
    wait, not a kernel's own scratch.
    """
    held = _Held(graph, layouts, state)
    nodes = list(graph.nodes)
    peak = functools.reduce(torch.maximum, (during for during, _ in _walk(graph, held)))
    rank = int(peak.argmax())
    timeline = [(int(during[rank]), int(behind[rank])) for during, behind in _walk(graph, held)]
    at = max(range(len(nodes)), key=lambda i: timeline[i][0])
    return Memory(timeline[at][0], nodes[at].name, [behind for _, behind in timeline])


def _walk(graph: fx.Graph, held: _Held) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes alive on each rank at each node, and behind it."""
    dying, users = last_uses(graph), Counter[Key]()
    live: Any = torch.zeros(held.world, dtype=torch.int64)
    for node in graph.nodes:
        during = live = live + sum(held.nbytes[key] for key in held.keys[node] if not users[key])
        users.update(held.keys[node])
        for dead in dying.get(node, ()):
            users.subtract(held.keys[dead])
            live = live - sum(held.nbytes[key] for key in held.keys[dead] if not users[key])
        yield during, live


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
    """The memory of every value of a graph, of each rank along the axis that state is partitioned over.

    The graph shows the sizes of one rank's slices. What is computed from a slice elementwise is as long as the slice.
    """

    def __init__(self, graph: fx.Graph, layouts: Layouts, state: Sequence[tuple[str | None, int]]) -> None:
        self.layouts = layouts
        self.world = max((layout.world for layout in layouts.values()), default=1)
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
            begins = torch.arange(self.world) * layout.shard
            return [(layout.leaf_ranges[leaf].start - begins).clamp(min=0) for leaf in along.leaves]
        return list(itertools.accumulate((self._counts(layout, leaf) for leaf in along.leaves[:-1]), initial=0))

    def _counts(self, layout: Layout, leaf: int) -> Tensor | int:
        """Elements of a leaf that each rank holds."""
        if layout.replicated:
            return layout.leaves[leaf].numel
        where, size = layout.leaf_ranges[leaf], layout.shard
        begins = torch.arange(self.world) * size
        return ((begins + size).clamp(max=where.stop) - begins.clamp(min=where.start)).clamp(min=0)

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
        if is_call(node, ops.whole) and len(_wire_of(node, self.layouts).pieces(node.args[3])) > 1:
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
        gathers = is_call(node, ops.all_gather)
        sent = self._gathered(node, along) if gathers else [self._scattered(node, along)]
        if (along.layout.world if gathers else along.layout.mesh.size()) == 1:
            return (sent[0],)  # one rank: what it gets is what it sends
        received = (node, "received")  # by a reduce-scatter from other ranks than one
        self.nbytes[received] = 0 if gathers else max(self.world - 2, 0) * nbytes(value)
        return self._new(node, value), received, *(at.key for at in sent)

    def _gathered(self, node: Node, along: Wire) -> list[_At]:
        """What an all-gather sends: a packed copy, or the slices as they lie on ranks where they adjoin."""
        slices, size = [self._at[x] for x in node.args[0]], node.meta["val"].element_size()
        first, base, stored = torch.full((3, self.world), -1)  # which slice is the first with elements; of its memory
        adjoin = torch.ones(self.world, dtype=torch.bool)
        for i, (at, start) in enumerate(zip(slices, self._starts(along))):
            begin = at.starts - start if at.starts is not None else -1
            is_filled = torch.as_tensor(at.counts > 0)
            is_first = is_filled & (first < 0)
            first, base = torch.where(is_first, i, first), torch.where(is_first, begin, base)
            stored = torch.where(is_first, self.nbytes[at.key], stored)
            shares = torch.tensor([other.key == at.key for other in slices])[first]
            adjoin &= ~is_filled | (shares & (base == begin))
        adjoin &= (base >= 0) & ((base + along.stride) * size <= stored)
        views = [slices[i] for i in first[adjoin].unique().tolist()]
        if bool(adjoin.all()):
            return views
        packed = (node, "packed")
        self.nbytes[packed] = torch.where(adjoin, 0, along.stride * size)
        return [_At(packed, along.stride), *views]

    def _scattered(self, node: Node, along: Wire) -> _At:
        """What a reduce-scatter sends: a packed copy, unless it is one leaf that fills the buffer."""
        given = node.args[0][0].meta["val"]
        if (
            len(node.args[0]) == 1 == len(along.layout.leaves)
            and given.numel() == along.numel
            and given.is_contiguous()
        ):
            return self._at[node.args[0][0]]
        return self._new((node, "packed"), given, along.numel)


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
