"""Placements: what state could lie elsewhere than on the device, what bytes that saves and what seconds it costs.

The layers of a step go one by one. A layer's optimizer state goes first, its parameters follow. Layers of which a loop
goes through one in each turn are one choice: their parameters go together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from fzero.base.placement import Placement
from fzero.budget.choices import LEAST_WEIGHT, Line, find_uses
from fzero.budget.frontier import Choice, Option, Span
from fzero.layout.layout import layer_of
from fzero.passes.order import find_origins
from fzero.program import ops
from fzero.program.listing import format_size
from fzero.program.operation import Node, nbytes
from fzero.program.ops import loops
from fzero.program.program import Program
from fzero.program.records import is_call

Positions = frozenset[int]
"""Arguments, by position."""
NOTHING: Positions = frozenset()
FREE = 1.01
"""Parameters cost nothing beside optimizer state where both together cost at most so many times as much."""


class Layer(NamedTuple):
    """A layer, and what of it may lie elsewhere: the parameters, which the step gathers, and other state, such as an
    optimizer's."""

    name: str
    parameters: Positions
    state: Positions

    def holds(self, positions: Positions) -> bool:
        """Whether some of these arguments belong to the layer."""
        return not positions.isdisjoint(self.parameters | self.state)


class Costs(NamedTuple):
    """The seconds by which a step grows where all optimizer state lies elsewhere, and where all parameters do too."""

    state: float
    both: float

    @property
    def is_apart(self) -> bool:
        """Whether parameters cost something beside optimizer state."""
        return self.both > FREE * self.state


class Movable:
    """The arguments of a trace that may lie on the device or in the placement `to`, by layers. State that lies in a
    third placement stays there, and so does state that every rank holds whole. Nothing moves where `to` is None."""

    def __init__(self, traced: Program, to: Placement | None) -> None:
        self.to, gathered = to, _find_parameters(traced)
        found: dict[str, tuple[set[int], set[int]]] = {}
        layer: dict[str, str] = {}  # of a leaf, by its path: state may lie in a bucket of its own
        self.nbytes: dict[int, int] = {}
        for i, (node, argument) in enumerate(zip(traced.placeholders, traced.arguments)):
            layout = None if argument.bucket is None else traced.layouts[argument.bucket]
            if to and layout is not None and not layout.replicated and argument.place in (None, to):
                name = layer.setdefault(layout.leaves[argument.leaf].path, layer_of(layout.bucket))
                found.setdefault(name, (set(), set()))[node not in gathered].add(i)
                self.nbytes[i] = nbytes(node.meta["val"])
        self.layers = [Layer(name, frozenset(own), frozenset(rest)) for name, (own, rest) in found.items()]

    @property
    def state(self) -> Positions:
        """All optimizer state."""
        return NOTHING.union(*(layer.state for layer in self.layers))

    @property
    def both(self) -> Positions:
        """All optimizer state and all parameters."""
        return frozenset(self.nbytes)

    def count(self, positions: Collection[int]) -> int:
        """The bytes of these arguments on a rank."""
        return sum(self.nbytes[i] for i in positions)

    def places(self, away: Positions) -> dict[int, Placement | None]:
        """Where each argument lies, where these lie away from the device."""
        return {i: self.to if i in away else None for i in self.nbytes}

    def explain(self, away: Positions, price: str) -> Iterator[str]:
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
    pending = [gather.args[0] for gather in traced.graph.find_nodes(op="call_function", target=ops.gather)]
    for node in pending:  # the list grows while it is read
        if node.op == "call_function" and (len(node.all_input_nodes) == 1 or is_call(node, loops.pick)):
            pending += node.all_input_nodes
    return {node for node in pending if node.op == "placeholder"}


def measure_costs(base: Program, movable: Movable, build: Callable[[Positions], Program]) -> Costs:
    """What it costs to keep state elsewhere, by the timelines of the programs that `build` makes of a base. What copies
    and updates cost depends on how much of them is hidden, so it is read off programs and not computed.

    A second of a copy costs something also where it is hidden: rates are guesses.
    """
    before = base.timeline().seconds

    def measure(away: Positions) -> float:
        seconds = build(away).timeline().seconds - before if away else 0.0
        return max(seconds, LEAST_WEIGHT * base.rates.copy(movable.count(away)))

    state = measure(movable.state)
    return Costs(state, measure(movable.both) if movable.both > movable.state else state)


