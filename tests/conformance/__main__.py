"""All of torch's operators, modules and optimizers with all their samples, against the committed table.

Fails where an outcome is worse than in the table. Fails also where one is better: `make conformance ARGS=--write` then
makes today's outcomes the table, and writes docs/conformance.md.

`CONFORMANCE_DEVICE=cuda` tries them on a GPU: the table, which is of CPU tensors, should hold there.

The outcomes are kept in build/ as they come. A run that was stopped goes on from there, unless a source has changed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import time
from pathlib import Path

import torch
from conformance import page
from conformance.database import DEVICE
from conformance.judge import Row, judge, kind_of, names
from conformance.table import FILE, counts, improvements, is_of_this_torch, load, regressions, to_text
from conformance.verdict import Cell, Verdict
from conformance.workers import judge_all

ROOT = Path(__file__).parents[2]


def find_dead(name: str) -> Row:
    """The row of a name that ends the process."""
    return dict.fromkeys(kind_of(name).cells(name), Verdict("raw", "the process died"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make today's outcomes the table, and write the page")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--only", nargs="*", help="names such as abs, nn.Linear, optim.Adam; then nothing is written")
    parser.add_argument("--samples", type=int, help="of each form and dtype, by a fixed shuffle; all without it")
    options = parser.parse_args()
    start, samples = time.monotonic(), options.samples or "all"
    journal = Journal(ROOT / "build" / f"conformance-{DEVICE}-{hash_sources()}-{samples}.jsonl")
    chosen = options.only or names()
    today = {name: row for name, row in journal.rows.items() if name in chosen}
    waiting, one = [name for name in chosen if name not in today], functools.partial(judge, samples=options.samples)
    for name, row in judge_all(waiting, options.workers, one, find_dead):
        journal.add(name, row)
        today[name] = row
    before = load()
    worse = regressions(before, today)
    better = improvements(before, today) if is_of_this_torch(FILE.read_text()) else {}
    for word, found in (("WORSE ", worse), ("better", better)):
        for name, lines in found.items():
            print("\n".join(f"{word} {name}: {line}" for line in lines))
    print(f"{counts(today)} in {len(today)} rows, {time.monotonic() - start:.0f} s")
    if options.write and not options.only:
        FILE.write_text(to_text(today, options.samples))
        page.FILE.write_text(page.render(today, options.samples))
        return 0
    if better:
        print("some are better than the table says: run `make conformance ARGS=--write` and commit what it writes")
    return 1 if worse or better else 0


def hash_sources() -> str:
    """A hash of what an outcome depends on: fzero, the files that judge, and torch's version."""
    here = Path(__file__).parent
    judges = [here / f"{name}.py" for name in ("forms", "judge", "modules", "operators", "optimizers", "verdict")]
    files = sorted([*(ROOT / "fzero").rglob("*.py"), *judges])
    content = b"".join(file.read_bytes() for file in files) + torch.__version__.encode()
    return hashlib.sha256(content).hexdigest()[:12]


class Journal:
    """Rows in a file, one a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self.path, self.rows = path, dict[str, Row]()
        for line in path.read_text().splitlines() if path.exists() else []:
            name, cells = json.loads(line)
            self.rows[name] = {Cell(*cell): Verdict(*verdict) for cell, verdict in cells}

    def add(self, name: str, row: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([name, list(row.items())]) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
