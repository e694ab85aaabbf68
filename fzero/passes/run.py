"""Run passes one after the other, and name the pass where one from outside of fzero makes a mistake."""

from __future__ import annotations

import functools
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from fzero.base.errors import FzeroError
from fzero.base.progress import Progress
from fzero.base.sizes import format_size
from fzero.passes.order import Access, find_accesses, find_mutable, list_accesses, pair_accesses
from fzero.passes.verify import verify
from fzero.program import ops
from fzero.program.operation import EMITTED_BY, Node, nbytes
from fzero.program.program import Program
from fzero.program.records import find_loops, name_of, record
from fzero.program.refusals import line_of

Pass = Callable[[Program], Program]
_log = logging.getLogger("fzero")


def run_passes(program: Program, passes: Sequence[Pass]) -> Program:
    """`program`, rewritten by each pass in turn.

    A pass may move the nodes that it does not replace, but not past a read or write of memory that one of both writes
    into. The result of a pass from outside of fzero is verified at once. The logger "fzero" warns where such passes
    raise the peak above the peak of fzero's passes alone; the state that they add does not count.

    Raises:
        FzeroError: naming the pass, where a pass returns no `Program` or a program that `verify` refuses, and where a
            pass moves a read or write of memory past a write.
    """
    foreign = [name_of_pass(rewrite) for rewrite in passes if is_foreign(rewrite)]
    program, is_own = replace(program, is_spare=False), program.is_spare and not foreign
    result = program
    accesses, progress = (
        list_accesses(find_mutable(result.graph)),
        Progress("passes", program.name, "passes", len(passes)),
    )
    for number, rewrite in enumerate(passes, start=1):
        is_placed = "offload" not in map(name_of_pass, passes[number:])  # offload brings operands to one place
        new = _rewrite(rewrite, result, accesses, is_placed, is_own)
        is_own = not is_foreign(rewrite) and (is_own or new.graph is not result.graph)
        accesses = accesses if new is result else list_accesses(find_mutable(new.graph))
        result = new
        progress.count(name_of_pass(rewrite))
    if foreign:
        own = [rewrite for rewrite in passes if not is_foreign(rewrite)]
        _warn_of_peak(result, run_passes(program, own), foreign)
    return result


def _rewrite(
    rewrite: Pass, program: Program, accesses: Sequence[Access], is_placed: bool, is_own: bool = False
) -> Program:
    """The program rewritten by one pass, the bodies of its loops first. `accesses` are those of the program's nodes.
    With `is_own` a pass of fzero made the program, and another one may change its graph."""

    def rewrite_body(body: Program) -> Program:
        return _rewrite(rewrite, body, list_accesses(find_mutable(body.graph)), is_placed)

    try:
        given = ops.map_bodies(program, rewrite_body)
    except FzeroError as error:
        where = f"pass {name_of_pass(rewrite)!r}"
        if error.where.startswith("pass "):
            raise
        raise FzeroError(f"{where}: {error.where}", error.problem, error.way_out) from error
    if is_foreign(rewrite):
        result = _run(rewrite, given, is_placed)
        _warn_of_loops(name_of_pass(rewrite), program, given, result)
    else:
        spare = replace(given, is_spare=is_own)
        result = rewrite(spare)
        result = given if result is spare else replace(result, is_spare=False)
    if result is not given:
        check_moves(name_of_pass(rewrite), accesses, result.graph)
    return result


def check_moves(name: str, before: Sequence[Access], after: fx.Graph) -> None:
    """Refuse the result of the pass `name` where nodes that it only moved read and write memory in another order than
    `before`.

    A node is the same in both graphs where it has the same name and calls the same operation. The operands that it has
    in both graphs count: a pass that gives a node another operand replaces what the node reads.
    """
    if not before:
        return
    names = {access.name for access in before}
    moved = {node.name: (index, node) for index, node in enumerate(after.nodes) if node.name in names}

    def keep(access: Access) -> Access:
        _, node = moved.get(access.name, (0, None))
        is_kept = node is not None and node.target == access.target
        kept = {x.name for x in find_accesses(node)} if is_kept else set[str]()
        memory = {x: each for x, each in access.memory.items() if x in kept}
        return access._replace(memory=memory, written=access.written & memory.keys())

    for access, earlier in pair_accesses(map(keep, before)):
        index, node = moved[access.name]
        for first in earlier:
            if moved[first.name][0] > index:
                problem = f"moves {access.name} in front of {first.name}, and one of both writes what the other touches"
                way_out = "move nodes so that reads and writes of the same memory keep their order"
                raise FzeroError(f"pass {name!r}", problem + line_of(node), way_out)


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


