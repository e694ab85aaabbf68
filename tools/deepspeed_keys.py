"""Writes the table of configuration keys into docs/deepspeed.md: `python tools/deepspeed_keys.py`."""

from __future__ import annotations

from pages import Table

from fzero.deepspeed.keys import KEYS


def render() -> list[str]:
    """The table of all keys, in the order of their paths."""
    lines = ["| key | type | default | meaning | here |", "|---|---|---|---|---|"]
    for path, key in sorted(KEYS.items()):
        kind, note = key.type.replace("|", ", "), key.note.replace("|", "\\|")
        lines.append(f"| `{path}` | {kind} | {_render_default(key.default)} | {key.meaning} | {note} |")
    return lines


def _render_default(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


TABLE = Table("deepspeed.md", "keys", "deepspeed_keys.py", render)

if __name__ == "__main__":
    TABLE.write()
