"""Movable: the state of a step that may lie elsewhere than on the device, by layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from fzero.base.placement import Placement
from fzero.base.sizes import format_size
from fzero.layout.layout import layer_of
from fzero.program import ops
from fzero.program.arguments import operand_of
from fzero.program.operation import Node, nbytes
from fzero.program.ops import loops
from fzero.program.places import list_movable
from fzero.program.program import Program
from fzero.program.records import is_call

Paths = frozenset[str]
"""Arguments, by their paths."""
NOTHING: Paths = frozenset()


class Layer(NamedTuple):
    """A layer, and what of it may lie elsewhere: the parameters, which the step gathers, and other state, such as an
    optimizer's."""

    name: str
    parameters: Paths
    state: Paths

    def holds(self, paths: Paths) -> bool:
        """Whether some of these arguments belong to the layer."""
        return not paths.isdisjoint(self.parameters | self.state)


class Movable:
    """The arguments of a trace that may lie on the device or in the placement `to`, by layers."""

    def __init__(self, traced: Program, to: Placement | None) -> None:
        self.to, gathered, placeholders = to, _find_parameters(traced), traced.placeholders
        found: dict[str, tuple[set[str], set[str]]] = {}
        layer: dict[str, str] = {}  # of a leaf, by its path: state may lie in a bucket of its own
        self.nbytes: dict[str, int] = {}
        for i in list_movable(traced, to):
            node, argument = placeholders[i], traced.arguments[i]
            layout = traced.layouts[argument.bucket]
            name = layer.setdefault(layout.leaves[argument.leaf].path, layer_of(layout.bucket))
            found.setdefault(name, (set(), set()))[node not in gathered].add(argument.path)
            self.nbytes[argument.path] = nbytes(node.meta["val"])
        self.layers = [Layer(name, frozenset(own), frozenset(rest)) for name, (own, rest) in found.items()]

    @property
    def state(self) -> Paths:
        """All optimizer state."""
        return NOTHING.union(*(layer.state for layer in self.layers))

    @property
    def both(self) -> Paths:
        """All optimizer state and all parameters."""
        return frozenset(self.nbytes)

    def count(self, paths: Collection[str]) -> int:
        """The bytes of these arguments on a rank."""
        return sum(self.nbytes[path] for path in paths)

    def explain(self, away: Paths, price: str) -> Iterator[str]:
        """Lines that say which layers lie elsewhere, for a price."""
        freed = format_size(self.count(away))
        yield f"  has {freed} of state in {self.to}, {price}" if away else f"  has no state in {self.to}"
        for what, parts in (("optimizer state", self.state), ("parameters", self.both - self.state)):
            layers = [layer.name for layer in self.layers if layer.holds(parts)]
            chosen = {layer.name for layer in self.layers if layer.holds(parts & away)}
            if chosen:
                runs = _list_runs([name if name in chosen else None for name in layers])
                yield f"    {what} of {len(chosen)} of {len(layers)} layers: {runs}"


def _list_runs(names: Sequence[str | None]) -> str:
    """The names, of those that stand one behind the other the first and the last."""
    runs = [list(run) for is_named, run in groupby(names, key=lambda name: name is not None) if is_named]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _find_parameters(traced: Program) -> set[Node]:
    """The arguments of which a trace gathers slices, or casts of slices, itself or in a loop over layers."""
    pending = [operand_of(gather) for gather in traced.graph.find_nodes(op="call_function", target=ops.gather)]
    for node in pending:  # the list grows while it is read
        if node.op == "call_function" and (len(node.all_input_nodes) == 1 or is_call(node, loops.pick)):
            pending += node.all_input_nodes
    return {node for node in pending if node.op == "placeholder"}
