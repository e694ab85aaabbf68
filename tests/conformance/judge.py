"""The outcomes of anything that has a name in torch's databases: an operator, a module or an optimizer."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Mapping
from types import ModuleType

from conformance import modules, operators, optimizers
from conformance.verdict import OUTCOMES, Cell, Trial, Verdict, deadline, silence, worst

Row = dict[Cell, Verdict]


@functools.cache
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


def judge_some(name: str, cells: int, samples: int, first: Cell | None = None) -> Row:
    """The outcomes in some cells, of one trial each that is not skipped.

    A fixed shuffle chooses the cells, behind `first`. A cell whose first `samples` trials are skipped is passed over.
    """
    found, order = Row(), _shuffle_cells(name)
    order.sort(key=lambda cell: cell != first)
    with silence():
        for cell in order:
            verdicts = map(run, choose(name, cell, samples))
            tested = next((verdict for verdict in verdicts if verdict.outcome in OUTCOMES), None)
            if tested:
                found[cell] = tested
            if len(found) == cells:
                break
    return found


def spread(rows: Mapping[str, Row]) -> dict[str, Cell]:
    """A cell of each name that is not skipped in `rows`: all cells are chosen about equally often."""
    found, counts = dict[str, Cell](), Counter[Cell]()
    for name in filter(rows.__contains__, names()):
        tested = [cell for cell in _shuffle_cells(name) if cell in rows[name] and rows[name][cell].outcome in OUTCOMES]
        if tested:
            found[name] = min(tested, key=counts.__getitem__)
            counts[found[name]] += 1
    return found


def _shuffle_cells(name: str) -> list[Cell]:
    cells = kind_of(name).cells(name)
    random.Random(name).shuffle(cells)
    return cells


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
