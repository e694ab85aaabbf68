"""Linked programs: a program with the code that runs it on a rank, and the lines that ranks compare."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from fzero.base.ambient import find_ambient
from fzero.base.torch_private import version_of
from fzero.execution.claims import has_foreign
from fzero.execution.codegen import Compile, Runner, link, link_open
from fzero.execution.cuda_graph import Captured, check_program
from fzero.execution.outline import outline
from fzero.program.open import Template, make_template
from fzero.program.program import Program
from fzero.ranks.agreement import agree, digest
from fzero.ranks.live import Live
from fzero.ranks.members import Members
from fzero.returned import Returned
from fzero.values.origin import MASK, Origin, describe_state, follow

Mode = bool | Literal["graph"]


class Linked(NamedTuple):
    """A linked program, and the lines that ranks compare before each call. The sizes of `program` may be others than
    those of `find_program()`."""

    program: Program
    find_program: Callable[[], Program]
    run: Runner
    returned: Returned
    donated: tuple[int, ...]  # positions among the tensor arguments
    lines: Lines
    trial: Trial | None


class Trial:
    """The first call of a program with operations from outside of fzero. `link` returns the runner that holds them to
    their records. It is another runner, so that later calls pay nothing."""

    def __init__(self, link: Callable[[], Runner]) -> None:
        self.link, self.is_due = link, True


class Lines:
    """The lines that must be the same on all ranks for a program to run, and a hash of them.

    A constant is a tensor of the user, who may write to it between two steps. So its line has its present contents.
    """

    def __init__(self, program: Program, settings: Sequence[str]) -> None:
        self._program, self._settings, self._find_program = program, settings, lambda: program
        self._digest = self._common_digest = digest([*settings, *program.lines()])
        self._common: Lines | None = None
        self._versions: list[int] | None = None
        self._constant_lines: list[str] = []
        self._state = [(i, given.path) for i, given in enumerate(program.arguments) if given.bucket is not None]

    def at(self, sizes: Sequence[int], find_program: Callable[[], Program]) -> Lines:
        """The same for a program that differs in sizes only."""
        other = copy.copy(self)
        other._find_program, other._versions = find_program, None
        other._digest = digest([str(self._digest), *map(str, sizes)])
        return other

    def without_sizes(self) -> Lines:
        """The same for ranks whose batches have other sizes."""
        if self._common is None:
            other = copy.copy(self)
            other._find_program, other._digest, other._versions = lambda: self._program, self._common_digest, None
            self._common = other
        return self._common

    def of_sizes(self) -> Lines:
        """The same for ranks that may have filled in equal programs by other schedules of theirs."""
        other = copy.copy(self)
        other._versions = None
        other._digest = digest([*self._settings, *self._find_program().lines()])
        return other

    def agree(
        self, members: Members, values: Sequence[Any], vote: bool = False, call: Sequence[str] = ()
    ) -> tuple[bool, Origin]:
        """`agree` of `fzero.ranks.agreement` on the present lines and on the origins of the state among `values`. Also
        returns the origin of the state that the program makes of these. `call` is the line of a call that is no
        step."""
        versions = [version_of(x) for x in self._program.captured.values()]
        if versions != self._versions or -1 in versions:  # an inference tensor does not count its changes
            self._versions, self._constant_lines = versions, self._program.constant_lines()
            self._number = digest([str(self._digest), *self._constant_lines])
        origins = [values[i].origin for i, _ in self._state]
        made = follow(origins, members.agreements)  # so that a call's state differs from that of an equal call before
        number = self._number ^ digest(call) if call else self._number

        def lines() -> list[str]:
            program = [*self._settings, *self._find_program().lines()]
            return [*call, *program, *self._constant_lines, *_list_origins(self._state, origins)]

        return bool(agree(members, (number ^ made) & MASK, lines, vote=vote, is_step=not call)), made


def _list_origins(state: Sequence[tuple[int, str]], origins: Sequence[Origin]) -> list[str]:
    """The origin of each argument that is state, one line each."""
    return [describe_state(path, origin) for (_, path), origin in zip(state, origins)]


def link_program(mode: Mode, compile: Compile, on: Live, program: Program) -> Linked:
    """Link a program, compiled by `mode`.

    A function and no method of `Step`: a cycle of references would keep a step and its CUDA graphs alive after
    `del step`.
    """
    if mode == "graph":
        check_program(program, on.device.type)
    lines = Lines(program, _list_settings(mode, program))
    outlined = outline(program) if mode else program
    run = link(outlined, on, compile)
    trial = Trial(functools.partial(link, outlined, on, compile, is_held=True)) if has_foreign(program) else None
    runner = Captured(program, run, settle=on.settle) if mode == "graph" else run
    return Linked(program, lambda: program, runner, Returned(program, on), _find_updates(program), lines, trial)


def link_template(
    mode: Mode, compile: Callable[..., Any], on: Live, template: Template
) -> Callable[[Sequence[int]], Linked] | None:
    """A function of sizes that returns the linked program of these. None where each has to be linked by itself."""
    opened, like = template.opened, template.program
    if mode == "graph" or has_foreign(like):
        return None
    if mode:
        assert opened is not None and opened.open is not None
        symbols = opened.open.symbols
        run_at = link_open(make_template(outline(opened)), on, lambda fragment: compile(fragment, symbols))
    else:
        run_at = link_open(template, on, lambda fragment: lambda sizes: fragment)
    returned, donated = Returned(like, on), _find_updates(like)
    lines = Lines(like, _list_settings(mode, like))

    def link_at(sizes: Sequence[int]) -> Linked:
        find = functools.cache(lambda: template.fill(sizes))
        results = returned.with_results(template.fill_results(sizes))
        return Linked(like, find, run_at(sizes), results, donated, lines.at(sizes, find), None)

    return link_at


def _list_settings(mode: Mode, program: Program) -> list[str]:
    plan = program.plan.lines() if program.plan else []
    return [f"compile: {mode}", *plan, *find_ambient().lines()]


def _find_updates(program: Program) -> tuple[int, ...]:
    """The positions of donated arguments, which a program writes over."""
    return tuple(i for i, argument in enumerate(program.arguments) if argument.donated)
