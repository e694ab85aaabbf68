"""The law of plans, on random steps: `python -m property_tests.random_steps.plans --count 200`.

A step by its own plan, saved and loaded, has the same program, node by node, and gives the same bits. So has a step by
the plan of a budget, at the least peak and halfway to that of stage 3. Prints the seeds that differ.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import tree
from fzero.passes import Plan
from fzero.program.open import find_difference
from property_tests.random_steps.draw import draw
from property_tests.random_steps.grammar import WAITING
from property_tests.random_steps.judge import _silence
from property_tests.random_steps.run import prepare

BUDGETS = (0.0, 0.5)
"""Where between the least peak and that of stage 3 a budget lies."""


def judge_plans(seed: int, folder: Path) -> Iterator[str]:
    """For each way to run the step of a seed an outcome: "equal", "refused", or what differs."""
    program = draw(seed, 0, frozenset(WAITING))
    if program.on_disk:
        return
    mesh, script = fzero.VirtualMesh(**dict(program.mesh)), program.define()
    plain = script["params"]()
    place: Any = [fzero.host() if name in program.on_host else None for name in "ps"]

    def make_args() -> tuple[Any, ...]:
        params = fzero.partition(plain, mesh, to=place[0])
        state = fzero.partition(script["init"](plain), mesh, like=params, to=place[1])
        return params, state, *script["batch"](program.rows[0] * program.world)

    def compare(**how: Any) -> str:
        step = fzero.simulate(script["step"], mesh, **how)
        searched, plan = step.trace(*make_args()), step.plan(*make_args())
        plan.save(folder / "plan.json")
        again = fzero.simulate(script["step"], mesh, plan=Plan.load(folder / "plan.json"))
        program = again.trace(*make_args())
        difference = find_difference(program, replace(searched, remarks=program.remarks))
        if difference or program.plan != searched.plan or program.memory() != searched.memory():
            return f"{how}: {difference or 'plan or memory'}"
        results = []
        for each in (step, again):
            torch.manual_seed(seed)
            results.append(tree.leaves(fzero.unpartition(each(*make_args()))))
        pairs = [(a, b) for a, b in zip(*results) if isinstance(a, torch.Tensor)]
        return "equal" if all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs) else f"{how}: results"

    try:
        yield compare(**program.options)
        options = {name: x for name, x in program.options.items() if name not in ("stage", "memory", "to")}
        for to in (None, fzero.host()):
            yield from (compare(memory=limit, to=to, **options) for limit in _list_limits(script, mesh, make_args, to))
    except fzero.FzeroError:
        yield "refused"


def _list_limits(script: Any, mesh: Any, make_args: Any, to: Any) -> Iterator[int]:
    most = fzero.simulate(script["step"], mesh).trace(*make_args()).memory().peak
    try:
        fzero.simulate(script["step"], mesh, memory=1, to=to).trace(*make_args())
    except fzero.FzeroError as error:
        (least,) = map(int, re.findall(r"give at least (\d+) bytes", str(error)))
        yield from (int(least + (most - least) * part) for part in BUDGETS if most > least)


def main() -> int:
    parser = argparse.ArgumentParser(prog="plans", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="so many seeds")
    options = parser.parse_args()
    prepare()
    counts, wrong = Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder, _silence():
        for seed in range(options.first, options.first + options.count):
            for outcome in judge_plans(seed, Path(folder)):
                counts[outcome if outcome in ("equal", "refused") else "other"] += 1
                if outcome not in ("equal", "refused"):
                    wrong += 1
                    print(f"seed {seed}: {outcome}", flush=True)
    print(dict(counts))
    return wrong


if __name__ == "__main__":
    raise SystemExit(main() > 0)
