"""Passes: run steps with a pass and without, on virtual ranks, and say which law the pass breaks."""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fzero.base import tree
from fzero.base.bits import copy_bytes
from fzero.base.errors import FzeroError
from fzero.layout.buffers import FILLS
from fzero.passes import defaults
from fzero.passes.run import Pass, insert, name_of_pass
from fzero.program.program import Program
from fzero.simulation import Simulation, simulate
from fzero.state.unpartition import unpartition
from fzero.testing.cases import list_corners, list_smaller
from fzero.testing.script import write_script
from fzero.testing.steps import LOOPS, TrainStep
from fzero.values.sharded import Sharded

Reference = Callable[[TrainStep], Callable[..., Any]]
Formula = Callable[[Program], Mapping[str, int]]
DTYPES = ("float32", "bfloat16", "float64")
CALLS = 2
"""Calls of a step, each with the state of the one before: what a pass keeps counts in the second."""
SHRINKING = 20.0
"""Seconds after which no smaller case is looked for."""


def check_pass(
    pass_: Pass,
    *,
    exact: bool = True,
    reference: Reference | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    bytes: Formula | None = None,
    peak: Callable[[Program], int] | None = None,
    before: str = "prefetch",
    dtypes: Sequence[str] = DTYPES,
    loops: Sequence[str] = LOOPS,
    cases: Sequence[TrainStep] | None = None,
    examples: int = 10,
) -> int:
    """Run train steps with a pass and without, on virtual ranks, and refuse a pass that breaks a law.

    Returns:
        The number of steps that the pass was tried on, without those that it refused.

    The steps have one to four ranks on one axis or two, stages 1 to 3, leaves of each of `dtypes`, microbatches, state
    that is donated or not, and those of `loops`: none, `fzero.scan`, and both ways of `fzero.accumulate`. First come
    small steps that have one of these each, and then `examples` that hypothesis draws. `cases` are the steps to try
    instead. The pass stands in front of the pass `before`. Each step is called twice. These are the laws:

    * The program is verified, and operations of the pass are held to their records (docs/passes.md).
    * The pass leaves the program that it is given as it was, and changes that of some step.
    * With `exact`, all results equal those without the pass, bit for bit: 0 is not -0. With a `reference`, which takes
      the step and returns a function on full trees, results equal those of that function. Without both, they equal
      those of the step without the pass. The last two hold within `atol + rtol * |expected|`, or by default the step's
      own tolerance. All calls draw the same random numbers.
    * No result depends on padding.
    * `bytes(program)` is what each collective moves in all, such as `{"all_gather": 4096}`, or all of them by axis,
      such as `{"all_gather over local": 4096}`. `peak(program)` is the most bytes that the step may need. Both get the
      program without the pass.

    A step that the pass refuses with an error that begins with "pass 'its name'" is left out.

    Raises:
        FzeroError: with the law that is broken, and the smallest step found that breaks it, as a script to run; where
            the pass refuses every step. Without hypothesis, unless `examples` is 0 or `cases` are given.
    """
    options: dict[str, Any] = {"exact": exact, "reference": reference, "rtol": rtol, "atol": atol, "bytes": bytes}
    options |= {"peak": peak, "before": before}
    trial = _Trial(pass_, **options)
    for step in _draw(dtypes, loops, examples) if cases is None else cases:
        problem = trial.examine(step)
        if problem is not None:
            step, problem = _shrink(trial, step, problem) if cases is None else (step, problem)
            known: dict[str, Any] = check_pass.__kwdefaults__ or {}
            given = {name: value for name, value in options.items() if value != known[name]}
            script = write_script("check_pass", pass_, {**given, "cases": [step]})
            raise FzeroError(f"pass {trial.name!r}", problem, f"this script shows it:\n\n{script}")
    where = f"pass {trial.name!r}"
    if trial.refusal is not None and trial.refused == trial.tried:
        raise FzeroError(
            where, f"refuses all {trial.tried} steps, the last with: {trial.refusal}", "give it other cases"
        )
    if not trial.has_changed:
        raise FzeroError(where, f"changes none of {trial.tried} programs", "see what it looks for, and give before=")
    return trial.tried - trial.refused


