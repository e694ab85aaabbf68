"""The order of updates on the host: each begins as its gradients arrive, so that few copies are there at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from fzero.passes.order import find_dependences, find_mutable, sort
from fzero.program.arguments import sources_of
from fzero.program.operation import Node
from fzero.program.ops.transfers import is_of_saved_value
from fzero.program.places import find_places, is_placed
from fzero.program.program import Program
from fzero.program.records import follow_memory, record
from fzero.program.timeline import HOST, Costs, Lanes

UPDATES = 4
"""So many updates may have copies on the host at once. The thread of the host waits for the gradients of the first
while the device has the work of the others to do: scatter, copy and update of a bucket may take as long as the compute
of the three buckets behind it. With state on a disk two would hold the state of two buckets less on the host, and the
planned step without clipping takes as long. With clipping it takes up to 6.7 % longer, because reads of fewer buckets
run beside the backward pass (12 layers, 8 ranks, 3 GB/s)."""


def order_updates(program: Program, costs: Costs) -> list[Node]:
    """The nodes of a program in an order that updates state on the host as gradients arrive there.

    The update of a bucket, with its copies, is one piece. A piece is open when the device has been given everything
    that the piece needs: the gradients, and in a step that clips the factor, which needs all gradients. An open piece
    copies its parameters, and runs at the first of these:

    * the copies of one more piece start, and `UPDATES` pieces would have copies on the host;
    * the program waits for a reduce-scatter that takes at least as long as the piece;
    * the program uses its results, or ends.
    """
    if not is_placed(program):
        return list(program.graph.nodes)
    # pieces may need what the device computes of other pieces
    wanted = _Schedule(*_find_pieces(program), costs).run(program.graph.nodes)
    return sort(wanted, find_dependences(find_mutable(program.graph)))


class _Piece:
    """Nodes that run on the host and use each other's values, their copies among them, in order.

    `copies` are those of arguments, `rest` the other nodes. `starts` are the copies of computed values, such as
    gradients, which stand where these are computed. `needs` are all nodes that have to stand in front of the piece,
    `users` those that have to stand behind it.
    """

    def __init__(self, nodes: list[Node], needs: set[Node], users: set[Node]) -> None:
        self.nodes, self.needs, self.users = nodes, needs, users
        self.copies = [node for node in nodes if record(node).to == "host"]
        self.rest = [node for node in nodes if record(node).to != "host"]
        self.starts = [x for x in needs if _is_copy_to_host(x) and _has_dimensions(x)]

    @property
    def has_copies(self) -> bool:
        """Whether the piece holds copies on the host."""
        return bool(self.copies or self.starts)


def _find_pieces(program: Program) -> tuple[list[_Piece], set[Node]]:
    """The pieces of a program, in order, and the nodes on the host that compute and copy numbers. Pieces share these
    and are none. Copies alone are no piece either, nor is what follows from arguments alone."""
    places, numbers = find_places(program), set[Node]()
    joined: dict[Node, list[Node]] = {}  # node of a piece -> the nodes of the piece
    for node in program.graph.nodes:
        if node.op != "call_function" or is_of_saved_value(node):
            continue
        if not _is_late(node, places[node] == "host", numbers, joined):
            continue
        if not _has_dimensions(node):
            numbers.add(node)
            continue
        groups = {id(joined[x]): joined[x] for x in node.all_input_nodes if x in joined}
        nodes = [*(x for group in groups.values() for x in group), node]
        joined |= dict.fromkeys(nodes, nodes)
    updates = list(filter(_is_update, {id(nodes): nodes for nodes in joined.values()}.values()))
    reads = _find_reads(program, {node for nodes in updates for node in nodes})
    pieces = [_Piece(sorted(nodes), *_find_neighbours(nodes, reads, numbers)) for nodes in updates]
    return sorted(pieces, key=lambda piece: piece.nodes[-1]), numbers


def _is_late(node: Node, is_on_host: bool, *late: Collection[Node]) -> bool:
    """Whether a node moves with an update: it runs on the host, copies slices that are arguments to the host, or copies
    results of such nodes, which are among the `late` ones, to the device."""
    if _is_copy_to_host(node):
        return _has_dimensions(node) and all(x.op == "placeholder" for x in node.all_input_nodes)
    return is_on_host if record(node).to is None else all(any(x in each for each in late) for x in sources_of(node))


def _is_update(nodes: list[Node]) -> bool:
    """Whether nodes do more than copy, and take more than arguments, numbers and each other's values."""
    inside, computes = {*nodes}, any(record(x).to is None and not record(x).is_quiet for x in nodes)
    given = {x for node in nodes for x in node.all_input_nodes} - inside
    return computes and any(x.op != "placeholder" and _has_dimensions(x) for x in given)


