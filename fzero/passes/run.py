"""Run passes one after the other, and name the pass where one from outside of fzero makes a mistake."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from fzero.base.errors import FzeroError
from fzero.passes.verify import verify
from fzero.program.listing import format_size
from fzero.program.operation import nbytes
from fzero.program.program import Program

Pass = Callable[[Program], Program]
_log = logging.getLogger("fzero")


def run_passes(program: Program, passes: Sequence[Pass]) -> Program:
    """`program`, rewritten by each pass in turn.

    The result of a pass from outside of fzero is verified at once. The logger "fzero" warns where such passes raise the
    peak above the peak of fzero's passes alone; the state that they add does not count.

    Raises:
        FzeroError: naming the pass, where a pass returns no `Program` or a program that `verify` refuses.
    """
    result = program
    for rewrite in passes:
        result = _run(rewrite, result) if is_foreign(rewrite) else rewrite(result)
    foreign = [name_of_pass(rewrite) for rewrite in passes if is_foreign(rewrite)]
    if foreign:
        own = [rewrite for rewrite in passes if not is_foreign(rewrite)]
        _warn_of_peak(result, run_passes(program, own), foreign)
    return result


def insert(passes: Sequence[Pass], new: Pass, *, before: str) -> tuple[Pass, ...]:
    """`passes` with `new` in front of the pass named `before`: `insert(defaults(stage=3), mine, before="prefetch")`.

    Raises:
        FzeroError: where no pass has the name.
    """
    names = [name_of_pass(rewrite) for rewrite in passes]
    if before not in names:
        raise FzeroError(f"pass {before!r}", "is not among the passes", f"there are {', '.join(names)}")
    at = names.index(before)
    return (*passes[:at], new, *passes[at:])


def name_of_pass(rewrite: Pass) -> str:
    """The name of a pass's function, also behind `functools.partial`."""
    function = _unwrap(rewrite)
    return getattr(function, "__name__", type(function).__name__)


def is_foreign(rewrite: Pass) -> bool:
    """Whether a pass is defined outside of `fzero.passes`."""
    return not (getattr(_unwrap(rewrite), "__module__", None) or "").startswith("fzero.passes.")


def _unwrap(rewrite: Pass) -> Callable[..., Program]:
    while isinstance(rewrite, functools.partial):
        rewrite = rewrite.func
    return rewrite


def _run(rewrite: Pass, program: Program) -> Program:
    """The verified result of a pass from outside of fzero."""
    where = f"pass {name_of_pass(rewrite)!r}"
    result: object = rewrite(program)
    if not isinstance(result, Program):
        problem = f"returns {'None' if result is None else f'a {type(result).__name__}'}, not a Program"
        raise FzeroError(where, problem, "change program.copy() and return that")
    arguments, placeholders = len(result.arguments), len(result.placeholders)
    if arguments != placeholders:
        problem = f"leaves {placeholders} placeholders for {arguments} arguments"
        raise FzeroError(where, problem, "add state with program.add_state, which keeps both in step")
    try:
        return verify(result)
    except FzeroError as error:
        raise FzeroError(f"{where}: {error.where}", error.problem, error.way_out) from error


def _warn_of_peak(program: Program, without: Program, foreign: Sequence[str]) -> None:
    """Warn where the `foreign` passes raise the peak above that of the program `without` them."""
    count = len(program.pass_state)
    state = sum(nbytes(node.meta["val"]) for node in program.placeholders[-count:]) if count else 0
    peak, other = program.memory().peak, without.memory().peak
    if peak - state > other:
        names, beside = ", ".join(foreign), f", beside {format_size(state)} of state" if state else ""
        message = "%s: its peak is %s%s, without the passes %s it is %s"
        _log.warning(message, program.name, format_size(peak - state), beside, names, format_size(other))
