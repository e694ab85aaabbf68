"""Calibration: measure how fast ranks compute and communicate, by running one step node by node."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

from fzero.base.ambient import disable_autocast
from fzero.base.errors import FzeroError
from fzero.base.placement import Disk
from fzero.base.randomness import step_seed
from fzero.execution.bind import bind
from fzero.execution.loops import Rows, operands, run_turns
from fzero.files import OnDisk, duplicate, read, write
from fzero.files.store import FileStore
from fzero.optim.fused import make_update
from fzero.program.memory import find_last_uses
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.rates import Rates, bus_bytes
from fzero.program.records import body_of, comm_of, find_writes, record
from fzero.program.timeline import COMPUTE
from fzero.program.work import work
from fzero.ranks.agreement import agree
from fzero.ranks.link import Link
from fzero.ranks.live import Live
from fzero.values.moves import reduce

SMALL = 1 << 16
"""Bytes below which the time of an operation is all launch."""
MOVED = 1 << 25
"""Bytes of the copies that measure the link, of the file that measures a disk, and of the parameters whose updates
measure the host."""

Seconds = Mapping[Node, float]


def calibrate(on: Live, program: Program, tensors: Sequence[Tensor], disk: Disk | None = None) -> Rates:
    """The mean of the rates of all ranks of a mesh, the same on every rank. Collective: all ranks call it together.

    Runs the program twice, on copies of the donated arguments. Then copies `MOVED` bytes between the device and the
    host, and updates as many on the host, whether the program does so or not: a budget asks what that would take.
    Writes and reads a file of as many bytes on `disk`, and on each disk that arguments lie on. All ranks do so at once,
    because steps do.

    Raises:
        FzeroError: on all ranks, where a disk of some rank fails.
    """
    align = partial(agree, on.members, 0, list)
    for _ in range(2):  # the first run allocates memory and opens connections, so its seconds are dropped
        seconds = time_nodes(program, on, _copy_arguments(program, tensors), align)
    align()  # ranks of one machine share its memory
    rates = fit_rates(program, seconds)._replace(link=measure_link(on.link, on.device), host=measure_host())
    disks, found, failed = {disk, *(x.place for x in program.arguments)}, [rates.disk], None
    try:
        found = [measure_disk(place) for place in disks if isinstance(place, Disk)] or found
    except FzeroError as error:
        failed = error
    align(failed)
    rates = rates._replace(disk=min(found))
    return average_rates(rates, lambda x, op: reduce(x, on, op, on.mesh.join(on.mesh.names)), on.device)


def _copy_arguments(program: Program, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, with copies in the place of those that are donated. Tensors that share memory share it as copies
    too."""
    donated = [i for i, argument in enumerate(program.arguments) if argument.donated]
    in_files = {i: duplicate(tensors[i]) for i in donated if isinstance(tensors[i], OnDisk)}
    others = [i for i in donated if i not in in_files]
    copies = in_files | dict(zip(others, copy.deepcopy([tensors[i].detach() for i in others])))
    return [copies.get(i, tensor) for i, tensor in enumerate(tensors)]


@torch.no_grad()
def time_nodes(program: Program, on: Live, tensors: Sequence[Tensor], align: Callable[[], object]) -> dict[Node, float]:
    """The seconds of each node, one node running after the other. Writes to the donated arguments.

    A collective takes its time where it starts, and its wait takes none. `align` is called before each collective, to
    let all ranks start it together. torch's default CPU generator stays as it was.
    """
    clock, state = _Clock(tensors), torch.get_rng_state()
    spans: dict[Node, tuple[Any, Any]] = {}
    with disable_autocast(), step_seed([tensors[i] for i in program.seeds]) as seed:
        _run(program, on, tensors, align, seed, clock, spans)
    torch.set_rng_state(state)
    clock.finish()
    return {node: clock.between(*span) for node, span in spans.items()}


