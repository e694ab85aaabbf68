"""The outcomes of anything that has a name in torch's databases: an operator, a module or an optimizer."""

from __future__ import annotations

import random
from types import ModuleType

from conformance import modules, operators, optimizers
from conformance.verdict import OUTCOMES, Cell, Trial, Verdict, deadline, silence, worst

Row = dict[Cell, Verdict]


def names() -> list[str]:
    """Every name: `abs`, `nn.Linear`, `optim.Adam`."""
    return [*operators.names(), *modules.names(), *optimizers.names()]


def kind_of(name: str) -> ModuleType:
    """The module of this folder that knows a name. The operators have `nn.functional.linear` too."""
    if name in operators.operators():
        return operators
    return optimizers if name.startswith("optim.") else modules


def judge(name: str) -> Row:
    """The outcome in each cell, of all its trials."""
    kind = kind_of(name)
    with silence():
        return {cell: worst(map(run, kind.trials(name, cell))) for cell in kind.cells(name)}


def judge_some(name: str, limit: int) -> Row:
    """The outcomes of `limit` trials that are not skipped, each in another cell, chosen by a fixed shuffle."""
    kind, shuffle, found = kind_of(name), random.Random(name), Row()
    cells = kind.cells(name)
    shuffle.shuffle(cells)
    with silence():
        for cell in cells:
            trials = list(kind.trials(name, cell))
            for trial in shuffle.sample(trials, min(3, len(trials))):
                verdict = run(trial)
                if verdict.outcome in OUTCOMES:
                    found[cell] = verdict
                    break
            if len(found) == limit:
                break
    return found


def run(trial: Trial) -> Verdict:
    """The outcome of a trial, within the time that it may take."""
    try:
        with deadline():
            verdict = trial.run()
    except TimeoutError as error:
        verdict = Verdict("raw", f"TimeoutError: {error}")
    return verdict._replace(sample=trial.sample)
