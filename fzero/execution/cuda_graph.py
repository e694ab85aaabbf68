"""CUDA graphs: a step as one graph of kernels and collectives, which the host launches in one call."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.base.torch_private import version_of
from fzero.execution.codegen import Runner
from fzero.program import ops
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import find_bodies, is_call, name_of, record
from fzero.program.refusals import line_of
from fzero.ranks.live import Live
from fzero.ranks.transports import Alone, Native

Run = Callable[[], Sequence[Tensor]]
Recorder = Callable[[Run], tuple[Callable[[], None], Sequence[Tensor]]]
"""Records a run without running it. Returns a function that replays the run, and the run's results, which each replay
overwrites."""

WAY_OUT = "give compile=True"
_log = logging.getLogger("fzero")


def cuda_graph(run: Run) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """The `Recorder` of CUDA."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # By default a CUDA call of any thread fails the capture, and the thread of NCCL's watchdog queries events.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run()
    finally:
        torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream current
    return graph.replay, results


class Captured:
    """A linked program as one CUDA graph: a `Runner`. Call `prepare` before each call.

    A graph reads and writes fixed addresses. State stays where it is, because steps update it in place. The batch is
    copied to where the graph reads it, and results that are not state are copied out. The first call with state at new
    addresses runs the program without a graph, which also initializes what a capture may not (libraries, connections);
    the next call captures the graph. `destroy_process_group` waits until graphs that hold NCCL's collectives are gone:
    a graph goes with its `Captured`, or at the exit of Python.
    """

    def __init__(
        self,
        program: Program,
        run: Runner,
        record: Recorder = cuda_graph,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self._run, self._record, self._settle = program.name, run, record, settle
        self._state = [i for i, argument in enumerate(program.arguments) if argument.bucket is not None]
        self._batch = [i for i, argument in enumerate(program.arguments) if argument.bucket is None]
        number = {node: i for i, node in enumerate(program.placeholders)}
        self._given = [number.get(node) for node in program.returned]  # results that are arguments
        self._host = [x for x in program.constants.values() if x.device.type == "cpu"]  # kernels got them as numbers
        self._addresses: list[int] | None = None  # of state at the last call, and versions of `_host`
        self._replay: Any = None
        self._inputs: list[Tensor] = []
        self._results: Sequence[Tensor] = ()
        _alive.add(self)

    def is_elsewhere(self, tensors: Sequence[Tensor]) -> bool:
        """Whether state lies at other addresses than at the last call."""
        return self._find_addresses(tensors) != self._addresses

    def prepare(self, tensors: Sequence[Tensor], as_it_is: bool) -> None:
        """Prepare a call with these tensors: capture the graph, or with `as_it_is` drop it and run without one.

        `as_it_is` is the same on all ranks, and true where the state of some rank lies elsewhere, so that all ranks
        capture at the same call. Computes nothing. Calls `settle`: a graph holds no wait for what reads state this
        time only, such as a save.

        Raises:
            FzeroError: where CUDA cannot capture the program.
        """
        self._settle()
        if as_it_is:
            if self._addresses is not None:
                _log.warning("%s: state lies elsewhere than at the last call: this one is no CUDA graph", self.name)
            self.forget()
            self._addresses = self._find_addresses(tensors)
        elif self._replay is None:
            self._capture(tensors)

    @torch.no_grad()
    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._replay is None:
            return self._run(tensors)
        for mine, i in zip(self._inputs, self._batch):
            mine.copy_(tensors[i])
        self._replay()
        return [x.clone() if i is None else tensors[i] for i, x in zip(self._given, self._results)]

    def forget(self) -> None:
        """Free the graph and its memory."""
        self._replay, self._inputs, self._results = None, [], ()

    def _find_addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        return [tensors[i].data_ptr() for i in self._state] + [version_of(x) for x in self._host]

    @torch.no_grad()
    def _capture(self, tensors: Sequence[Tensor]) -> None:
        self._inputs = [tensors[i].clone() for i in self._batch]
        given = list(tensors)
        for mine, i in zip(self._inputs, self._batch):
            given[i] = mine
        try:
            self._replay, self._results = self._record(lambda: self._run(given))
        except RuntimeError as error:
            reason = str(_find_first_cause(error)).strip().partition("\n")[0]
            raise FzeroError("compile", f"CUDA cannot capture this step: {reason}", WAY_OUT) from error


def _find_first_cause(error: BaseException) -> BaseException:
    """The error that came first. Where an operation fails in a capture, ending the capture fails as well, and hides
    it."""
    return _find_first_cause(error.__context__) if error.__context__ is not None else error


_alive: WeakSet[Captured] = WeakSet()


@atexit.register
def _forget_all() -> None:
    """Free all graphs at exit: process groups, which end later, would wait for the graphs for ever."""
    for each in list(_alive):
        each.forget()


def check_mesh(on: Live) -> None:
    """Refuse a mesh whose collectives a CUDA graph cannot hold.

    Raises:
        FzeroError: with the reason.
    """
    if on.device.type != "cuda":
        raise FzeroError("compile", f"is 'graph', and the mesh is on {on.device.type}: graphs are CUDA's", WAY_OUT)
    for axis, each in on.transports.items():
        if not isinstance(each, (Alone, Native)):
            raise FzeroError(
                "compile", f"is 'graph', and ranks along {axis} talk on the host", f"use NCCL, or {WAY_OUT}"
            )


def check_program(program: Program, device_type: str) -> None:
    """Refuse a program that a graph would not repeat: one that draws random numbers, has state on the host, or has
    tensors on several devices.

    A program that waits for values of the device (`x.item()`) does not come here: tracing refuses it.

    Raises:
        FzeroError: with the reason and, where it has one, the user's line.
    """
    for body in find_bodies(program.graph):
        check_program(body, device_type)
    paths = {node: argument.path for node, argument in zip(program.placeholders, program.arguments)}
    for node in program.graph.nodes:
        reason = _find_obstacle(node, device_type)
        if reason:
            what = paths.get(node) or name_of(node)
            raise FzeroError("compile", f"is 'graph', and {what} {reason}{line_of(node)}", WAY_OUT)


def _find_obstacle(node: Node, device_type: str) -> str:
    """The reason why a node cannot be part of a graph, "" where it can."""
    if node.op == "call_function" and record(node).draws:
        return "draws random numbers: a graph would draw the same in each step"
    if node.op == "call_function" and record(node).to is not None:
        return "copies between the device and the host, where state lies: the host computes outside of a graph"
    if is_call(node, ops.ragged_rows):
        return "reads on the host how many rows to send"
    value = node.meta.get("val")
    values = [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor)]
    if node.op == "get_attr" and values[0].ndim == 0:
        return ""  # a 0-d tensor that the step captured: CUDA kernels take it as a number
    others = [x.device for x in values if x.device.type != device_type]
    return f"is on {others[0]}, not on {device_type}" if others else ""
