"""Writes the table of TrainingArguments into docs/huggingface.md: `python tools/hf_arguments.py`."""

from __future__ import annotations

import itertools
from pathlib import Path

from fzero.hf.arguments import ARGUMENTS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "huggingface.md"
BEGIN, END = "<!-- arguments: made by tools/hf_arguments.py -->\n", "<!-- end of arguments -->\n"


def render() -> str:
    """The table of all fields, by meaning and note."""
    lines = ["| TrainingArguments | meaning | here |", "|---|---|---|"]
    rows = sorted((each.meaning, each.note, each.name) for each in ARGUMENTS.values())
    for (meaning, note), group in itertools.groupby(rows, key=lambda row: row[:2]):
        names = ", ".join(f"`{name}`" for _, _, name in group)
        lines.append(f"| {names} | {meaning} | {note} |")
    return "\n".join(lines) + "\n"


def replace_table(page: str) -> str:
    """The page with the present table."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{render()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text()))