class _Trial:
    """A pass, its laws, and how often it was tried and refused a step."""

    def __init__(
        self,
        pass_: Pass,
        *,
        exact: bool,
        reference: Reference | None,
        rtol: float | None,
        atol: float | None,
        bytes: Formula | None,
        peak: Callable[[Program], int] | None,
        before: str,
    ) -> None:
        self.name, self._pass, self._before = name_of_pass(pass_), pass_, before
        self._exact, self._reference = exact and reference is None, reference
        self._tolerances, self._bytes, self._peak = (rtol, atol), bytes, peak
        self.tried, self.refused, self.has_changed = 0, 0, False
        self.refusal: FzeroError | None = None
        self._impure = ""

    def examine(self, step: TrainStep) -> str | None:
        """The law that the pass breaks on a step, in words; None where it breaks none, or refuses the step."""
        self.tried += 1
        refusal, self._impure = self.refusal, ""
        try:
            with _silence():
                return self._find_problem(step)
        except FzeroError as error:
            if self.refusal is not refusal:
                self.refused += 1
                return None
            return str(error).removeprefix(f"pass {self.name!r}: ")
        except Exception as error:
            return f"makes a step raise {type(error).__name__}: {error}"

    def _find_problem(self, step: TrainStep) -> str | None:
        own = defaults(stage=step.stage, in_place=step.donate)
        plain = simulate(step, step.mesh, passes=own)
        mine = simulate(step, step.mesh, passes=insert(own, self._watch(), before=self._before))
        problem = None
        if self._bytes or self._peak or not self.has_changed:  # a trace takes longer than a call
            given = (*step.partition(), *step.batch())
            without, program = plain.trace(*given), mine.trace(*given)
            self.has_changed = self.has_changed or without.lines() != program.lines()
            problem = self._impure or self._find_cost(without, program)
        return problem or self._find_difference(step, plain, mine) or self._impure or None

    def _watch(self) -> Pass:
        """The pass, which notes when it refuses a program itself, and when it changes what it is given."""

        def rewrite(program: Program) -> Program:
            before = str(program.graph)
            try:
                result = self._pass(program)
            except FzeroError as error:
                if error.where.startswith(f"pass {self.name!r}"):
                    self.refusal = error
                raise
            if str(program.graph) != before:
                self._impure = "changes the program that it is given; begin with program = program.copy()"
            return result

        function = self._pass
        while isinstance(function, functools.partial):
            function = function.func
        rewrite.__name__, rewrite.__module__ = self.name, getattr(function, "__module__", __name__)
        return rewrite

    def _find_cost(self, without: Program, program: Program) -> str | None:
        if self._bytes is not None:
            moved, wanted = Counter[str](), {key: nbytes for key, nbytes in self._bytes(without).items() if nbytes}
            has_axes = any(" over " in key for key in wanted)
            for entry in program.comm():
                moved[f"{entry.op} over {entry.axis}" if has_axes else entry.op] += entry.nbytes
            if dict(moved) != wanted:
                return f"moves {dict(moved)} bytes, and the formula gives {wanted}"
        peak, most = program.memory().peak, None if self._peak is None else self._peak(without)
        return f"needs {peak} B, and may need {most} B" if most is not None and peak > most else None

    def _find_difference(self, step: TrainStep, plain: Simulation, mine: Simulation) -> str | None:
        runs = _run(mine, step)
        if self._reference is None:
            others, against = _run(plain, step), "without the pass"
        else:
            others, against = _run_whole(self._reference(step), step), "by the reference"
        rtol, atol = (step.tolerance if x is None else x for x in self._tolerances)
        found = list[Any]()
        for number, (got, wanted) in enumerate(zip(runs, others), start=1):
            found.append(got)
            problem = _compare(got, wanted, None if self._exact else (rtol, atol))
            if problem is not None:
                return f"{problem} {against}, in call {number}"
        token = FILLS.set(True)
        try:
            for got, wanted in zip(_run(mine, step), found):
                problem = _compare(got, wanted, None)
                if problem is not None:
                    return f"counts padding: {problem} where other numbers lie in the padding"
        finally:
            FILLS.reset(token)
        return None