def _run(
    program: Program,
    on: Live,
    tensors: Sequence[Tensor],
    align: Callable[[], object],
    seed: int | None,
    clock: _Clock,
    spans: dict[Node, tuple[Any, Any]],
) -> list[Tensor]:
    """The results of a program. Writes the time of each node into `spans`, of the nodes of a loop that of the last
    turn."""
    values: dict[Node, Any] = dict(zip(program.placeholders, tensors, strict=True))
    dying = find_last_uses(program.graph)
    for node in program.graph.nodes:
        if node.op == "output" or find_writes(node):
            on.settle()
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        body = body_of(node)
        if node.op == "get_attr":
            values[node] = program.constants[node.target]
        elif body is not None:

            def turn(seed: int | None, ranks: Rows, body: Program = body) -> Rows:
                return [_run(body, on, ranks[0], align, seed, clock, spans)]

            (values[node],) = run_turns(node, turn, seed, [operands(args)])
        elif node.op == "call_function":
            call = _bind_at_once(node, program, on, seed)
            if record(node).moves is not None:
                clock.finish()
                align()
            begin = clock.mark()
            values[node] = call(*args, **kwargs)
            spans[node] = begin, clock.mark()
        for dead in dying.get(node, ()):
            del values[dead]
    return [values[node] for node in program.returned]


def _bind_at_once(node: Node, program: Program, on: Live, seed: int | None) -> Callable[..., Any]:
    """The function that a node calls, with collectives that are waited for where they start."""
    operation = record(node)
    if operation.perform is None:
        return node.target
    if operation.waits:
        return node.target
    run = bind(program, node, on).run
    if operation.starts:
        return lambda *args, **how: run(*args, **how).wait()
    return partial(run, seed=seed) if operation.draws else run


class _Clock:
    """Points in time: of this process, or for CUDA tensors of the current stream."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.is_cuda = any(tensor.is_cuda for tensor in tensors)

    def mark(self) -> Any:
        """A point in time: now, or when the stream gets there."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def between(self, begin: Any, end: Any) -> float:
        """The seconds between two points in time."""
        return begin.elapsed_time(end) / 1000 if self.is_cuda else end - begin


def fit_rates(program: Program, seconds: Seconds) -> Rates:
    """The rates with which a program's nodes take as long, all together, as they did. A rate for which the program does
    too little is that of `program.rates`. So are those of the link, of the host and of the disk, which
    `calibrate` measures.

    The launch of an operation is the median of small operations. The latency is the seconds of the shortest collective.
    """
    guess, sent = program.rates, {node: _count_bus_bytes(program, node) for node in seconds}
    # The seconds of a collective include casting and packing what it sends, so its work is left out.
    costs = program.costs()
    works = {node: work(node) for node in seconds if not sent[node] and costs[node].lane == COMPUTE}
    small = [seconds[node] for node, done in works.items() if any(done) and not done.flops and done.nbytes < SMALL]
    launch = median(small) if small else guess.launch
    products = {node: done.flops for node, done in works.items() if done.flops and not done.attention}
    attention = {node: done.attention for node, done in works.items() if done.attention}
    moves = {node: done.nbytes for node, done in works.items() if not done.flops and done.nbytes >= SMALL}
    sent = {node: nbytes for node, nbytes in sent.items() if nbytes}
    latency = min((seconds[node] for node in sent), default=guess.latency)
    wire = _fit_rate(sent, seconds, latency) or guess.wire
    axes = _fit_axes(program, {node: seconds[node] for node in sent}, latency, wire)
    flops = _fit_rate(products, seconds, launch) or guess.flops
    return Rates(
        flops=flops,
        memory=_fit_rate(moves, seconds, launch) or guess.memory,
        wire=wire,
        launch=launch,
        latency=latency,
        link=guess.link,
        host=guess.host,
        disk=guess.disk,
        attention=_fit_rate(attention, seconds, launch) or flops if attention else guess.attention,
        axes=tuple(axes.items()) if len(axes) > 1 else (),
    )


