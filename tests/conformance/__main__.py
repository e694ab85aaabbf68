"""Every operator of torch's operator database with all its samples, against the committed table: `make conformance`.

Fails where an operator is worse than in the table. Fails also where one is better: `make conformance ARGS=--write`
then makes today's outcomes the table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import torch
from conformance.operators import judge, operators
from conformance.table import FILE, counts, improvements, is_of_this_torch, load, regressions, to_text


def main() -> int:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make today's outcomes the table")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    options = parser.parse_args()
    start, names = time.monotonic(), sorted(operators())
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        today = dict(zip(names, pool.map(judge, names)))
    before = load()
    worse = regressions(before, today)
    better = improvements(before, today) if is_of_this_torch(FILE.read_text()) else {}
    for name, what in {**worse, **better}.items():
        print(f"{'WORSE ' if name in worse else 'better'} {name}: {what}")
    print(f"{counts(today)} of {len(today)} operators, {time.monotonic() - start:.0f} s")
    if options.write:
        FILE.write_text(to_text(today))
        return 0
    if better:
        print("some are better than the table says: run `make conformance ARGS=--write` and commit the table")
    return 1 if worse or better else 0


if __name__ == "__main__":
    raise SystemExit(main())
