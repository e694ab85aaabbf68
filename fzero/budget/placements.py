"""Placements: what state could lie elsewhere than on the device, what bytes that saves and what seconds it costs.

The layers of a step go one by one. A layer's optimizer state goes first, its parameters follow. Layers of which a loop
goes through one in each turn are one choice: their parameters go together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from fzero.budget.costs import Costs
from fzero.budget.frontier import Choice, Lifetime, Option
from fzero.budget.movable import NOTHING, Layer, Movable, Paths
from fzero.budget.outline import Outline
from fzero.layout.layout import layer_of
from fzero.passes.order import find_origins
from fzero.program.operation import Node, nbytes


def list_placement_choices(
    outline: Outline, movable: Movable, costs: Costs
) -> Iterator[tuple[Choice, tuple[Paths, ...]]]:
    """What of each layer lies elsewhere, with the arguments of each option: from all of it to nothing.

    Each layer has its share of the costs. An option that has more on the device than another and is no faster is left
    out: optimizer state elsewhere may cost more where the parameters beside it have to come and go.
    """
    base = outline.program
    uses = [(use, {layer_of(base.layouts[name].bucket) for name in use.names}) for use in outline.uses]
    worlds = {use: max(base.layouts[name].world for name in use.names) for use, _ in uses}
    gradients = list(_find_gradients(outline))
    price = _share_costs(movable, costs, [name for name, _ in gradients])

    def describe(group: Sequence[Layer], away: Paths) -> Option:
        spans = [Lifetime(0, len(outline.line), -movable.count(away))]
        for layer in group:
            if layer.state and layer.state <= away:
                spans += [span for name, span in gradients if name == layer.name]
        own = {layer.name for layer in group if layer.parameters & away}
        spans += [Lifetime(x.start, x.stop + 1, x.nbytes // worlds[x]) for x, names in uses if names & own]
        return Option(sum(price(layer, away) for layer in group), tuple(spans))

    for group in _join_loops(movable.layers, [names for _, names in uses]):
        rungs = [(describe(group, away), away) for away in _list_ladder(group)]
        least = accumulate((option.seconds for option, _ in rungs), min)
        faster = [rung for rung, before in zip(rungs, (float("inf"), *least)) if 0 < rung[0].seconds < before]
        options, ladder = zip(*faster, (Option(0.0, ()), NOTHING))
        yield Choice(f"place {group[0].name}", options), ladder


def _share_costs(movable: Movable, costs: Costs, arrivals: Sequence[str]) -> Callable[[Layer, Paths], float]:
    """A function of a layer and of what lies elsewhere: the layer's share of the costs.

    Shares go by bytes, and are the larger the later gradients arrive: what the first ones do is hidden behind the rest
    of the backward pass. `arrivals` are layers, in the order of their gradients.
    """
    late = {name: number for number, name in enumerate(arrivals, 1)}
    usual = (len(late) + 1) / 2

    def weigh(layer: Layer, away: Paths) -> float:
        return late.get(layer.name, usual) * movable.count((layer.state | layer.parameters) & away)

    of_state, of_both = (
        sum(weigh(layer, away) for layer in movable.layers) or 1 for away in (movable.state, movable.both)
    )

    def price(layer: Layer, away: Paths) -> float:
        has_parameters = not layer.parameters.isdisjoint(away)
        return weigh(layer, away) * (costs.both / of_both if has_parameters else costs.state / of_state)

    return price


def _list_ladder(group: Sequence[Layer]) -> Iterator[Paths]:
    """What lies elsewhere of some layers, from all to the state of one. The state of the first layer comes back first:
    its gradients are the last ones to be there."""
    state = NOTHING.union(*(layer.state for layer in group))
    parameters = NOTHING.union(*(layer.parameters for layer in group))
    if parameters:
        yield state | parameters
    for layer in group:
        if state and layer.state:
            yield state
        state -= layer.state


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


def _find_gradients(outline: Outline) -> Iterator[tuple[str, Lifetime]]:
    """For each reduce-scatter the layer, and where its slices of gradients need no memory of the device if the state
    that they update lies elsewhere: they leave as soon as they are there."""
    base, index = outline.program, outline.index
    origins = find_origins(base.graph, "scattered")
    derived: dict[Node, list[Node]] = {}
    for node, start in origins.items():
        derived.setdefault(start, []).append(node)
    for start, nodes in derived.items():
        users = [index[user] for node in nodes for user in node.users if user in index and user not in origins]
        begin, stop = max(index[node] for node in nodes) + 1, max(users, default=0) + 1
        if begin < stop:
            yield layer_of(base.layout_of(start).bucket), Lifetime(begin, stop, -nbytes(start.meta["val"]))