def _fit_axes(program: Program, seconds: Seconds, latency: float, wire: float) -> dict[str, float]:
    """Axis -> its wire. Where a node communicates over two axes, the second has what time the first leaves. What goes
    over several axes together tells of none."""
    parts: dict[Node, dict[str, float]] = {}
    left = dict(seconds)
    for node in seconds:
        entries = [each for each in comm_of(program, node) if program.mesh.size(each.axis) > 1]
        if all(each.axis in program.mesh.sizes for each in entries):
            parts[node] = {each.axis: 0.0 for each in entries}
        for each in entries if node in parts else ():
            parts[node][each.axis] += bus_bytes(each, program.mesh)
            left[node] -= latency
    found: dict[str, float] = {}

    def list_unknown() -> dict[Node, list[str]]:
        return {node: [axis for axis in part if axis not in found] for node, part in parts.items()}

    while axis := next((axes[0] for axes in list_unknown().values() if len(axes) == 1), None):
        own = {node: parts[node][axis] for node, axes in list_unknown().items() if axes == [axis]}
        spent = {node: left[node] - sum(x / found[y] for y, x in parts[node].items() if y in found) for node in own}
        found[axis] = _fit_rate(own, spent, 0.0) or wire
    return found


def _count_bus_bytes(program: Program, node: Node) -> float:
    """The bytes that each rank sends in the collectives of a node."""
    entries = [entry for entry in comm_of(program, node) if program.mesh.size(entry.axis) > 1]
    return sum(bus_bytes(entry, program.mesh) for entry in entries)


def _fit_rate(amounts: Mapping[Node, float], seconds: Seconds, each: float) -> float:
    """The amount done in a second, where each node takes `each` seconds besides. 0.0 where no time is left to tell."""
    spent = sum(max(seconds[node] - each, 0.0) for node in amounts)
    return sum(amounts.values()) / spent if spent else 0.0


def measure_link(link: Link, device: torch.device) -> float:
    """Bytes a second of copies between the device and the host, in the slower direction. Where there is an accelerator
    the memory of the host is pinned."""
    there = torch.zeros(MOVED, dtype=torch.uint8, device=device)
    clock, (here,) = _Clock([there]), link.arrive(link.to_host([there]))
    out = _clock_runs(lambda: link.arrive(link.to_host([there])), clock)
    back = _clock_runs(lambda: link.arrive(link.to_device([here])), clock)
    return MOVED / max(out, back)


def measure_disk(place: Disk) -> float:
    """Bytes a second of a file on a disk, written or read, whichever takes longer. The file is gone afterwards.

    Raises:
        FzeroError: for a disk without room, or that fails.
    """
    store = FileStore(place.path)
    extent = store.allocate(MOVED, store.open_file(None, "calibration"), "")
    memory = torch.zeros(MOVED, dtype=torch.uint8, device="cpu")
    there = OnDisk(extent, 0, MOVED, memory.dtype)
    out = _clock_runs(lambda: write([memory], [there]).wait(), _Clock([]))
    back = _clock_runs(lambda: read([there], [memory]).wait(), _Clock([]))
    return MOVED / max(out, back)


def measure_host() -> float:
    """Bytes that the host reads and writes in a second of AdamW's update with torch's fused kernel."""
    update, nbytes = make_update(MOVED // 4)
    return nbytes / _clock_runs(update, _Clock([]))


def _clock_runs(run: Callable[[], Any], clock: _Clock) -> float:
    """The median of the seconds of three runs, behind one that is not timed."""
    taken = []
    for _ in range(4):
        begin = time.perf_counter()
        run()
        clock.finish()
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def average_rates(rates: Rates, reduce: Callable[[Tensor, str], Tensor], device: Any) -> Rates:
    """The mean of the rates of all ranks, the same on all of them to the last bit: ranks that schedule by other rates
    would make other programs."""
    names = [name for name in Rates._fields if name != "axes" and getattr(rates, name) is not None]
    numbers = [*(getattr(rates, name) for name in names), *(rate for _, rate in rates.axes)]
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    for op in ("avg", "max"):  # backends may round a mean differently on each rank; the maximum of the means is one
        values = reduce(values, op)
    found = values.tolist()
    axes = tuple((axis, rate) for (axis, _), rate in zip(rates.axes, found[len(names) :]))
    return rates._replace(**dict(zip(names, found)), axes=axes)
