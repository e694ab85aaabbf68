"""Tables: long lists in at most `LINES` lines. Rows that differ only in the number of a layer are one row, and what is
left out is counted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

LINES = 40
_NUMBER = re.compile(r"\d+")
_Row = TypeVar("_Row")


def limit_lines(head: Sequence[str], rows: Sequence[str], full: bool) -> str:
    """The lines of a table. Without `full` the last one says how many rows are left out, where there are too many."""
    space = LINES - len(head)
    if not full and len(rows) > space:
        rows = [*rows[: space - 1], f"  ... and {len(rows) - space + 1} more lines: print(....table(full=True))"]
    return "\n".join([*head, *rows])


def fold_layers(rows: Iterable[tuple[str, _Row]]) -> list[tuple[str, list[_Row]]]:
    """Rows whose names differ only in numbers, together, in the order of the first: `"layers.0", "layers.1"` is
    `"layers.*"`. A name that nothing is like stays whole."""
    alike: dict[str, list[tuple[str, _Row]]] = {}
    for name, row in rows:
        alike.setdefault(_NUMBER.sub("*", name), []).append((name, row))
    return [
        (members[0][0] if len({name for name, _ in members}) == 1 else name, [row for _, row in members])
        for name, members in alike.items()
    ]
