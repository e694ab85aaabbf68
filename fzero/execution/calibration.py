"""Calibration: how fast ranks compute and communicate, from one step that is run and timed node by node."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base.randomness import step_seed
from fzero.execution.runtime import Runtime
from fzero.layout import buffers
from fzero.layout.layout import wire
from fzero.program import ops
from fzero.program.costs import collectives, last_uses
from fzero.program.ops import Node, is_call
from fzero.program.program import Program
from fzero.program.rates import Rates, bus_bytes
from fzero.program.work import work
from fzero.ranks.agreement import agree
from fzero.ranks.live import Live

SMALL = 1 << 16
"""An operation that touches fewer bytes is all launch."""

Seconds = Mapping[Node, float]


def calibrated(on: Live, program: Program, tensors: Sequence[Tensor]) -> Rates:
    """The rates of the ranks of a mesh, which call this together: the mean over them, the same on all.

    Runs the program twice, on a copy of the arguments that are donated. Collective.
    """
    runtime, align = Runtime(on, program.layouts), partial(agree, on.members, 0, [])
    for _ in range(2):  # the first time memory is new, and connections are
        seconds = timed(program, runtime, _copied(program, tensors), align)
    return agreed(fitted(program, seconds), on.all_reduce, program.mesh.names, on.device)


def _copied(program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with copies of those that are donated; what shares memory does so in the copy."""
    donated = [i for i, argument in enumerate(program.arguments) if argument.donated]
    copies = dict(zip(donated, copy.deepcopy([tensors[i].detach() for i in donated])))
    return [copies.get(i, tensor) for i, tensor in enumerate(tensors)]


@torch.no_grad()
def timed(program: Program, runtime: Any, tensors: Sequence[Tensor], align: Callable[[], object]) -> dict[Node, float]:
    """Run a program one node after the other: the seconds of each. Writes to the arguments that are donated.

    A collective is waited for at once, and its wait takes none. `align` is called before each, for ranks to start it
    together. torch's default CPU generator stays as it was.
    """
    values: dict[Node, Any] = dict(zip(program.placeholders, tensors, strict=True))
    dying, clock = last_uses(program.graph), _Clock(tensors)
    spans: dict[Node, tuple[Any, Any]] = {}
    state = torch.get_rng_state()
    with step_seed() as seed:
        for node in program.graph.nodes:
            if node.op == "output" or ops.overwritten(node):
                runtime.settle()
            if node.op == "get_attr":
                values[node] = program.constants[node.target]
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                call = _call(node, program, runtime, seed)
                if any(True for _ in collectives(node, program.layouts, program.mesh)):
                    clock.finish()
                    align()
                begin = clock.mark()
                values[node] = call(*args, **kwargs)
                spans[node] = begin, clock.mark()
            for dead in dying.get(node, ()):
                del values[dead]
    torch.set_rng_state(state)
    clock.finish()
    return {node: clock.between(*span) for node, span in spans.items()}


def _call(node: Node, program: Program, runtime: Any, seed: int) -> Callable[..., Any]:
    """What a node calls."""
    if node.target not in ops.FAKES:
        return node.target
    if is_call(node, ops.wait):
        return lambda done: done
    if is_call(node, ops.part):  # a view that a linked program takes by itself
        along = wire(program.layout_of(node), tuple(node.args[2]))
        return lambda block, bucket, leaves, position, numel: buffers.slice_of(block, along, runtime.on.rank, position)
    method = getattr(runtime, node.target.__name__.partition(".")[0])
    if is_call(node, ops.all_gather, ops.reduce_scatter):
        return lambda *args, **how: runtime.wait(method(*args, **how))
    return (lambda *args, **kwargs: method(seed, *args, **kwargs)) if is_call(node, ops.draw) else method


class _Clock:
    """Marks in the order of what the device does: times of this process, or events on a GPU's stream."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.is_cuda = any(tensor.is_cuda for tensor in tensors)

    def mark(self) -> Any:
        """This moment."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        """Return when everything is done."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def between(self, begin: Any, end: Any) -> float:
        """Seconds."""
        return begin.elapsed_time(end) / 1000 if self.is_cuda else end - begin


def fitted(program: Program, seconds: Seconds) -> Rates:
    """The rates by which a program's nodes take as long in all as they did; `program.rates` where it does too little.

    An operation takes as long to launch as the median of small ones. A collective's latency is what the shortest took.
    """
    guess, sent = program.rates, {node: _sent(program, node) for node in seconds}
    works = {
        node: work(node) for node in seconds if not sent[node]
    }  # what is cast or packed to be sent is not timed apart
    small = [seconds[node] for node, done in works.items() if any(done) and not done.flops and done.nbytes < SMALL]
    launch = median(small) if small else guess.launch
    products = {node: done.flops for node, done in works.items() if done.flops}
    moves = {node: done.nbytes for node, done in works.items() if not done.flops and done.nbytes >= SMALL}
    sent = {node: nbytes for node, nbytes in sent.items() if nbytes}
    latency = min((seconds[node] for node in sent), default=guess.latency)
    return Rates(
        flops=_rate(products, seconds, launch) or guess.flops,
        memory=_rate(moves, seconds, launch) or guess.memory,
        wire=_rate(sent, seconds, latency) or guess.wire,
        launch=launch,
        latency=latency,
    )


def _sent(program: Program, node: Node) -> float:
    """Bytes that each rank sends in the collectives that a node starts."""
    entries = [entry for entry in collectives(node, program.layouts, program.mesh) if program.mesh.size(entry.axis) > 1]
    return sum(bus_bytes(entry, program.mesh) for entry in entries)


def _rate(amounts: Mapping[Node, float], seconds: Seconds, each: float) -> float:
    """How much is done in a second besides the seconds that `each` costs; 0.0 where that cannot be told."""
    spent = sum(max(seconds[node] - each, 0.0) for node in amounts)
    return sum(amounts.values()) / spent if spent else 0.0


def agreed(rates: Rates, all_reduce: Callable[[Tensor, str, str], Tensor], axes: Sequence[str], device: Any) -> Rates:
    """The mean of all ranks' rates, the same on all of them to the last bit."""
    values = torch.tensor(rates, dtype=torch.float64, device=device)
    for op in ("avg", "max"):  # ranks may round a mean differently
        for axis in axes:
            values = all_reduce(values, op, axis)
    return Rates(*values.tolist())
