"""Costs: the seconds by which a step grows where state lies elsewhere, read off programs or estimated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fzero.budget.movable import Movable, Paths
from fzero.budget.outline import LEAST_WEIGHT, Outline
from fzero.layout.layout import layer_of
from fzero.passes.host_updates import UPDATES
from fzero.passes.order import find_origins
from fzero.passes.place import place
from fzero.program.operation import Node
from fzero.program.places import is_wide
from fzero.program.program import Program
from fzero.program.records import comm_of, find_bodies, starts
from fzero.program.timeline import COMPUTE, HOST


class Costs(NamedTuple):
    """The seconds by which a step grows where all optimizer state lies elsewhere, and where all parameters do too."""

    state: float
    both: float


def measure_costs(outline: Outline, movable: Movable, build: Callable[[Paths], Program]) -> Costs:
    """What it costs to keep state elsewhere, by the timelines of the programs that `build` makes of a base. What copies
    and updates cost depends on how much of them is hidden, so it is read off programs and not computed.

    A second of a copy costs something also where it is hidden: rates are guesses.
    """

    def measure(away: Paths) -> float:
        seconds = build(away).timeline().seconds - outline.timeline.seconds if away else 0.0
        return max(seconds, LEAST_WEIGHT * outline.program.rates.copy(movable.count(away)))

    state = measure(movable.state)
    return Costs(state, measure(movable.both) if movable.both > movable.state else state)


def estimate_costs(outline: Outline, movable: Movable) -> Costs:
    """The costs without a program: copies and updates of layers queue on their lanes, behind the gradients of the
    base.

    Hidden copies cost what `measure_costs` says. Copies that are the step cost up to 60 % more or less (tests), and
    updates whose leaves wait for each other, as LAMB's for norms, cost more than this.
    """
    queues = _Queues(outline, movable)

    def estimate(away: Paths, has_parameters: bool) -> float:
        seconds = queues.count(has_parameters) if away else 0.0
        return max(seconds, LEAST_WEIGHT * queues.rates.copy(movable.count(away)))

    state = estimate(movable.state, has_parameters=False)
    return Costs(state, estimate(movable.both, has_parameters=True) if movable.both > movable.state else state)


class _Update(NamedTuple):
    """The update of a layer: when its gradients are there, and the bytes on a rank of these, of its parameters and of
    its other state."""

    arrival: float
    gradients: int
    parameters: int
    state: int


class _Queues:
    """The lanes of a base beside which state lies elsewhere."""

    def __init__(self, outline: Outline, movable: Movable) -> None:
        base, timeline, costs = outline.program, outline.timeline, outline.costs
        self.rates = base.rates
        self.is_of_disk = movable.to is not None and movable.to.where == "disk"
        self.seconds = timeline.seconds
        nbytes = {layer.name: movable.count(layer.parameters) for layer in movable.layers}
        self.gathers: list[tuple[float, int]] = []
        """When parameters have to be on the device, and their bytes on a rank."""
        gathers, scatters = (_list_operations(base, how) for how in ("gathered", "scattered"))
        arrivals: dict[str, float] = {}
        gradients: dict[str, int] = {}
        for transfer in timeline.transfers:
            layout = base.layouts.get(transfer.comm.bucket)
            name = None if layout is None else layer_of(layout.bucket)
            if name in nbytes and transfer.comm.op in gathers:
                self.gathers.append((transfer.start, nbytes[name]))
            elif layout and name in nbytes and transfer.comm.op in scatters:
                arrivals[name] = max(arrivals.get(name, 0.0), transfer.end)
                gradients[name] = gradients.get(name, 0) + transfer.comm.nbytes // layout.world
        on_host = _find_updates(base, movable)
        self.on_host = sum(on_host.values())
        self.on_device = sum(costs[node].seconds for node in on_host if costs[node].lane == COMPUTE)
        last = max(arrivals.values(), default=self.seconds)
        self.ready = last if _waits_for_all(base, on_host) else 0.0
        """When the first update may begin: behind the last gradient where updates take a factor of all, as with
        clipping."""
        self.updates = sorted(
            _Update(
                arrivals.get(layer.name, last),
                gradients.get(layer.name, nbytes[layer.name]),
                nbytes[layer.name],
                movable.count(layer.state),
            )
            for layer in movable.layers
        )

    def count(self, has_parameters: bool) -> float:
        """The seconds more, with optimizer state elsewhere, or with parameters too."""
        late = self._bring_parameters() if has_parameters else 0.0
        done = self._update(self.updates, has_parameters)
        return max(self.seconds - self.on_device, done) + late - self.seconds

    def _bring_parameters(self) -> float:
        """The seconds by which the all-gathers are late at most whose parameters come from elsewhere, one behind
        another."""
        read = copied = late = 0.0
        for start, nbytes in self.gathers:
            read += self.rates.copy_to_disk(nbytes) if self.is_of_disk else 0.0
            copied = max(copied, read) + self.rates.copy(nbytes)
            late = max(late, copied - start)
        return late

    def _update(self, updates: Sequence[_Update], has_parameters: bool) -> float:
        """When the last update is done."""
        up = down = disk = 0.0
        host, read = self.ready, list[float]()
        total = sum(each.parameters + each.state for each in updates)
        held = [each.state + (each.parameters if has_parameters else 0) for each in updates]
        ahead = UPDATES if self.ready else 1  # state is read while updates wait for the last gradient
        of_disk = [self.rates.copy_to_disk(nbytes) if self.is_of_disk else 0.0 for nbytes in held]
        for i, each in enumerate(updates):
            sent = each.gradients + (0 if has_parameters else each.parameters)
            up = max(up, each.arrival) + self.rates.copy(sent)
            for seconds in of_disk[len(read) : i + ahead]:
                disk = max(disk, 0.0 if self.ready else each.arrival) + seconds
                read.append(disk)
            host = max(host, up, read[i]) + self.on_host * (each.parameters + each.state) / max(total, 1)
            if not has_parameters:
                down = max(down, host) + self.rates.copy(each.parameters)
            if self.is_of_disk:
                disk = max(disk, host) + of_disk[i]
        return max(host, down, disk)


def _list_operations(base: Program, direction: str) -> set[str]:
    """The collectives that start "gathered" or "scattered" buffers, also in loops."""
    own = {comm.op for node in base.graph.nodes if starts(node) == direction for comm in comm_of(base, node)}
    return own.union(*(_list_operations(body, direction) for body in find_bodies(base.graph)))


def _find_updates(base: Program, movable: Movable) -> dict[Node, float]:
    """The nodes of a base that run on the host where all optimizer state lies elsewhere, or without any all parameters
    -> their seconds there."""
    costs = place(base, to=movable.to, away=movable.state or movable.both).costs()
    return {node: cost.seconds for node, cost in costs.items() if cost.lane == HOST and node.op == "call_function"}


def _waits_for_all(base: Program, updates: dict[Node, float]) -> bool:
    """Whether updates take more than state, numbers and slices of gradients as they arrive: what may follow from all
    gradients."""
    known = {*updates, *base.placeholders, *find_origins(base.graph, "scattered")}
    return any(x not in known and is_wide(x) for node in updates for x in node.all_input_nodes)
