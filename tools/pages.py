"""Pages: the tables in docs/ that tools write, each between two markers of its page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1] / "docs"


class Table(NamedTuple):
    """The table `name` on a page of docs/, as the lines that `render` returns. `tool` is the script that writes it."""

    page: str
    name: str
    tool: str
    render: Callable[[], list[str]]

    def read(self) -> list[str]:
        """The lines of the table that the page has."""
        return self._cut()[1].strip().splitlines()

    def write(self) -> None:
        """Put the present table on the page."""
        before, _, behind = self._cut()
        (DOCS / self.page).write_text("\n".join([f"{before}\n", *self.render(), f"\n{behind}"]))

    def _cut(self) -> tuple[str, str, str]:
        """The page up to the first marker, between both markers, and from the second one on.

        Raises:
            ValueError: where the page has not one marker of each kind.
        """
        text = (DOCS / self.page).read_text()
        begin, end = f"<!-- {self.name}: made by tools/{self.tool} -->", f"<!-- end of {self.name} -->"
        if (text.count(begin), text.count(end)) != (1, 1):
            raise ValueError(f"docs/{self.page} needs the lines {begin} and {end}, each once")
        before, rest = text.split(begin)
        table, behind = rest.split(end)
        return before + begin, table, end + behind
