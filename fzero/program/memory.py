"""Memory: the bytes of tensors that a program keeps alive, from its graph, before anything runs."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from fzero.layout.layout import Layout, representative_ranks
from fzero.layout.wires import Wire, wire
from fzero.program.arguments import operand_of, position_of
from fzero.program.kinds import Kind, Slice
from fzero.program.operation import Node
from fzero.program.peak import Memory
from fzero.program.places import Where, find_places, is_placed
from fzero.program.records import alias_of, name_of, record

if TYPE_CHECKING:
    from fzero.program.program import Program


def measure_memory(program: Program, ranks: Sequence[int] | None = None) -> Memory:
    """Walk the graph as generated code runs it: values die at their last use, arguments and results live on.

    The slices of a bucket lie in one block with its padding, as `partition` puts them. Counted are the results of
    kernels, the buffers of collectives between start and wait, and what loops and the owners of matrices need within a
    node; the scratch memory of torch's kernels is not.

    Peaks are the largest among those of `ranks`, by default of all ranks. Of ranks that hold equal numbers of elements
    of every leaf only the first is computed, so thousands of ranks cost as much as a few.
    """
    allocator = Allocator(program, representative_ranks(program.layouts.values()) if ranks is None else ranks)
    nodes, changes = list(program.graph.nodes), list(list_changes(program.graph, allocator.keys))
    rank = int(_find_peaks(program.graph, changes, allocator, "device").argmax())
    here, nbytes = _select(changes, allocator, "device"), select_rank(allocator.nbytes, rank)
    during, behind = _add_changes(nodes, here, nbytes, allocator.scratch, rank)
    at = max(range(len(nodes)), key=during.__getitem__)
    away: list[Where] = ["host", "disk"]
    host, disk = (int(_find_peaks(program.graph, changes, allocator, where).max()) for where in away)
    names = tuple(node.name for node in nodes)
    return Memory(during[at], names[at], behind, during, host, disk, names, len(program.arguments))


def _add_changes(
    nodes: Sequence[Node],
    changes: Iterable[tuple[list[Key], list[Key]]],
    nbytes: Mapping[Key, int],
    scratch: Mapping[Node, Tensor | int],
    rank: int,
) -> tuple[list[int], list[int]]:
    """The bytes that are alive during each node, and those behind each node."""
    during, behind, more = list[int](), [0], select_rank(scratch, rank)
    for node, (made, freed) in zip(nodes, changes):
        most = behind[-1] + sum(nbytes[key] for key in made)
        behind.append(most - sum(nbytes[key] for key in freed))
        during.append(most + more.get(node, 0))
    return during, behind[1:]


def measure_beside(allocator: Allocator, where: Where = "device") -> Tensor:
    """[R] the peak of each rank in a place, beside the arguments, which belong to the caller."""
    graph = allocator.program.graph
    peaks = _find_peaks(graph, list_changes(graph, allocator.keys), allocator, where)
    given = {key for node in allocator.program.placeholders for key in allocator.keys[node]}
    return peaks - sum(allocator.nbytes[key] for key in given if allocator.where(key) == where)


def select_rank(sizes: Mapping[Key, Tensor | int], rank: int) -> dict[Key, int]:
    """The sizes on the rank at a position."""
    return {key: size if isinstance(size, int) else int(size[rank]) for key, size in sizes.items()}


def _find_peaks(
    graph: fx.Graph, changes: Iterable[tuple[list[Key], list[Key]]], allocator: Allocator, where: Where
) -> Tensor:
    """[R] the peak of each rank in a place."""
    live: Any = torch.zeros(len(allocator.ranks), dtype=torch.int64, device="cpu")
    peak, scratch = live, allocator.scratch_at[where]
    for node, (made, freed) in zip(graph.nodes, _select(changes, allocator, where)):
        if made:
            live = live + sum(allocator.nbytes[key] for key in made)
        if made or node in scratch:
            peak = torch.maximum(peak, live + scratch.get(node, 0))
        if freed:
            live = live - sum(allocator.nbytes[key] for key in freed)
    return peak


def _select(
    changes: Iterable[tuple[list[Key], list[Key]]], allocator: Allocator, where: Where
) -> Iterable[tuple[list[Key], list[Key]]]:
    """The changes of the storages in a place."""
    if not allocator.away and where == "device":
        return changes
    each = ([[key for key in keys if allocator.where(key) == where] for keys in change] for change in changes)
    return ((made, freed) for made, freed in each)


def list_changes(graph: fx.Graph, keys: Mapping[Node, Sequence[Key]]) -> Iterator[tuple[list[Key], list[Key]]]:
    """For each node the storages that it allocates, and the storages that nothing uses after it."""
    dying, users = find_last_uses(graph), Counter[Key]()
    for node in graph.nodes:
        made = [key for key in keys[node] if not users[key]]
        users.update(keys[node])
        freed: list[Key] = []
        for dead in dying.get(node, ()):
            users.subtract(keys[dead])
            freed += [key for key in keys[dead] if not users[key]]
        yield made, freed


def find_last_uses(graph: fx.Graph) -> dict[Node, list[Node]]:
    """Node -> the values whose last use it is. Arguments and results belong to the caller and are never among them."""
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
"""Names a storage: a node, or a tuple of a node and a word."""


class Location(NamedTuple):
    """Where a tensor lies: its storage, the number of its elements on each rank, and the first of them in the storage.

    Counts and starts are [R], or one number for all R ranks.
    """

    key: Key
    counts: Tensor | int
    starts: Tensor | int | None = None  # None: unknown


class Allocator:
    """Allocates the values of a program on some ranks along the shard axis: which storage each value lies in, and the
    bytes of each storage on each rank.

    The graph shows the sizes of one rank's slices. A value that is computed elementwise from a slice has, on each rank,
    as many elements as the slice. The `memory` rule of an operation gets the allocator.
    """

    def __init__(self, program: Program, ranks: Sequence[int]) -> None:
        self.program, self.ranks = program, torch.tensor(ranks, device="cpu")
        self._counts: dict[
            tuple[range, int, str], Tensor
        ] = {}  # range of a leaf, elements and axis of a shard -> counts
        self.nbytes: dict[Key, Tensor | int] = {}  # storage -> bytes on each rank
        self.scratch: dict[Node, Tensor | int] = {}  # node -> bytes on each rank that are free again behind it
        self.scratch_at: dict[Where, dict[Node, Tensor | int]] = {"device": self.scratch, "host": {}, "disk": {}}
        self.keys: dict[Node, tuple[Key, ...]] = {}  # node -> storages that its value keeps alive
        self.away: dict[Key, Where] = {}  # storages that lie elsewhere than on the device
        self._at: dict[Node, Any] = {}  # a Location, a list of them, or None
        self._place_arguments()
        for node in program.graph.nodes:
            if node not in self._at:
                self._at[node], *beside = self._locate(node)
                self.keys[node] = tuple(dict.fromkeys([*(at.key for at in _flatten(self._at[node])), *beside]))
        self._add_scratch()
        places = find_places(program) if is_placed(program) else {}
        for node in program.graph.nodes:  # in order: a write keeps alive what lies on the host
            where = places.get(node, "device")
            for key in self.keys[node] if where != "device" else ():
                self.away.setdefault(key, where)

    def _place_arguments(self) -> None:
        """Group state arguments as `partition` does: one block for each bucket, dtype and tree of state. A leaf that
        comes again begins the next tree."""
        groups: dict[Key, dict[Node, int]] = {}
        seen = Counter[Key]()
        for node, argument in zip(self.program.placeholders, self.program.arguments):
            if argument.bucket is not None:
                key = (argument.bucket, node.meta["val"].dtype, argument.place, argument.leaf)
                groups.setdefault((*key[:3], seen[key]), {})[node] = argument.leaf
                seen[key] += 1
        for (bucket, dtype, place, _), members in groups.items():
            has_padding = place is None or place.where != "disk"  # slices on a disk lie each by itself
            self._place_block(self.program.layouts[bucket], dtype, members, has_padding)

    def _place_block(self, layout: Layout, dtype: torch.dtype, members: dict[Node, int], has_padding: bool) -> None:
        """Place the slices of some leaves of a bucket one behind the other in one block, as `partition` does."""
        order = sorted(members, key=members.__getitem__)
        along, block = wire(layout, tuple(members[node] for node in order)), ("block", *members)
        for node, leaf, start in zip(order, along.leaves, self._find_starts(along)):
            self._at[node], self.keys[node] = Location(block, self.count(layout, leaf), start), (block,)
        filled = layout.shard if along.is_complete and has_padding else sum(self._at[node].counts for node in order)
        self.nbytes[block] = filled * dtype.itemsize

    def _find_starts(self, along: Wire) -> list[Tensor | int]:
        """The first element of each leaf's part in each rank's block of a wire."""
        layout = along.layout
        if along.has_gaps:
            begins = self._find_ranks(layout) * layout.shard
            return [(layout.leaf_ranges[leaf].start - begins).clamp(min=0) for leaf in along.leaves]
        return list(itertools.accumulate((self.count(layout, leaf) for leaf in along.leaves[:-1]), initial=0))

    def count(self, layout: Layout, leaf: int) -> Tensor | int:
        """[R] the number of elements of a leaf that each rank holds; one number for a replicated leaf."""
        if layout.replicated:
            return layout.leaves[leaf].numel
        where, size = layout.leaf_ranges[leaf], layout.shard
        key = where, size, layout.shard_axis
        if key not in self._counts:
            begins = self._find_ranks(layout) * size
            counts = (begins + size).clamp(max=where.stop) - begins.clamp(min=where.start)
            self._counts[key] = counts.clamp(min=0)
        return self._counts[key]

    def _find_ranks(self, layout: Layout) -> Tensor:
        """[R] the position of each rank along the shard axis of a layout."""
        positions = layout.positions
        return self.ranks if positions is None else torch.tensor(positions, device="cpu")[self.ranks]

    def _locate(self, node: Node) -> tuple[Any, ...]:
        """The location of a node's value, then other storages that the value keeps alive."""
        value = node.meta.get("val")
        if node.op == "get_attr":
            return (self.new(("constant", node.target), value),)
        if node.op != "call_function":
            return (self._place_batch(node, value),)
        operation = record(node)
        if operation.memory is not None:
            return operation.memory(self, node)
        source = alias_of(node)
        if source is None:
            return (self._allocate(node, value, self._count_like(node)),)
        same = self._at[source]
        if node.target is operator.getitem:
            return (same[position_of(node)] if isinstance(same, list) else same,)
        return ([same] * len(value) if isinstance(value, (list, tuple)) else same,)

    def _add_scratch(self) -> None:
        """Count what operations need while they run, and where they start a collective, where the step waits for it."""
        for node in self.program.graph.nodes:
            operation = record(node) if node.op == "call_function" else None
            if operation is not None and operation.scratch is not None:
                nbytes = operation.scratch(self.program, node)
                waits = [x for x in node.users if operation.starts and x.op == "call_function" and record(x).waits]
                for each in (node, *waits):
                    self.scratch[each] = self.scratch.get(each, 0) + nbytes

    def where(self, key: Key) -> Where:
        """Where a storage lies."""
        return self.away.get(key, "device")

    def _place_batch(self, node: Node, value: Any) -> Any:
        """The location of an argument that is no state. Memory in front of its first element and behind its last one is
        left out: a rank's part may be a view of all parts, and ranks count alike."""
        at = self._allocate(node, value, None)
        if isinstance(at, Location):
            reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
            self.nbytes[node] = (reach + 1) * value.element_size() if value.numel() else 0
        return at

    # for the rules of operations

    def at(self, node: Node) -> Any:
        """The location of a node's value: a `Location`, or a list of them."""
        return self._at[node]

    def view(self, node: Node) -> Location:
        """The location of a flat view of a node's first operand. An operand that is not contiguous is copied first."""
        operand = operand_of(node)
        given = operand.meta["val"]
        return (self._at[operand] if given.is_contiguous() else self.new(node, given))._replace(starts=None)

    def new(self, key: Key, value: Tensor, numel: int | None = None) -> Location:
        """Allocate a value with as many bytes on all ranks: those of the fake tensor's storage, or of `numel`
        elements."""
        self.nbytes[key] = value.untyped_storage().nbytes() if numel is None else numel * value.element_size()
        return Location(key, value.numel(), 0)

    def bytes_of(self, node: Node) -> Tensor | int:
        """The bytes of a node's value on each rank."""
        return self._at[node].counts * node.meta["val"].element_size()

    def place(self, key: Key, value: Tensor, counts: Tensor | int) -> Location:
        """Allocate a value with these numbers of elements on each rank."""
        self.nbytes[key] = counts * value.element_size()
        return Location(key, counts, 0)

    def new_slices(self, node: Node, places: Iterable[tuple[Layout, int]]) -> list[Location]:
        """Allocate a node's list of slices, of these leaves of layouts."""
        return self._allocate(node, node.meta["val"], [self.count(layout, leaf) for layout, leaf in places])

    def new_lists(self, node: Node, likes: Sequence[Sequence[Node]]) -> list[Any]:
        """Allocate a node's lists of values, each value with as many elements on each rank as the operand like it."""
        counts = [[self._at[like].counts for like in column] for column in likes]
        return [self._allocate((node, i), each, counts[i]) for i, each in enumerate(node.meta["val"])]

    def new_rows(self, key: Key, values: Sequence[Tensor], kind: Kind) -> list[Location]:
        """Allocate a list with one value of this kind for each turn of a loop: slices of equal layers, or others."""
        counts = self.count(self.program.layouts[kind.bucket], kind.leaf) if isinstance(kind, Slice) else None
        return [self._allocate((key, row), value, counts) for row, value in enumerate(values)]

    def keys_of(self, nodes: Iterable[Node]) -> list[Key]:
        """The storages of these nodes' values."""
        return [location.key for node in nodes for location in _flatten(self._at[node])]

    def keep(self, key: Key, nbytes: int) -> Key:
        """Allocate a storage of `nbytes`, for a node to keep alive beside its result."""
        self.nbytes[key] = nbytes
        return key

    def _allocate(self, key: Key, value: Any, counts: Any) -> Any:
        """Allocate a value, or each item of a list, with the counts at its position or with the same for all."""
        if isinstance(value, (list, tuple)):
            given = counts if isinstance(counts, list) else [counts] * len(value)
            return [
                self._allocate((key, i), item, count) for i, (item, count) in enumerate(zip(value, given, strict=True))
            ]
        if not isinstance(value, Tensor):
            return None
        if counts is None:
            return self.new(key, value)
        return self.place(key, value, counts)

    def _count_like(self, node: Node) -> Any:
        """[R] the elements of a node's result on each rank, where the result is computed from slices. None where it has
        the same size on all ranks.

        The result has the counts of an operand of the same shape. Items of a list have those of the operands at their
        position, and where operands are lists of another length, those of any operand. The result of `cat` has the sum
        of its operands' counts.
        """
        lists = [arg for arg in node.args if isinstance(arg, (list, tuple)) and any(map(self._is_slice, arg))]
        value = node.meta.get("val")
        if name_of(node) == "cat" and lists:
            return sum(self._at[x].counts for x in lists[0])
        return self._count_items(value, lists) if lists else self._find_counts(node.all_input_nodes, value)

    def _count_items(self, value: Any, lists: Sequence[Sequence[Any]]) -> Any:
        """The counts of a value, or of each item of a list, that an operation makes of lists of operands."""
        if not isinstance(value, (list, tuple)):
            return self._find_counts(itertools.chain(*lists), value)
        if any(isinstance(item, (list, tuple)) for item in value):
            return [self._count_items(item, lists) for item in value]
        fits = all(len(operands) == len(value) for operands in lists)
        rows: Iterable[Iterable[Any]] = zip(*lists) if fits else [tuple(itertools.chain(*lists))] * len(value)
        return [self._find_counts(row, item) for row, item in zip(rows, value, strict=True)]

    def _find_counts(self, operands: Iterable[Any], value: Any) -> Tensor | int | None:
        """The counts of the first slice among operands that has the shape of a value."""
        shape = _shape_of(value)
        return next((self._at[x].counts for x in operands if self._is_slice(x) and x.meta["val"].shape == shape), None)

    def _is_slice(self, x: Any) -> bool:
        """Whether this is the node of a value whose size may differ between ranks."""
        at = self._at.get(x) if isinstance(x, fx.Node) else None
        return isinstance(at, Location) and isinstance(at.counts, Tensor)

    def find_views_sent(self, node: Node, along: Wire) -> list[Location]:
        """The slices, the first of each block, whose storage an all-gather sends without a copy.

        That is on ranks whose slices lie in one storage as they do in the wire. Other ranks pack their slices into the
        place of their block in the result, which takes no further memory.
        """
        slices, size = [self._at[x] for x in operand_of(node)], node.meta["val"].element_size()
        begins = [-1 if at.starts is None else at.starts - start for at, start in zip(slices, self._find_starts(along))]
        storages = list(dict.fromkeys(at.key for at in slices))
        counts, begin, stored, storage = map(self._stack_rows, (  # [S, R]  S slices, R ranks
            [at.counts for at in slices], begins, [self.nbytes[at.key] for at in slices],
            [storages.index(at.key) for at in slices],
        ))  # fmt: skip
        filled = counts > 0
        first = filled.long().argmax(0)  # which slice is the first with elements
        base, room, home = (rows.gather(0, first[None])[0] for rows in (begin, stored, storage))
        adjoin = filled.any(0) & (base >= 0) & ((base + along.stride) * size <= room)
        adjoin &= (~filled | ((begin == base) & (storage == home))).all(0)
        return [slices[i] for i in first[adjoin].unique().tolist()]

    def _stack_rows(self, values: Sequence[Tensor | int]) -> Tensor:
        """[V, R] the values on each rank."""
        return torch.stack([torch.as_tensor(value, device="cpu").expand(len(self.ranks)) for value in values])


def _shape_of(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _flatten(at: Any) -> Iterator[Location]:
    if isinstance(at, Location):
        yield at
    elif isinstance(at, (list, tuple)):
        for item in at:
            yield from _flatten(item)
