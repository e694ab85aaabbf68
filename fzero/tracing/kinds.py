"""Kinds while tracing: whether a traced tensor differs between ranks, before the program is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.torch_private import pytree_leaves, unwrap
from fzero.base.torch_private_traces import TraceGraph
from fzero.program.inference import Walk
from fzero.program.kinds import UNIFORM, Kind
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import find_writes, storage


class Kinds:
    """The kinds of the tensors of a trace that is under way, by a walk that follows the growing graph.

    `program` has the arguments, the layouts and the graph of the trace.
    """

    def __init__(self, program: Program, traced: TraceGraph) -> None:
        self.program, self._traced = program, traced
        self._walk = Walk(program)
        self._walk.enter()
        self._fixed = {None, *map(storage, program.placeholders)}  # the memory that a step may not write into
        self._last: Node = program.placeholders[-1] if program.placeholders else None

    def note_argument(self, node: Node, sources: Sequence[Node], program: Program) -> Kind:
        """Note a further argument of the trace, which ranks compute from these arguments by a program. Its kind: one of
        captured tensors alone is the same on all ranks, where they have the same sizes."""
        varies = any(map(self._walk.varies_by_size, program.graph.nodes))
        kind = UNIFORM.union(*map(self.of, sources), self._walk.per_rank if varies else UNIFORM)
        self._walk.note(node, kind)
        self._fixed.add(storage(node))
        return kind

    def node_of(self, x: Tensor) -> Node | None:
        """The node of a traced tensor; None for a tensor that the step captured and has not used yet."""
        return self._traced.node_of(x)

    def may_write(self, x: Tensor) -> bool:
        """Whether a step may write into the slice `x`, as `MovePerformer.may_write` says."""
        return self._memory(x) not in self._fixed

    def note_result(self, x: Tensor, full: Tensor, result: Any) -> None:
        """Forbid to write into the slice `x`, where `result` is a view of the value `full` gathered from it."""
        views = (item for item in pytree_leaves(result) if isinstance(item, Tensor))
        if self._memory(x) != self._memory(full) and any(self._memory(view) == self._memory(full) for view in views):
            self._fixed.add(self._memory(x))

    def find_last(self) -> Node:
        """The node that was traced last."""
        return self._traced.find_last()

    def has_write(self, last: Node) -> bool:
        """Whether a node behind `last` writes into memory."""
        return any(map(find_writes, self._traced.nodes_after(last)))

    def _memory(self, x: Tensor) -> Any:
        node = self.node_of(x)
        return None if node is None else storage(node)

    def varies(self, x: Tensor) -> bool:
        """Whether a tensor may differ between ranks, after all that the step has written into its memory so far."""
        node = self.node_of(x)
        return node is not None and self.node_varies(node)

    def node_varies(self, node: Node) -> bool:
        """Whether the value of a node may differ between ranks."""
        self._follow()
        kind = self.of(node)
        return bool(kind) if isinstance(kind, frozenset) else True

    def find_model_axes(self, x: Tensor, differs: bool) -> frozenset[str]:
        """The model axes along which a whole tensor of the trace differs, or is the same. None of any other tensor."""
        node = self.node_of(unwrap(x)) if self.program.model_axes else None
        if node is None:
            return frozenset()
        self._follow()
        kind = self.of(node)
        if not isinstance(kind, frozenset):
            return frozenset()
        return frozenset(axis for axis in self.program.model_axes if (axis in kind) == differs)

    def of(self, node: Node) -> Kind:
        """The kind of a node."""
        return self._walk.of(node)

    def _follow(self) -> None:
        """Walk over the nodes that were traced since the last call.

        A node that the walk refuses counts as different on every rank: where its value matters, `verify` refuses the
        program, with the user's line.
        """
        for node in self._traced.nodes_after(self._last):
            self._last = node
            try:
                self._walk.visit(node)
            except FzeroError:
                self._walk.note(node, self._walk.per_rank)
