"""Meter: what a run does, in numbers that are the same on all ranks, every so many steps."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError
from fzero.base.mesh import find_model_axes
from fzero.metrics.sinks import Sink, Write
from fzero.metrics.values import Measured, StepCosts, find_memory, join_ranks, measure_program
from fzero.program.hardware import find_hardware
from fzero.program.program import Program
from fzero.ranks.live import find_ranks
from fzero.ranks.together import do_together, gather_words, tell_others

T = TypeVar("T")
MAX_PROGRAMS = 32
"""How many programs a meter remembers the costs of."""
_OWN = ("step", "grad_norm")
"""Names that `extra` may not give, beside those of the values that a meter finds."""


class Meter:
    """Metrics of a run by torchtitan's names, which the first rank of the mesh writes to `sinks`. docs/metrics.md says
    what each name means.

        program = None
        with fzero.metrics.Meter(mesh, fzero.metrics.jsonl("run.jsonl"), every=10) as meter:
            for _ in range(1000):
                with meter.loading():
                    batch = next(batches)
                if program is None:  # where batches change in length: at each step
                    program = step.program(params, opt_state, batch)
                params, opt_state, loss = step(params, opt_state, batch)
                meter.record(loss, tokens=batch.numel(), program=program)

    * `every`: step 1 and each multiple of `every` are logged, as in torchtitan. Other steps cost no communication, and
      do not wait for the device.
    * `step`: how many steps the run has done before. A run that goes on counts on.
    * `data`: the axes along which ranks take different examples, as in `fzero.shard`.
    * `peak_flops`: what a device could do in a second, for `mfu(%)`. By default the dense bfloat16 flops of its data
      sheet (`fzero/program/hardware.py`). A device that is not in the table, such as a CPU, has no `mfu(%)` then.

    All ranks make a meter, call `record` after each step, and `close` the meter together.

    Raises:
        FzeroError: on all ranks, for a sink whose package is missing on one of them, or that cannot be opened.
    """

    @check_arguments
    def __init__(
        self,
        mesh: Any,
        *sinks: Any,
        every: int = 10,
        step: int = 0,
        data: tuple[str, ...] | None = None,
        peak_flops: float | None = None,
    ) -> None:
        for name, value, least in (("every", every, 1), ("step", step, 0)):
            if value < least:
                raise FzeroError(f"metrics: {name}", f"is {value}", f"give a whole number from {least} on")
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise FzeroError("metrics: peak_flops", f"is {peak_flops}", "give flops a second, above 0")
        for each in sinks:
            if not isinstance(each, Sink):
                raise FzeroError(
                    "metrics: a sink", f"is {each!r:.80}", "give fzero.metrics.jsonl(path) or another sink"
                )
        self._on, self._every, self.step = find_ranks(mesh), every, operator.index(step)
        model_axes = find_model_axes(self._on.mesh, data)
        is_shared = model_axes and not self._on.members.is_alone  # virtual ranks give the tokens of all at once
        self._sharers = self._on.mesh.size(self._on.mesh.join(model_axes)) if is_shared else 1
        self._device = self._on.choose_device()
        self._peak_flops = _find_peak_flops(self._device) if peak_flops is None else float(peak_flops)
        self._known: dict[int, StepCosts] = {}  # by the id of the program, which the costs keep alive
        self._open: list[Write] = []
        self._is_closed = False
        self._do("opening the sinks", lambda: self._open_sinks(sinks))
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # other ranks may have no error
            self._close_sinks()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count the time of this context as time in which the run waits for data."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._loading += time.perf_counter() - start

    @check_arguments
    def record(
        self,
        loss: Any,
        *,
        tokens: int | None = None,
        program: Program | None = None,
        grad_norm: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, float] | None:
        """Count one step. A step that is logged returns its values, the same on all ranks. Any other returns None.

        `loss` is what the step returned on this rank. `tokens` are those that this process gave the step. `program` is
        what `step.program` returns for its arguments. `grad_norm` and the values of `extra`, such as `{"lr": 1e-3}`,
        are numbers or tensors of one element, and are logged as means over ranks.

        Raises:
            FzeroError: on all ranks, where these are at different steps or give different names, where a value is no
                number, where a name is one of the meter's own, where a sink cannot be written to, or where the meter is
                closed.
        """
        with tell_others(self._on.members, "fzero.metrics"):
            if self._is_closed:
                raise FzeroError("metrics: the meter", "is closed", "record before close(), or make another meter")
            tokens = None if tokens is None else operator.index(tokens)  # of a tensor too
            if tokens is not None and tokens < 0:
                raise FzeroError("metrics: tokens", f"is {tokens}", "give a whole number from 0 on")
            costs = None if program is None else self._find_costs(program)
        self.step += 1
        self._steps += 1
        self._tokens += [tokens]
        self._flops += [costs and (costs.flops * len(self._on.numbers), costs.again * len(self._on.numbers))]
        if self.step != 1 and self.step % self._every:
            return None
        call = f"logging metrics of step {self.step}"
        everyone = self._do(call, lambda: self._measure(loss, _join_means(grad_norm, extra or {}), costs))
        values = join_ranks(everyone, self._sharers, call)
        self._do(f"writing metrics of step {self.step}", lambda: self._write(values))
        self._begin()
        return values

    def close(self) -> None:
        """Close the sinks. All ranks call it."""
        self._do("closing the sinks", self._close_sinks)

    def _do(self, what: str, do: Callable[[], T]) -> list[T]:
        """The results of `do()` of each process. All of them are at the same `what`, or it is an error on all."""
        gather = gather_words(self._on.members, f"fzero.metrics, {what}")
        return do_together(gather, do, f"metrics, {what}", "do it", "see to that rank; this one is fine")

    # this process

    def _begin(self) -> None:
        """Begin to count anew."""
        self._steps, self._loading = 0, 0.0
        self._tokens: list[int | None] = []
        self._flops: list[tuple[int, int] | None] = []
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._start = time.perf_counter()

    def _find_costs(self, program: Program) -> StepCosts:
        """The costs of a program, which is counted once."""
        if not isinstance(program, Program):
            raise FzeroError("metrics: program", f"is {program!r:.80}", "give what step.program(*args) returns")
        found = self._known.get(id(program))
        if found is None:
            if len(self._known) >= MAX_PROGRAMS:
                self._known.pop(next(iter(self._known)))
            found = self._known[id(program)] = measure_program(program)
        return found

    def _measure(self, loss: Any, given: Mapping[str, Any], costs: StepCosts | None) -> Measured:
        """What this process measured since it last logged."""
        number, means = _read("loss", loss), {name: _read(name, value) for name, value in given.items()}
        seconds = time.perf_counter() - self._start  # behind the values, for which this thread waits
        tokens, flops = self._tokens, [each for each in self._flops if each is not None]
        is_counted = len(flops) == self._steps
        return Measured(
            loss=number,
            means=means,
            largest=find_memory(self._device) | (costs.predicted() if costs else {}),
            steps=self._steps,
            seconds=seconds,
            loading=self._loading,
            tokens=None if None in tokens else sum(filter(None, tokens)),
            flops=sum(count for count, _ in flops) if is_counted else None,
            again=sum(count for _, count in flops) if is_counted else None,
            peak_flops=self._peak_flops,
        )

    def _open_sinks(self, sinks: tuple[Sink, ...]) -> None:
        for sink in sinks:
            sink.check()
        if self._on.number == 0:
            for sink in sinks:
                self._open.append(sink.open())

    def _write(self, values: Mapping[str, float]) -> None:
        for each in self._open:
            each.write(self.step, values)

    def _close_sinks(self) -> None:
        opened, self._open, self._is_closed = self._open, [], True
        for each in opened:
            each.close()


def _find_peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    found = find_hardware(torch.cuda.get_device_name(device))
    return None if found is None else found.flops


def _join_means(grad_norm: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value, of what is logged as a mean over ranks."""
    for name in extra:
        if not isinstance(name, str):
            raise FzeroError("metrics: extra", f"has the name {name!r:.80}", "give each value a text as its name")
        if name in _OWN:
            raise FzeroError("metrics: extra", f"has {name!r}, a name of the meter's own", "give another name")
    return {**({} if grad_norm is None else {"grad_norm": grad_norm}), **extra}


def _read(name: str, value: Any) -> float:
    """A number, or the one element of a tensor."""
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError(f"{value!r:.80}")  # float reads texts
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        problem = f"is {type(value).__name__}, and no number: {error}"
        raise FzeroError(f"metrics: {name}", problem, "give a number or a tensor of one element") from error
