"""torch's operators, modules and optimizers do in a sharded step what they do in plain torch, as the table says.

Everything that the table has, in one or two forms and dtypes with a sample each. `make conformance` takes all.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from conformance import judge, modules, operators, optimizers, page, table
from conformance.verdict import Cell

CELLS = {operators: 1, modules: 2, optimizers: 2}
"""Forms and dtypes of each name. There are 700 operators: ten or more for each pair of a form and a dtype that so many
have."""

TEXT = table.FILE.read_text()
ROWS, BEFORE = table.from_text(TEXT), table.load()
SAMPLES = min(3, table.samples_in(TEXT) or 3)
"""Samples of a cell that may be skipped in search of one that is not: no more than the table is made of."""


@functools.cache
def find_first() -> dict[str, Cell]:
    return judge.spread(BEFORE)


@pytest.mark.parametrize("name", ROWS)
def test_no_outcome_is_worse_than_in_the_table(name: str) -> None:
    if name not in judge.names():
        pytest.skip(f"torch {torch.__version__} lacks {name}")
    found = judge.judge_some(name, CELLS[judge.kind_of(name)], SAMPLES, find_first().get(name))
    worse = table.regressions(BEFORE, {name: found})
    assert not worse, "\n".join(worse[name])


def test_the_table_is_sorted_and_reads_as_it_is_written() -> None:
    assert TEXT.splitlines()[1:] == table.to_text(ROWS, None).splitlines()[1:]
    assert table.counts(ROWS) in TEXT.splitlines()[0]


def test_each_form_is_tried_in_each_dtype() -> None:
    if not table.is_of_this_torch(TEXT):
        pytest.skip(f"the table, whose cells are spread, is not of torch {torch.__version__}")
    cells = {cell for name in operators.names() for cell in operators.cells(name)}
    chosen = Counter(cell for name, cell in find_first().items() if name in operators.names())
    assert set(chosen) == cells and sum(count >= 10 for count in chosen.values()) >= 40


def test_the_page_is_that_of_the_table() -> None:
    if not table.is_of_this_torch(TEXT):
        pytest.skip(f"the table is not of torch {torch.__version__}")
    assert page.FILE.read_text() == page.render(ROWS, table.samples_in(TEXT))


def test_the_table_and_torch_have_the_same_names() -> None:
    if table.is_of_this_torch(TEXT):
        assert sorted(ROWS) == sorted(judge.names())