def list_placement_choices(
    base: Program, line: Line, movable: Movable, costs: Costs
) -> Iterator[tuple[Choice, tuple[Positions, ...]]]:
    """What of each layer lies elsewhere, with the arguments of each option: from all of it to nothing.

    Each layer has its share of the costs. Where parameters beside optimizer state cost nothing, both go together.
    """
    index = {place.node: i for i, place in enumerate(line)}
    uses = [(use, {layer_of(base.layouts[name].bucket) for name in use.names}) for use in find_uses(base, index)]
    gradients, world = list(_find_gradients(base, index)), base.mesh.size(base.mesh.shard_axis)
    price = _share_costs(movable, costs, [name for name, _ in gradients])

    def describe(group: Sequence[Layer], away: Positions) -> Option:
        spans = [Span(0, len(line), -movable.count(away))]
        for layer in group:
            if layer.state and layer.state <= away:
                spans += [span for name, span in gradients if name == layer.name]
        own = {layer.name for layer in group if layer.parameters & away}
        spans += [Span(use.start, use.stop + 1, use.nbytes // world) for use, names in uses if names & own]
        return Option(sum(price(layer, away) for layer in group), tuple(spans))

    for group in _join_loops(movable.layers, [names for _, names in uses]):
        ladder = list(_list_ladder(group, costs.is_apart))
        yield Choice(f"place {group[0].name}", tuple(describe(group, away) for away in ladder)), tuple(ladder)


def _share_costs(movable: Movable, costs: Costs, arrivals: Sequence[str]) -> Callable[[Layer, Positions], float]:
    """A function of a layer and of what lies elsewhere: the layer's share of the costs.

    Shares go by bytes, and optimizer state costs the more the later gradients `arrive`: what the first ones do is
    hidden behind the rest of the backward pass.
    """
    late = {name: number for number, name in enumerate(arrivals, 1)}
    usual, is_apart = (len(late) + 1) / 2, costs.is_apart

    def weigh_state(layer: Layer, away: Positions) -> float:
        moved = layer.state if is_apart else layer.state | layer.parameters
        return late.get(layer.name, usual) * movable.count(moved & away)

    of_state = sum(weigh_state(layer, movable.both) for layer in movable.layers) or 1
    of_parameters = movable.count(movable.both - movable.state) or 1

    def price(layer: Layer, away: Positions) -> float:
        state = (costs.state if is_apart else costs.both) * weigh_state(layer, away) / of_state
        return state + (costs.both - costs.state) * is_apart * movable.count(layer.parameters & away) / of_parameters

    return price


def _list_ladder(group: Sequence[Layer], is_apart: bool) -> Iterator[Positions]:
    """What lies elsewhere of some layers, from all to nothing. The state of the first layer comes back first: its
    gradients are the last ones to be there, and nothing hides their way."""
    state = NOTHING.union(*(layer.state for layer in group))
    parameters = NOTHING.union(*(layer.parameters for layer in group))
    if parameters:
        yield state | parameters
    if state and (is_apart or not parameters):
        yield state
        for layer in group[:-1]:
            if layer.state:
                state -= layer.state
                if state:
                    yield state
    yield NOTHING


def _join_loops(layers: Sequence[Layer], together: Sequence[set[str]]) -> Iterator[list[Layer]]:
    """The layers in groups: those of which a loop goes through one in each turn, named `together`, are one group."""
    done = set[str]()
    for layer in layers:
        if layer.name in done:
            continue
        names = {layer.name}
        while more := {other for row in together if not row.isdisjoint(names) for other in row} - names:
            names |= more
        done |= names
        yield [other for other in layers if other.name in names]


def _find_gradients(base: Program, index: Mapping[Node, int]) -> Iterator[tuple[str, Span]]:
    """For each reduce-scatter the layer, and where its slices of gradients need no memory of the device if the state
    that they update lies elsewhere: they leave as soon as they are there."""
    origins = find_origins(base.graph, "scattered")
    derived: dict[Node, list[Node]] = {}
    for node, start in origins.items():
        derived.setdefault(start, []).append(node)
    for start, nodes in derived.items():
        users = [index[user] for node in nodes for user in node.users if user in index and user not in origins]
        begin, stop = max(index[node] for node in nodes) + 1, max(users, default=0) + 1
        if begin < stop:
            yield layer_of(base.layout_of(start).bucket), Span(begin, stop, -nbytes(start.meta["val"]))