def _draw(dtypes: Sequence[str], loops: Sequence[str], examples: int) -> Iterator[TrainStep]:
    yield from (step for step in list_corners(dtypes) if step.loop in loops)
    if not examples:
        return
    from fzero.testing import strategies  # which needs hypothesis

    compute = "float64" if set(dtypes) == {"float64"} else "float32"
    drawn = strategies.train_steps(max_world=4, max_ops=3, dtypes=dtypes, loops=loops, compute=compute)
    yield from strategies.sample(drawn, examples)


@contextmanager
def _silence() -> Iterator[None]:
    """Drop warnings of the logger "fzero", which every traced program would repeat."""
    log = logging.getLogger("fzero")

    def drop(entry: logging.LogRecord) -> bool:
        return False

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)


def _shrink(trial: _Trial, step: TrainStep, problem: str) -> tuple[TrainStep, str]:
    """The smallest step found that breaks a law too, and the law in words."""
    end, seen = time.monotonic() + SHRINKING, {repr(step)}
    candidates = list_smaller(step)
    while time.monotonic() < end:
        smaller = next(candidates, None)
        if smaller is None:
            break
        if repr(smaller) in seen:
            continue
        seen.add(repr(smaller))
        found = trial.examine(smaller)
        if found is not None:
            step, problem, candidates = smaller, found, list_smaller(smaller)
    return step, problem


def _run(simulated: Simulation, step: TrainStep) -> Iterator[list[tuple[str, Tensor]]]:
    """The results of each call, each path with its tensor, joined over ranks."""
    state, batch = step.partition(), step.batch()
    kept = simulated.init_pass_state(*state, *batch)
    for number in range(CALLS):
        with _seed(number):
            results = simulated(*state, *batch, pass_state=kept) if kept else simulated(*state, *batch)
        results, kept = results if kept else (results, kept)
        state = results[: len(state)]
        yield _list_results(results)


def _run_whole(reference: Callable[..., Any], step: TrainStep) -> Iterator[list[tuple[str, Tensor]]]:
    state, batch = step.state(), step.batch()
    for number in range(CALLS):
        with _seed(number):
            results = reference(*state, *batch)
        state = results[: len(state)]
        yield _list_results(results)


@contextmanager
def _seed(number: int) -> Iterator[None]:
    """Let a call draw the same random numbers in each run, and leave torch's generator as it was."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(number)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _list_results(results: Any) -> list[tuple[str, Tensor]]:
    leaves, treedef = tree.flatten(results)
    values = (unpartition(x) if isinstance(x, Sharded) else x for x in leaves)
    named = zip(map(tree.dotted, tree.keys(treedef)), values)
    return [(path, value.clone()) for path, value in named if isinstance(value, Tensor)]


def _compare(
    got: Sequence[tuple[str, Tensor]], wanted: Sequence[tuple[str, Tensor]], tolerances: tuple[float, float] | None
) -> str | None:
    """The first result that differs, in words; bit for bit without `tolerances`, the relative and the absolute one."""
    for (path, a), (_, b) in zip(got, wanted, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"gives {a.dtype} {list(a.shape)} for {path}, which is {b.dtype} {list(b.shape)}"
        if tolerances is None or not a.is_floating_point():
            differs = _list_differing(a, b)
        else:
            rtol, atol = tolerances
            differs = ~torch.isclose(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True).reshape(-1)
        if differs.any():
            at = int(differs.nonzero()[0])
            x, y = (value.reshape(-1)[at].item() for value in (a, b))
            return f"gives {x:.9g} for element {at} of {path}, which is {y:.9g}"
    return None


def _list_differing(a: Tensor, b: Tensor) -> Tensor:
    """Which elements of two flattened tensors differ in some bit."""
    return (copy_bytes(a) != copy_bytes(b)).view(a.numel(), a.element_size()).any(1)
