"""Writes the table of configuration keys into docs/deepspeed.md: `python tools/deepspeed_keys.py`."""

from __future__ import annotations

from pathlib import Path

from fzero.deepspeed.keys import KEYS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "deepspeed.md"
BEGIN, END = "<!-- keys: made by tools/deepspeed_keys.py -->\n", "<!-- end of keys -->\n"


def render() -> str:
    """The table of all keys, in the order of their paths."""
    lines = ["| key | type | default | meaning | here |", "|---|---|---|---|---|"]
    for path, key in sorted(KEYS.items()):
        kind, note = key.type.replace("|", ", "), key.note.replace("|", "\\|")
        lines.append(f"| `{path}` | {kind} | {_render_default(key.default)} | {key.meaning} | {note} |")
    return "\n".join(lines) + "\n"


def replace_table(page: str) -> str:
    """The page with the present table."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{render()}\n{END}{tail}"


def _render_default(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text()))
