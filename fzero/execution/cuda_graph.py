"""Capture: a step as one CUDA graph, which the host launches whole."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from fzero.base.errors import FzeroError
from fzero.execution.codegen import Runner
from fzero.program.operation import Node
from fzero.program.program import Program
from fzero.program.records import name_of, record
from fzero.program.refusals import line_of
from fzero.ranks.live import Live
from fzero.ranks.transports import Alone, Native

Run = Callable[[], Sequence[Tensor]]
Recorder = Callable[[Run], tuple[Callable[[], None], Sequence[Tensor]]]
"""Given a run, what does it again, and its results, which are overwritten each time. Nothing is done yet."""

WAY_OUT = "give compile=True"
_log = logging.getLogger("fzero")


def cuda_graph(run: Run) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """The `Recorder` of CUDA. Other threads, such as that in which NCCL's watchdog lives, may call CUDA meanwhile."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run()
    finally:
        torch.cuda.set_stream(stream)  # which a failed capture leaves behind
    return graph.replay, results


class Captured:
    """A linked program as one graph: a `Runner` like the one that it is made of, called behind `prepare`.

    A graph reads and writes fixed memory. State has its own, where steps update it in place; the batch is copied into
    the graph's and results that are not state out of it. The first call with state at other addresses than before runs
    the program as it is, which also warms up what must be there before a capture; the next one captures it. NCCL waits
    for the end of graphs before it ends: one ends with its `Captured`, or with Python.
    """

    def __init__(self, program: Program, run: Runner, record: Recorder = cuda_graph) -> None:
        self.name, self._run, self._record = program.name, run, record
        self._state = [i for i, argument in enumerate(program.arguments) if argument.bucket is not None]
        self._batch = [i for i, argument in enumerate(program.arguments) if argument.bucket is None]
        number = {node: i for i, node in enumerate(program.placeholders)}
        self._given = [number.get(node) for node in program.output.args[0]]  # results that are arguments
        self._places: list[int] | None = None  # where state lay at the last call
        self._replay: Any = None
        self._inputs: list[Tensor] = []
        self._results: Sequence[Tensor] = ()
        _alive.add(self)

    def is_elsewhere(self, tensors: Sequence[Tensor]) -> bool:
        """Whether state lies where it did not at the last call."""
        return self._places_of(tensors) != self._places

    def prepare(self, tensors: Sequence[Tensor], as_it_is: bool) -> None:
        """Get ready for a call with these tensors, `as_it_is` where some rank's state lies elsewhere: all ranks capture
        at the same call. Nothing is computed yet.

        Raises:
            FzeroError: where CUDA cannot capture the program.
        """
        if as_it_is:
            if self._places is not None:
                _log.warning("%s: state lies elsewhere than at the last call: this one is no CUDA graph", self.name)
            self.forget()
            self._places = self._places_of(tensors)
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
        """Let go of the graph and its memory."""
        self._replay, self._inputs, self._results = None, [], ()

    def _places_of(self, tensors: Sequence[Tensor]) -> list[int]:
        return [tensors[i].data_ptr() for i in self._state]

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
    """What came before an error: to end a capture fails too where what was captured did."""
    return _find_first_cause(error.__context__) if error.__context__ is not None else error


_alive: WeakSet[Captured] = WeakSet()


@atexit.register
def _forget_all() -> None:
    """Before process groups end, which would wait for graphs for ever."""
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
    """Refuse a program that a graph would not repeat: one that draws, or is not all on one device. One that waits for
    values there is not, as it cannot be traced.

    Raises:
        FzeroError: with the reason and, where it has one, the user's line.
    """
    paths = {node: argument.path for node, argument in zip(program.placeholders, program.arguments)}
    for node in program.graph.nodes:
        reason = _obstacle(node, device_type)
        if reason:
            what = paths.get(node) or name_of(node)
            raise FzeroError("compile", f"is 'graph', and {what} {reason}{line_of(node)}", WAY_OUT)


def _obstacle(node: Node, device_type: str) -> str:
    """Why a node cannot be in a graph, "" where it can."""
    if node.op == "call_function" and record(node).draws:
        return "draws random numbers: a graph would draw the same in each step"
    value = node.meta.get("val")
    values = [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor)]
    if node.op == "get_attr" and values[0].ndim == 0:
        return ""  # a number that the step captured
    others = [x.device for x in values if x.device.type != device_type]
    return f"is on {others[0]}, not on {device_type}" if others else ""
