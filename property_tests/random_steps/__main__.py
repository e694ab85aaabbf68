"""Random train steps against plain torch: `python -m property_tests.random_steps --minutes 2`, or one: `--seed 12`.

Prints each step that is neither equal nor refused, shrunk, with its seed; then how often each refusal came. Fails where
a step was raw or wrong.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch

from property_tests.random_steps.grammar import WAITING
from property_tests.random_steps.run import Outcome, prepare, run
from property_tests.random_steps.shrink import shrink

BAD = ("raw", "wrong")


def describe(outcome: Outcome) -> str:
    """The shrunk step of an outcome, for a human."""
    program, verdict = shrink(outcome.program, outcome.verdict)
    return f"==== seed {outcome.seed}: {verdict.outcome}: {verdict.detail}\n{program.comment()}{program.source()}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="random_steps", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2, help="how long seeds are drawn")
    parser.add_argument("--seed", type=int, help="this seed alone, and its source")
    parser.add_argument("--first", type=int, help="the first seed; by default a random one")
    parser.add_argument("--count", type=int, help="so many seeds, however long they take")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--all", action="store_true", help="also the rules whose cause is still open")
    parser.add_argument("--show", type=int, default=3, help="so many steps are shown for one reason")
    options = parser.parse_args()
    waiting = frozenset() if options.all else frozenset(WAITING)
    if options.seed is not None:
        torch.set_num_threads(1)
        outcome = run(options.seed, waiting)
        print(outcome.program.comment() + outcome.program.source())
        print(f"{outcome.verdict.outcome}: {outcome.verdict.reason}\n{outcome.verdict.detail}")
        return outcome.verdict.outcome in BAD
    first = secrets.randbelow(10**9) if options.first is None else options.first
    print(f"seeds from {first} on", flush=True)
    return report(collect(options, first, waiting), first, options.show)


def collect(options: argparse.Namespace, first: int, waiting: frozenset[str]) -> Iterator[Outcome]:
    """The outcomes of seeds from `first` on."""
    end = time.monotonic() + 60 * options.minutes
    seeds = range(first, first + options.count) if options.count else range(first, first + 10**9)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(options.workers, prepare) as pool:
        for outcome in pool.imap(functools.partial(run, waiting=waiting), seeds):
            yield outcome
            if not options.count and time.monotonic() > end:
                break
        pool.terminate()


def report(outcomes: Iterator[Outcome], first: int, show: int) -> int:
    """Print what was found; 1 where a step was raw or wrong."""
    start, counts, shown = time.monotonic(), Counter[str](), Counter[str]()
    reasons: dict[tuple[str, str], list[int]] = defaultdict(list)
    for outcome in outcomes:
        verdict = outcome.verdict
        counts[verdict.outcome] += 1
        if verdict.outcome != "equal":
            reasons[verdict.outcome, verdict.reason].append(outcome.seed)
        if verdict.outcome in BAD:
            shown[verdict.reason] += 1
            if shown[verdict.reason] <= show:
                print(describe(outcome), flush=True)
    total, seconds = sum(counts.values()), time.monotonic() - start
    for (outcome_name, reason), seeds in sorted(reasons.items(), key=lambda item: (item[0][0], -len(item[1]))):
        print(f"{len(seeds):5} {outcome_name}: {reason}; seeds {', '.join(map(str, seeds[:5]))}")
    share = counts["refused"] / max(1, total)
    print(f"seeds {first} to {first + total - 1}: {dict(counts)}, {share:.0%} refused, {total / seconds:.1f} a second")
    return int(any(counts[name] for name in BAD))


if __name__ == "__main__":
    raise SystemExit(main())
