"""Memory: how many bytes of tensors a program keeps alive, read off its graph before anything runs."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.layout.layout import Layout, Wire, wire
from fzero.program.operation import Node
from fzero.program.records import name_of, record, shares_memory

if TYPE_CHECKING:
    from fzero.program.program import Program


class Memory(NamedTuple):
    """Bytes of tensors alive on the rank that has most: `peak`, at node `at`; `timeline` has them behind each node.

    Ranks differ in their slices of a leaf, and so in what is computed from slices.
    """

    peak: int
    at: str
    timeline: list[int]


def measure_memory(program: Program, ranks: Sequence[int] | None = None) -> Memory:
    """Walk the graph as generated code runs it: a value dies at its last use, arguments and results do not.

    Slices lie as `partition` puts them, those of a bucket in one block with its padding. Counts what a kernel returns
    and what a collective needs between start and wait, not a kernel's own scratch. The result is that of the rank which
    has most among `ranks`, by default all: of ranks that hold as much of each leaf the first is looked at, so that
    thousands of ranks cost as much as a few.
    """
    held = Held(program, representative_ranks(program.layouts.values()) if ranks is None else ranks)
    nodes, changes = list(program.graph.nodes), list(_changes(program.graph, held.keys))
    rank = int(_peaks(changes, held).argmax())
    nbytes = {key: size if isinstance(size, int) else int(size[rank]) for key, size in held.nbytes.items()}
    timeline, behind = [], 0
    for made, freed in changes:
        during = behind + sum(nbytes[key] for key in made)
        behind = during - sum(nbytes[key] for key in freed)
        timeline.append((during, behind))
    at = max(range(len(nodes)), key=lambda i: timeline[i][0])
    return Memory(timeline[at][0], nodes[at].name, [behind for _, behind in timeline])


def representative_ranks(layouts: Iterable[Layout]) -> list[int]:
    """One rank for each run of ranks whose slices have equal sizes in all of these layouts, in order."""
    return sorted({0}.union(*(layout.representative_ranks(range(len(layout.leaves))) for layout in layouts)))


def _peaks(changes: Iterable[tuple[list[Key], list[Key]]], held: Held) -> Tensor:
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


class At(NamedTuple):
    """A tensor in memory: its storage, how many of its elements each rank has, and where they begin there."""

    key: Key
    counts: Tensor | int
    starts: Tensor | int | None = None  # None: somewhere


class Held:
    """The memory of every value of a program, on some ranks along the axis that state is partitioned over.

    The graph shows the sizes of one rank's slices. What is computed from a slice elementwise is as long as the slice.
    """

    def __init__(self, program: Program, ranks: Sequence[int]) -> None:
        self.program, self.ranks = program, torch.tensor(ranks)
        self._known: dict[tuple[range, int], Tensor] = {}  # where a leaf lies, elements of a shard -> counts
        self.nbytes: dict[Key, Tensor | int] = {}  # storage -> bytes on each rank
        self.keys: dict[Node, tuple[Key, ...]] = {}  # node -> storages that its value keeps alive
        self._at: dict[Node, Any] = {}  # an At, a list of them, or None
        self._place_arguments()
        for node in program.graph.nodes:
            if node not in self._at:
                self._at[node], *beside = self._find(node)
                self.keys[node] = tuple(dict.fromkeys([*(at.key for at in _flatten(self._at[node])), *beside]))

    def _place_arguments(self) -> None:
        groups: dict[Key, dict[Node, int]] = {}
        seen = Counter[Key]()
        for node, argument in zip(self.program.placeholders, self.program.arguments):
            if argument.bucket is not None:
                key = (argument.bucket, node.meta["val"].dtype, argument.leaf)
                groups.setdefault((*key[:2], seen[key]), {})[node] = argument.leaf
                seen[key] += 1
        for (bucket, dtype, _), members in groups.items():
            self._place_block(self.program.layouts[bucket], dtype, members)

    def _place_block(self, layout: Layout, dtype: torch.dtype, members: dict[Node, int]) -> None:
        """The slices of some leaves of a bucket as `partition` puts them: one behind the other in one block."""
        order = sorted(members, key=members.__getitem__)
        along, block = wire(layout, tuple(members[node] for node in order)), ("block", *members)
        for node, leaf, start in zip(order, along.leaves, self._starts(along)):
            self._at[node], self.keys[node] = At(block, self.count(layout, leaf), start), (block,)
        filled = layout.shard if along.is_complete else sum(self._at[node].counts for node in order)
        self.nbytes[block] = filled * dtype.itemsize

    def _starts(self, along: Wire) -> list[Tensor | int]:
        """Where each leaf's part begins in each rank's block of a wire."""
        layout = along.layout
        if along.has_gaps:
            begins = self.ranks * layout.shard
            return [(layout.leaf_ranges[leaf].start - begins).clamp(min=0) for leaf in along.leaves]
        return list(itertools.accumulate((self.count(layout, leaf) for leaf in along.leaves[:-1]), initial=0))

    def count(self, layout: Layout, leaf: int) -> Tensor | int:
        """Elements of a leaf that each rank holds."""
        if layout.replicated:
            return layout.leaves[leaf].numel
        where, size = layout.leaf_ranges[leaf], layout.shard
        if (where, size) not in self._known:
            begins = self.ranks * size
            counts = (begins + size).clamp(max=where.stop) - begins.clamp(min=where.start)
            self._known[where, size] = counts.clamp(min=0)
        return self._known[where, size]

    def _find(self, node: Node) -> tuple[Any, ...]:
        """Where a node's value lies, and other storages that it keeps alive."""
        value = node.meta.get("val")
        if node.op == "get_attr":
            return (self.new(("constant", node.target), value),)
        if node.op != "call_function":
            return (self._make(node, value, None),)
        operation = record(node)
        if operation.memory is not None:
            return operation.memory(self, node)
        if not shares_memory(node):
            return (self._make(node, value, self._count_like(node)),)
        same = self._at[node.args[0]]
        if node.target is operator.getitem:
            return (same[node.args[1]] if isinstance(same, list) else same,)
        return ([same] * len(value) if isinstance(value, (list, tuple)) else same,)

    # what the rules of operations ask

    def at(self, node: Node) -> Any:
        """Where a node's value lies."""
        return self._at[node]

    def view(self, node: Node) -> At:
        """Where a part of a node's first operand lies: a copy of the operand, where that is not in one piece."""
        given = node.args[0].meta["val"]
        return (self._at[node.args[0]] if given.is_contiguous() else self.new(node, given))._replace(starts=None)

    def new(self, key: Key, value: Tensor, numel: int | None = None) -> At:
        """New memory of the same size on all ranks: that of a fake tensor's storage, or of `numel` elements."""
        self.nbytes[key] = value.untyped_storage().nbytes() if numel is None else numel * value.element_size()
        return At(key, value.numel(), 0)

    def keep(self, key: Key, nbytes: int) -> Key:
        """New memory of so many bytes, which a node keeps alive beside its result."""
        self.nbytes[key] = nbytes
        return key

    def _make(self, key: Key, value: Any, counts: Any) -> Any:
        """New memory for a value: each of a list, with the counts of its position."""
        if isinstance(value, (list, tuple)):
            is_nested = any(isinstance(item, (list, tuple)) for item in value)
            given = [counts] * len(value) if is_nested or counts is None else counts
            return [self._make((key, i), item, count) for i, (item, count) in enumerate(zip(value, given, strict=True))]
        if not isinstance(value, Tensor):
            return None
        if counts is None:
            return self.new(key, value)
        self.nbytes[key] = counts * value.element_size()
        return At(key, counts, 0)

    def _count_like(self, node: Node) -> Any:
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
        return isinstance(at, At) and isinstance(at.counts, Tensor)

    def find_views_sent(self, node: Node, along: Wire) -> list[At]:
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


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _flatten(at: Any) -> Iterator[At]:
    if isinstance(at, At):
        yield at
    elif isinstance(at, (list, tuple)):
        for item in at:
            yield from _flatten(item)
