"""Writes the table of TrainingArguments into docs/huggingface.md: `python tools/hf_arguments.py`."""

from __future__ import annotations

import itertools

from pages import Table

from fzero.hf.arguments import ARGUMENTS


def render() -> list[str]:
    """The table of all fields, by meaning and note."""
    lines = ["| TrainingArguments | meaning | here |", "|---|---|---|"]
    rows = sorted((each.meaning, each.note, each.name) for each in ARGUMENTS.values())
    for (meaning, note), group in itertools.groupby(rows, key=lambda row: row[:2]):
        names = ", ".join(f"`{name}`" for _, _, name in group)
        lines.append(f"| {names} | {meaning} | {note} |")
    return lines


TABLE = Table("huggingface.md", "arguments", "hf_arguments.py", render)

if __name__ == "__main__":
    TABLE.write()