def _run(rewrite: Pass, program: Program, is_placed: bool) -> Program:
    """The verified result of a pass from outside of fzero. Operands lie in one place where the program `is_placed`."""
    where = f"pass {name_of_pass(rewrite)!r}"
    try:
        result: object = rewrite(program)
    except FzeroError as error:
        if error.where.startswith(where):
            raise
        raise FzeroError(f"{where}: {error.where}", error.problem, error.way_out) from error
    except Exception as error:
        raise _name_error(rewrite, where, error) from error
    if not isinstance(result, Program):
        problem = f"returns {'None' if result is None else f'a {type(result).__name__}'}, not a Program"
        raise FzeroError(where, problem, "change program.copy() and return that")
    arguments, placeholders = len(result.arguments), len(result.placeholders)
    if arguments != placeholders:
        problem = f"leaves {placeholders} placeholders for {arguments} arguments"
        raise FzeroError(where, problem, "add state with program.add_state, which keeps both in step")
    made = {node.name for node in program.graph.nodes}
    for node in result.graph.nodes if result.graph is not program.graph else ():
        if node.name not in made and EMITTED_BY not in node.meta:
            node.meta[EMITTED_BY] = name_of_pass(rewrite)
    try:
        return verify(result, is_placed=is_placed)
    except FzeroError as error:
        raise FzeroError(f"{where}: {error.where}", error.problem, error.way_out) from error


def _name_error(rewrite: Pass, where: str, error: Exception) -> FzeroError:
    """The error that a pass from outside raised, with the line of the pass."""
    file = getattr(getattr(_unwrap(rewrite), "__code__", None), "co_filename", "")
    lines = [x for x in traceback.extract_tb(error.__traceback__) if x.filename == file]
    at = f" ({file}:{lines[-1].lineno} in {lines[-1].name}: {lines[-1].line})" if lines else ""
    way_out = "see the error above"
    if isinstance(error, AssertionError) and "not in graph" in str(error):
        way_out = "find nodes in what program.copy() returns, not in the program before it"
    return FzeroError(where, f"raises {type(error).__name__}: {error}{at}", way_out)


def _warn_of_loops(name: str, before: Program, given: Program, result: Program) -> None:
    """Warn where a pass leaves the bodies of loops as they are, and either changes nothing, though bodies communicate,
    or takes operations out of the step that bodies have too. `given` is the program `before`, with bodies rewritten."""
    loops = find_loops(before.graph)
    if given is not before or not loops or result is before:
        return
    inside = Counter(name_of(x) for body in loops.values() for x in body.graph.nodes if _is_communication(x))
    counts = [Counter(name_of(x) for x in each.graph.nodes if _is_communication(x)) for each in (before, result)]
    taken = counts[0] - counts[1]
    left = {op: count for op, count in inside.items() if op in taken}
    is_unchanged = not taken and not result.pass_state[len(before.pass_state) :] and before.lines() == result.lines()
    if left or (is_unchanged and inside):
        does = f"changes {', '.join(f'{n} {op}' for op, n in taken.items())} of the step" if left else "changes nothing"
        have = ", ".join(f"{n} {op}" for op, n in (left or inside).items())
        where = ", ".join(f"{node.name}{line_of(node)}" for node in loops)
        message = "pass %r %s, and leaves the bodies of loops as they are, which have %s (%s): see program.is_body"
        _log.warning(message, name, does, have, where)


def _is_communication(node: Node) -> bool:
    return node.op == "call_function" and record(node).moves is not None and record(node).body is None


def _warn_of_peak(program: Program, without: Program, foreign: Sequence[str]) -> None:
    """Warn where the `foreign` passes raise the peak above that of the program `without` them."""
    count = len(program.pass_state)
    state = sum(nbytes(node.meta["val"]) for node in program.placeholders[-count:]) if count else 0
    peak, other = program.memory().peak, without.memory().peak
    if peak - state > other:
        names, beside = ", ".join(foreign), f", beside {format_size(state)} of state" if state else ""
        message = "%s: its peak is %s%s, without the passes %s it is %s"
        _log.warning(message, program.name, format_size(peak - state), beside, names, format_size(other))
