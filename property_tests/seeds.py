"""Judges one seed after the other, in processes of one thread each."""

from __future__ import annotations

import argparse
import multiprocessing
from collections import Counter
from collections.abc import Callable

BAD = ("raw", "wrong")
"""Verdicts beside "equal" and "refused"."""


def run_seeds(
    name: str, doc: str | None, judge: Callable[[int], tuple[int, str, str]], describe: Callable[[int], object]
) -> int:
    """The command of a grammar. Prints each seed that is wrong or raw, with what `describe` says of it, then how often
    each verdict and each refusal came. Returns 1 where one was so, else 0."""
    parser = argparse.ArgumentParser(prog=name, description=doc)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=200, help="so many seeds")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    options = parser.parse_args()
    if options.seed is not None:
        _, verdict, detail = judge(options.seed)
        print(f"{describe(options.seed)}\n{verdict}: {detail}")
        return int(verdict in BAD)
    found, refused = Counter[str](), Counter[str]()
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for seed, verdict, detail in pool.imap(judge, range(options.first, options.first + options.count)):
            found[verdict] += 1
            refused[detail[:100]] += verdict == "refused"
            if verdict in BAD:
                print(f"{describe(seed)}\n{verdict}: {detail}", flush=True)
    for detail, count in refused.most_common(5):
        if count:
            print(f"{count} refused: {detail}")
    print(f"seeds {options.first} to {options.first + options.count - 1}: {dict(found)}")
    return int(any(found[verdict] for verdict in BAD))
