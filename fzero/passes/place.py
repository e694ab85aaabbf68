"""The place pass: the state of a step lies where a plan has it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fzero.base.placement import Placement
from fzero.program.places import list_movable, place_results
from fzero.program.plan import check_names
from fzero.program.program import Program


def place(program: Program, *, to: Placement | None, away: Collection[str]) -> Program:
    """Let state lie in `to` where `away` has the path of its argument, and else on the device.

    State in a third placement stays there, and so does state that every rank holds whole. Same results, bit for bit.

    Raises:
        FzeroError: for a path that no state has that may lie in `to`.
    """
    if program.is_body:
        return program
    arguments, movable = list(program.arguments), list_movable(program, to)
    check_names("away", away, (arguments[i].path for i in movable), f"the state that may lie in {to}")
    for i in movable:
        arguments[i] = replace(arguments[i], place=to if arguments[i].path in away else None)
    results = tuple(replace(result, place=None) for result in program.results)
    return place_results(replace(program, arguments=tuple(arguments), results=results))
