"""Writes the table of the ds_configs of public projects into docs/deepspeed.md: `python tools/deepspeed_projects.py`.

The settings are in tests/deepspeed_projects.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages import Table

from fzero import FzeroError
from fzero.deepspeed.reading import read_config
from fzero.hf.ds_config import OF_ENGINE

FILE = Path(__file__).resolve().parents[1] / "tests" / "deepspeed_projects.json"


def render() -> list[str]:
    """The table of all files: project, path, and what comes of it."""
    rows = ["| project | file | here |", "|---|---|---|"]
    for each in json.loads(FILE.read_text()):
        rows.append(f"| {each['project']} | `{each['file']}` | {_describe(each)} |")
    return rows


def _describe(each: dict[str, Any]) -> str:
    if not each["refused"]:
        given = ", ".join(f"{name}={value}" for name, value in each["arguments"].items())
        return f"trains by the {each['by']}{f', with {given}' if given else ''}"
    try:
        read_config(each["config"])
    except FzeroError as error:
        return f"`{error.where}` is refused: {error.way_out}"
    return f"`{each['refused']}` is refused by the Trainer: {OF_ENGINE[each['refused']]}"


TABLE = Table("deepspeed.md", "projects", "deepspeed_projects.py", render)

if __name__ == "__main__":
    TABLE.write()
