"""Write the table of tutorials in docs/deepspeed.md from the cases of tests/deepspeed_tutorials.py.

    python tools/deepspeed_table.py                          # the table
    python tools/deepspeed_table.py build/deepspeed/bin/python   # first let DeepSpeed run the cases, by its Python

DeepSpeed's results go to tests/deepspeed_tutorials.json, which the tests compare with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import deepspeed_tutorials as tutorials  # noqa: E402  found by the path above
from pages import Table  # noqa: E402

RESULTS = ROOT / "tests" / "deepspeed_tutorials.json"


def render() -> list[str]:
    """The table of the cases: the page of DeepSpeed, its calls, and what comes out here."""
    rows = ["| page of DeepSpeed | calls | here |", "|---|---|---|"]
    for each in tutorials.CASES.values():
        runs = "runs, with DeepSpeed's numbers" if each.compare else "runs, with torch's numbers"
        rows.append(f"| {each.pages} | {each.calls} | {f'an error: {each.refused}' if each.refused else runs} |")
    return rows


def record(python: str) -> None:
    """Let DeepSpeed run the cases, as one process on a CPU."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}
    command = [python, tutorials.__file__, "deepspeed", str(RESULTS)]
    subprocess.run(command, check=True, cwd=ROOT / "tests", env=os.environ | alone | {"DS_ACCELERATOR": "cpu"})


TABLE = Table("deepspeed.md", "tutorials", "deepspeed_table.py", render)

if __name__ == "__main__":
    if len(sys.argv) > 1:
        record(sys.argv[1])
    TABLE.write()