def _find_neighbours(
    nodes: list[Node], reads: dict[Node, list[Node]], numbers: set[Node]
) -> tuple[set[Node], set[Node]]:
    """What has to stand in front of the nodes of a piece: what they and their numbers use. And what has to stand behind
    them: what uses their values. Nodes that read the arguments of a piece, which an update overwrites, stay on their
    side."""
    inside, last = {*nodes}, max(nodes)
    needs, users = set[Node](), {user for node in nodes for user in node.users} - inside
    found = list(nodes)
    while found:
        for x in found.pop().all_input_nodes:
            if x in numbers:
                found.append(x)
            elif x not in inside:
                needs.add(x)
                for read in reads.get(x, ()):
                    (needs if read < last else users).add(read)
    return needs, users


def _find_reads(program: Program, joined: Collection[Node]) -> dict[Node, list[Node]]:
    """Argument -> the nodes that are part of no piece and read its memory."""
    reads: dict[Node, list[Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and node not in joined:
            for source in {each for x in node.all_input_nodes for each in follow_memory(x)}:
                if source.op == "placeholder":
                    reads.setdefault(source, []).append(node)
    return reads


def _is_copy_to_host(node: Node) -> bool:
    return node.op == "call_function" and record(node).to == "host"


def _has_dimensions(node: Node) -> bool:
    """Whether a node's value is more than numbers. A node that writes in place has no value, and may stand for any."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(not isinstance(x, Tensor) or x.ndim > 0 for x in values)


class _Schedule:
    """The new order of a program's nodes, which `run` finds node by node."""

    def __init__(self, pieces: list[_Piece], numbers: set[Node], costs: Costs) -> None:
        self.costs, self.lanes = costs, Lanes(costs)
        self.order: dict[Node, None] = {}
        self.open: list[_Piece] = []
        self.closed = dict.fromkeys(pieces)
        self.late = numbers.union(*(piece.nodes for piece in pieces))
        self.begins = {start: piece for piece in pieces for start in piece.starts}
        self.waiting: dict[Node, list[_Piece]] = {}
        self.before: dict[Node, list[_Piece]] = {}
        for piece in pieces:
            for node in piece.users:
                self.before.setdefault(node, []).append(piece)
            for node in piece.needs:
                self.waiting.setdefault(node, []).append(piece)

    def run(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes in their new order. The output stays last."""
        *nodes, output = nodes
        for node in nodes:
            if node not in self.late:
                self._take(node)
        while self.open:
            self._run_first()
        return [*dict.fromkeys([*self.order, *nodes]), output]

    def _take(self, node: Node) -> None:
        """Put a node that is part of no piece behind the open pieces that it has to stand behind, and open the pieces
        that waited for it alone."""
        while any(piece in self.open for piece in self.before.get(node, ())):
            self._run_first()
        if self.begins.get(node) in self.closed:
            self._make_room()
        elif node.op == "call_function" and record(node).waits:
            self._run_during(node)
        self._perform([node])
        for piece in self.waiting.pop(node, ()):
            piece.needs.discard(node)
            if not piece.needs:
                self._open(piece)

    def _open(self, piece: _Piece) -> None:
        if piece.has_copies:
            self._make_room()
        del self.closed[piece]
        self.open.append(piece)
        self._perform(piece.copies)

    def _make_room(self) -> None:
        """Run open pieces until one more may start its copies."""
        while sum(piece.has_copies for piece in self.open) >= UPDATES:
            self._run_first()

    def _run_during(self, wait: Node) -> None:
        """Run the pieces that end before a reduce-scatter does that would hold up compute."""
        done_at = self.lanes.done_at
        (start,) = wait.all_input_nodes
        while self.open and done_at[start] > self.lanes.now:
            piece = self.open[0]
            begin = max([self.lanes.free[HOST], *(done_at[x] for x in (*piece.copies, *piece.starts))])
            if begin + sum(self.costs[x].seconds for x in piece.rest if self.costs[x].lane == HOST) > done_at[start]:
                break
            self._run_first()

    def _run_first(self) -> None:
        self._perform(self.open.pop(0).rest)

    def _perform(self, nodes: Iterable[Node]) -> None:
        """Put nodes behind what they use: numbers, and what the device needs of a piece that cannot run yet, such as
        norms of parameters on the host."""
        for node in nodes:
            if node not in self.order:
                self._perform(x for x in node.all_input_nodes if x in self.late)
                self.lanes.run([node])
                self.order[node] = None
