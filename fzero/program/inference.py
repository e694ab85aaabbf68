"""Inference: the kind of every value of a program, by one walk over its graph.

The record of each operation has the rule for its kinds. The walk refuses a program that would let ranks drift apart,
mix slices of different leaves, or compute a value from padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from fzero.base.errors import FzeroError
from fzero.base.torch_private_functions import inputs_of
from fzero.layout.layout import Layout
from fzero.program.arguments import operand_of
from fzero.program.coverage import Unset
from fzero.program.kinds import RAGGED, UNIFORM, Buffer, Kind, Slice, axes_of, kind_of_state
from fzero.program.open import depends_on_sizes
from fzero.program.operation import Node, Operation
from fzero.program.program import RANK, Program
from fzero.program.records import name_of, record, storage
from fzero.program.refusals import PASS_BUG, describe_kind, path_of, refuse_drift, refuse_node


class Walk:
    """One walk over a program, with the kinds of the values so far. The rule of an operation gets it as `walk`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.per_rank = frozenset(program.mesh.names) - {*program.model_axes}
        """The kind of a batch, which differs between ranks along data axes."""
        self.of_slices = frozenset({*program.mesh.shard_axes, RAGGED})
        """The kind of a value that is computed from slices and is no slice itself."""
        kinds = [argument.own for argument in program.arguments]
        self.own = UNIFORM.union(*[kind.over for kind in kinds if isinstance(kind, Slice)])
        """The axes along which slices of a pass's state differ. Values that differ along no other axes may meet the
        slices of a leaf, and make slices that differ so."""
        self._differ = program.open is not None and program.open.symbols.differ
        self._kinds: dict[Node, Kind] = {}
        self._written: dict[Any, frozenset[str]] = {}
        """Memory -> the axes along which the values that were written into it differ."""
        self._unset: dict[Any, Unset] = {}
        """Memory of a new tensor -> its elements that no node has set."""
        self._slices: dict[Any, Slice] = {}
        """Memory -> the slice that lies in it."""
        self._buffers = set[Node]()
        self._memory: dict[Node, Any] = {}
        """Node -> the memory of its value, where that was asked for."""

    def run(self) -> dict[Node, Kind]:
        """The kind of each node."""
        self.enter()
        for node in self.program.graph.nodes:
            self.visit(node)
        return {node: self.of(node) for node in self._kinds}

    def enter(self) -> None:
        """Note the kinds of the arguments."""
        for argument, node in zip(self.program.arguments, self.program.placeholders):
            kind = kind_of_state(self.program, argument)
            self.note(node, self.per_rank if kind is None else kind)

    def visit(self, node: Node) -> None:
        """Find the kind of a node, whose inputs have been visited."""
        if node.op == "get_attr":
            self.note(node, UNIFORM)
        elif node.op == "call_function":
            operation = record(node)
            self.note(node, self._infer(node, operation))
            self._write(node, operation)

    def of(self, given: Any) -> Kind:
        """The kind of an argument of a node, including the values that nodes have written into its memory by now, and
        what was in the memory of a new tensor that no node has set. An argument that is no node is the same on all
        ranks."""
        if not isinstance(given, fx.Node):
            return UNIFORM
        kind = self.of_memory(given)
        unset = self._unset.get(self._find_memory(given)) if self._unset and isinstance(kind, frozenset) else None
        return kind | self.per_rank if unset is not None and unset.reaches(given.meta["val"]) else kind

    def of_memory(self, given: Node) -> Kind:
        """The kind of the values that nodes have written into the memory of a node's value."""
        kind = self._kinds[given]
        written = self._written.get(self._find_memory(given)) if self._written else None
        if not written:
            return kind
        if isinstance(kind, Slice):
            over = written.difference(self.program.mesh.split(self.program.layouts[kind.bucket].cut_axes))
            return replace(kind, over=kind.over | over) if over else kind
        return kind | written if isinstance(kind, frozenset) else kind

    def find_source_within(self, node: Node) -> Node | None:
        """The source of a copy that lies in the memory of the copy's target; None for any other node."""
        if self.name_of(node) != "copy_":
            return None
        target, source, *_ = node.args
        return source if isinstance(source, fx.Node) and storage(source) == storage(target) else None

    def leave_unset(self, node: Node) -> None:
        """Note that a node makes a tensor whose elements are whatever is in the memory, until nodes set them."""
        self._unset[storage(node)] = Unset(node.meta["val"])

    def _find_memory(self, node: Node) -> Any:
        if node not in self._memory:
            self._memory[node] = storage(node)
        return self._memory[node]

    def _infer(self, node: Node, operation: Operation) -> Kind:
        if not operation.waits and not operation.takes_buffers:  # these check the buffer in their rules
            self._refuse_buffers(node)
        kind = operation.kind(self, node)
        if self.varies_by_size(node):
            kind = self._vary(node, kind)
        return self._check(node, operation, kind) if operation.is_foreign else kind

    def varies_by_size(self, node: Node) -> bool:
        """Whether ranks have other sizes, or numbers, with which a node computes."""
        return self._differ and depends_on_sizes(node)

    def _vary(self, node: Node, kind: Kind) -> Kind:
        """The kind of the result of a node that computes with sizes, or numbers, which differ between ranks."""
        if isinstance(kind, list):
            return [self._vary(node, item) for item in kind]
        if isinstance(kind, Slice):
            raise refuse_drift(self.program, node, self.per_rank, kind)
        return kind | self.per_rank if isinstance(kind, frozenset) else kind

    def _refuse_buffers(self, node: Node) -> None:
        for read in self._buffers.intersection(inputs_of(node)):
            problem = f"reads the padding of {describe_kind(self.program, self.of(read))}"
            raise self.refuse(node, problem, "take leaves of it")

    def _check(self, node: Node, operation: Operation, kind: Any) -> Kind:
        """Refuse a result of a wrong rule: an object that is no kind, an unknown axis or leaf, a slice of another size
        than its leaf's. Returns `kind`."""
        value, problem = node.meta.get("val"), None
        if isinstance(kind, list) and isinstance(value, (list, tuple)) and len(kind) == len(value):
            return [self._check(node, operation, item) for item in kind]
        if isinstance(kind, frozenset):
            strange = sorted(kind - {*self.program.mesh.names, RAGGED})
            problem = f"a value that differs along {strange[0]!r}, which is no axis" if strange else None
        elif isinstance(kind, (Slice, Buffer)):
            layout = self.program.layouts.get(kind.bucket)
            leaves = (kind.leaf,) if isinstance(kind, Slice) else kind.leaves
            if layout is None or not all(leaf in range(len(layout.leaves)) for leaf in leaves):
                problem = f"leaf {list(leaves)} of {kind.bucket!r}, which the program does not have"
            elif isinstance(kind, Slice):
                problem = self._find_wrong_size(node, layout, kind)
        else:
            count = f" of {len(kind)}" if isinstance(kind, list) else ""
            problem = f"a {type(kind).__name__}{count}"
        if problem is not None:
            where = f"operation {operation.name!r}"
            raise FzeroError(
                where, f"its rule for kinds gives {problem}, in {node.name}", "give one of fzero.ops' kinds"
            )
        return kind

    def _find_wrong_size(self, node: Node, layout: Layout, kind: Slice) -> str | None:
        value, size = node.meta.get("val"), len(layout.part(kind.leaf, RANK))
        if not isinstance(value, Tensor) or value.numel() == size:
            return None
        return f"a slice of {path_of(self.program, kind)} of {value.numel()} elements, where rank {RANK} holds {size}"

    def note(self, node: Node, kind: Kind) -> None:
        """Give a node its kind."""
        if isinstance(kind, frozenset):
            value = node.meta.get("val") if RAGGED in kind else None
            if isinstance(value, Tensor) and not value.ndim:
                kind -= {RAGGED}  # a 0-d value has the same shape on all ranks, also the sum of a slice
        elif isinstance(kind, Slice):
            self._slices[storage(node)] = kind
        elif isinstance(kind, Buffer):
            self._buffers.add(node)
        self._kinds[node] = kind

    def _write(self, node: Node, operation: Operation) -> None:
        """Note that the memory that a node writes to differs, from here on, along the axes along which the written
        value differs. Every view of that memory differs with it."""
        kind = self._kinds[node]
        for position, written in enumerate(operation.writes(node)):
            new, memory = kind[position % len(kind)] if isinstance(kind, list) else kind, storage(written)
            if isinstance(new, frozenset) and new and memory in self._slices:
                raise refuse_drift(self.program, node, new, self._slices[memory])
            if axes := axes_of(self.program, new):
                self._written[memory] = self._written.get(memory, UNIFORM) | axes
        for overwritten in operation.overwrites(node) if self._unset else ():
            if storage(overwritten) in self._unset:
                unset, source = self._unset[storage(overwritten)], self.find_source_within(node)
                if source is None:
                    unset.set(overwritten.meta["val"])
                else:
                    unset.copy(source.meta["val"], overwritten.meta["val"])

    # for the rules of operations

    def name_of(self, node: Node) -> str:
        """The name of the operation that a node calls."""
        return name_of(node)

    def record(self, node: Node) -> Operation:
        """The record of the operation that a node calls."""
        return record(node)

    def refuse(self, node: Node, problem: str, way_out: str = PASS_BUG) -> FzeroError:
        """The error of a node whose operands have the wrong kinds."""
        return refuse_node(self.program, node, problem, way_out)

    def join(self, node: Node, given: Sequence[Node], pointwise: bool, beside: Sequence[Node] = ()) -> Kind:
        """The kind of a result that depends on the values `given`, and on 0-d values `beside` them.

        A pointwise result of slices of one leaf is a slice of that leaf. Any other result of slices differs between
        ranks that hold different slices. Where state of a pass differs along axes, results do that meet it.
        """
        kinds = [kind for x in (*given, *beside) for kind in _flatten(self.of(x))]
        slices = {kind for kind in kinds if isinstance(kind, Slice)}
        varies = UNIFORM.union(*[kind for kind in kinds if isinstance(kind, frozenset)])
        if not slices:
            return varies
        if not pointwise:
            return varies.union({RAGGED}, *(axes_of(self.program, kind) for kind in slices))
        if varies - self.own:
            raise refuse_drift(self.program, node, varies, next(kind for kind in kinds if isinstance(kind, Slice)))
        found, over = next(iter(slices)), varies.union(*(kind.over for kind in slices))
        is_of_one = len({(kind.bucket, kind.leaf) for kind in slices}) == 1
        if len(slices) > 1 and is_of_one and not over <= self.own:  # one differs along an axis, and one does not
            both = " and ".join(sorted((describe_kind(self.program, kind) for kind in slices), key=len))
            raise self.refuse(node, f"mixes {both}", f"average over {sorted(over)} first")
        if not is_of_one:
            paths = " and ".join(sorted(path_of(self.program, kind) for kind in slices))
            raise self.refuse(node, f"mixes slices of {paths}", "gather one of them")
        for shape in (list(x.meta["val"].shape) for x in given if isinstance(self.of(x), frozenset)):
            if shape:
                raise self.refuse(node, f"has a whole {shape} meet a slice", "take this rank's slice of it")
        return replace(found, over=over)

    def expect(self, node: Node, given: Node, expected: Kind) -> None:
        """Refuse an operand that is not of the expected kind."""
        kind = self.of(given)
        if kind != expected:
            takes = f"takes {describe_kind(self.program, kind)} for {describe_kind(self.program, expected)}"
            raise self.refuse(node, takes)

    def expect_slice(self, node: Node, given: Node, bucket: str, leaf: int) -> frozenset[str]:
        """The axes along which an operand, a slice of a leaf, differs beside: some of `own`. Refuses any other
        operand."""
        kind = self.of(given)
        over = kind.over & self.own if isinstance(kind, Slice) else UNIFORM
        self.expect(node, given, Slice(bucket, leaf, over))
        return over

    def expect_full(self, node: Node, given: Node) -> None:
        """Refuse an operand that is a slice, a buffer, or of different sizes on different ranks."""
        kind = self.of(given)
        if not isinstance(kind, frozenset) or RAGGED in kind:
            takes = f"takes {describe_kind(self.program, kind)} for a whole value"
            raise self.refuse(node, takes, "gather it first")

    def expect_leaf(self, node: Node, given: Node, bucket: str, leaf: int) -> None:
        """Refuse an operand that is no full tensor of a leaf's shape."""
        self.expect_full(node, given)
        self.expect_shape(node, given.meta["val"].shape, bucket, leaf)

    def expect_shape(self, node: Node, shape: Sequence[int], bucket: str, leaf: int) -> None:
        """Refuse a shape that is not the leaf's."""
        expected = self.program.layouts[bucket].leaves[leaf]
        if tuple(shape) != expected.shape:
            problem = f"has shape {list(shape)} where {expected.path} has {list(expected.shape)}"
            raise self.refuse(node, problem)

    def expect_uniform(self, node: Node, use: Node | None = None, but: Sequence[str] = ()) -> None:
        """Refuse a first operand that differs between ranks, `but` along some axes, or those of `own`. `use` is the
        node of the user's code that a `take` or `beside` prepares the operand for."""
        kind = self.of(operand_of(node))
        if not isinstance(kind, frozenset):
            takes = f"takes {describe_kind(self.program, kind)} for a uniform value"
            raise self.refuse(node, takes, "gather it first")
        if kind.difference(but, self.own):
            raise refuse_drift(self.program, node, kind, use=use)


def infer(program: Program) -> dict[Node, Kind]:
    """Node -> its kind.

    Raises:
        FzeroError: with the leaf, the operation and the user's line, where a slice meets the slice of another leaf or a
            value that differs between ranks; where a node would read the padding of a buffer; where a collective gets
            another leaf than it names, or values of different sizes.
    """
    return Walk(program).run()


def _flatten(kind: Kind) -> list[Kind]:
    return kind if isinstance(kind, list) else [kind]
