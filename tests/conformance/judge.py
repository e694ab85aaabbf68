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


def judge(name: str, samples: int | None = None) -> Row:
    """The outcome in each cell, of all its trials, or of so many."""
    with silence():
        return {cell: worst(map(run, choose(name, cell, samples))) for cell in kind_of(name).cells(name)}


def judge_some(name: str, cells: int, samples: int) -> Row:
    """The outcomes in some cells, of one trial each that is not skipped.

    A fixed shuffle chooses the cells. A cell whose first `samples` trials are skipped is passed over.
    """
    found, order = Row(), kind_of(name).cells(name)
    random.Random(name).shuffle(order)
    with silence():
        for cell in order:
            verdicts = map(run, choose(name, cell, samples))
            tested = next((verdict for verdict in verdicts if verdict.outcome in OUTCOMES), None)
            if tested:
                found[cell] = tested
            if len(found) == cells:
                break
    return found


def choose(name: str, cell: Cell, samples: int | None) -> list[Trial]:
    """The first trials of a cell in a fixed shuffle; all, in order, without `samples`."""
    trials = list(kind_of(name).trials(name, cell))
    if samples is None:
        return trials
    random.Random(f"{name} {cell.form} {cell.dtype}").shuffle(trials)
    return trials[:samples]


def run(trial: Trial) -> Verdict:
    """The outcome of a trial, within the time that it may take."""
    try:
        with deadline():
            verdict = trial.run()
    except TimeoutError as error:
        verdict = Verdict("raw", f"TimeoutError: {error}")
    return verdict._replace(sample=trial.sample)
