"""The page of two programs, side by side."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from fzero.pages.page import (
    draw_memory,
    draw_panel,
    draw_table,
    draw_time,
    frame_page,
    group_transfers,
    list_tiles,
    write_bytes,
    write_seconds,
)
from fzero.program.flops import count_flops
from fzero.program.peak import Memory
from fzero.program.program import Program
from fzero.program.timeline import Timeline, Transfer

CONTEXT = 2
"""The equal lines of both listings around a difference that are shown."""


class _Side(NamedTuple):
    letter: str
    program: Program
    timeline: Timeline
    memory: Memory
    listing: list[str]


def draw_comparison(one: Program, other: Program, limit: int | None = None) -> str:
    """One HTML page of two programs, A and B: their numbers, bytes and lanes on equal scales, what each communicates,
    and the lines in which their listings differ. It has no script, and refers to nothing."""
    sides = [
        _Side(letter, program, program.timeline(), program.memory(), str(program).splitlines())
        for letter, program in (("A", one), ("B", other))
    ]
    top, seconds = max(side.memory.peak for side in sides), max(side.timeline.seconds for side in sides)
    memory = [draw_memory(side.program, limit, top) for side in sides]
    parts = [
        f"<h1>{escape(one.name)} and {escape(other.name)}</h1>",
        *(f"<p>{side.letter}: {escape(side.listing[0])}</p>" for side in sides),
        draw_panel("Side by side", _draw_numbers(*sides)),
        draw_panel(
            "Memory over the step", _draw_pair(*memory), "Of the rank with the highest peak. The scales are equal."
        ),
        draw_panel("Time", _draw_pair(*(draw_time(side.timeline, seconds) for side in sides)), "The scales are equal."),
        draw_panel("Communication", _draw_communication(*sides)),
        draw_panel("Plans", _draw_pair(*(f"<pre>{escape(str(side.program.plan or ''))}</pre>" for side in sides))),
        draw_panel(
            "Where the programs differ", _draw_differences(*sides), "Lines of A begin with -, lines of B with +."
        ),
    ]
    return frame_page(f"{one.name} and {other.name}", parts)


def _draw_pair(one: str, other: str) -> str:
    return f'<div class="pair"><div><p>A</p>{one}</div><div><p>B</p>{other}</div></div>'


def _draw_numbers(one: _Side, other: _Side) -> str:
    pair = [
        list_tiles(side.program, side.timeline, side.memory, sum(count_flops(side.program).values()))
        for side in (one, other)
    ]
    rows = [
        (name, write(value), write(pair[1][name][0]), _write_change(value, pair[1][name][0]))
        for name, (value, write) in pair[0].items()
    ]
    return draw_table(("", "A", "B", "B against A"), rows)


def _write_change(one: float, other: float) -> str:
    if one == other:
        return "equal"
    return f"{other / one - 1:+.1%}" if one else "new"


def _draw_communication(one: _Side, other: _Side) -> str:
    groups = [group_transfers(side.timeline) for side in (one, other)]
    rows = [(*kind, *_write_transfers(groups[0].get(kind, ())), *_write_transfers(groups[1].get(kind, ())))
            for kind in dict.fromkeys([*groups[0], *groups[1]])]  # fmt: skip
    measured = ("times", "bytes", "compute waits")
    heads = (f"{side.letter}: {name}" for side in (one, other) for name in measured)
    return draw_table(("collective", "axis", "dtype", *heads), rows)


def _write_transfers(members: list[Transfer] | tuple[()]) -> tuple[str, str, str]:
    nbytes, waits = sum(each.comm.nbytes for each in members), sum(each.exposed for each in members)
    return f"{len(members)}", write_bytes(nbytes), write_seconds(waits)


def _draw_differences(one: _Side, other: _Side) -> str:
    found = list(_list_differences(one.listing[1:], other.listing[1:]))
    return f"<pre>{escape(chr(10).join(found))}</pre>" if found else "<p>The listings are equal.</p>"


def _list_differences(one: list[str], other: list[str]) -> Iterator[str]:
    for line in difflib.unified_diff(one, other, n=CONTEXT, lineterm=""):
        if not line.startswith(("---", "+++")):
            yield "..." if line.startswith("@@") else line
