"""Random models on axes: `python -m property_tests.random_axes --count 2000`, or one: `--seed 12`.

Prints each model that is wrong or raw, then how often each verdict and each refusal came. Fails where one was so.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections import Counter

from property_tests.random_axes.judge import draw_case, judge

BAD = ("raw", "wrong")


def main() -> int:
    parser = argparse.ArgumentParser(prog="random_axes", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=200, help="so many seeds")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    options = parser.parse_args()
    if options.seed is not None:
        _, verdict, detail = judge(options.seed)
        print(f"{draw_case(options.seed)}\n{verdict}: {detail}")
        return verdict in BAD
    found, refused = Counter[str](), Counter[str]()
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for seed, verdict, detail in pool.imap(judge, range(options.first, options.first + options.count)):
            found[verdict] += 1
            refused[detail[:100]] += verdict == "refused"
            if verdict in BAD:
                print(f"{draw_case(seed)}\n{verdict}: {detail}", flush=True)
    for detail, count in refused.most_common(5):
        if count:
            print(f"{count} refused: {detail}")
    print(f"seeds {options.first} to {options.first + options.count - 1}: {dict(found)}")
    return any(found[verdict] for verdict in BAD)


if __name__ == "__main__":
    raise SystemExit(main())
