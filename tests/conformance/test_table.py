"""The table's law: outcomes only get better. And a table is read as it was written."""

from __future__ import annotations

import pytest
from conformance import page, table
from conformance.verdict import Cell, Verdict

ORDER = ["wrong", "raw", "refused", "equal"]
CELL = Cell("value", "f64")


@pytest.mark.parametrize("before", [*ORDER, "skipped"])
@pytest.mark.parametrize("today", [*ORDER, "skipped"])
def test_an_outcome_only_gets_better(before: str, today: str) -> None:
    if before == "skipped":
        expected = {"wrong": "worse", "skipped": "same"}.get(today, "better")
    elif today == "skipped" or ORDER.index(today) < ORDER.index(before):
        expected = "worse"
    else:
        expected = "same" if today == before else "better"
    rows = {"op": {CELL: Verdict(before)}}, {"op": {CELL: Verdict(today, sample=3)}}
    found = {"worse": table.regressions(*rows), "better": table.improvements(*rows)}
    assert {key for key, changes in found.items() if changes} == ({expected} - {"same"})


@pytest.mark.parametrize("outcome", [*ORDER, "skipped"])
def test_a_cell_that_the_table_lacks_may_be_anything_but_wrong(outcome: str) -> None:
    other = {"op": {Cell("method", "f64"): Verdict("equal")}}
    for before in ({}, other):
        assert bool(table.regressions(before, {"op": {CELL: Verdict(outcome)}})) == (outcome == "wrong")


def test_what_torch_lacks_is_no_change() -> None:
    before = {"op": {CELL: Verdict("equal")}}
    assert not table.regressions(before, {}) and not table.improvements(before, {})


def test_a_table_is_read_as_it_was_written() -> None:
    rows = {
        "abs": {
            Cell("value", "f64"): Verdict("equal"),
            Cell("state", "f64"): Verdict("refused", "FzeroError: a value of 3 [1, 2]", 4),
            Cell("state", "i64"): Verdict("refused", "FzeroError: a value of 3 [1, 2]", 4),
            Cell("method", "i64"): Verdict("refused", "FzeroError: a value of 3 [1, 2]", 4),
            Cell("out", "c64"): Verdict("raw", "TypeError: no; none"),
            Cell("all", "c64"): Verdict("wrong", "result 0 differs", 17),
            Cell("in_place_leaf", "f64"): Verdict("refused"),
        },
        "nn.Linear": {Cell("train", "f32"): Verdict("skipped")},
        "optim.SGD": {Cell("donate", "f64"): Verdict("equal")},
    }
    text = table.to_text(rows, None)
    assert table.from_text(text) == rows
    assert "\nabs refused 4 state[f64,i64];method[i64] FzeroError: a value of 3 [1, 2]\n" in text


@pytest.mark.parametrize("samples", [None, 1, 3])
def test_the_head_says_how_many_samples_were_taken(samples: int | None) -> None:
    text = table.to_text({}, samples)
    assert table.samples_in(text) == samples and table.is_of_this_torch(text)


@pytest.mark.parametrize(
    ("name", "reason", "general"),
    [
        ("fft.irfft", "fft_irfft would change 3 values in place", "NAME would change N values in place"),
        ("add", "a value meets a slice in add_: ranks would drift", "a value meets a slice in NAME: ranks would drift"),
        ("norm", "a value meets a slice in mul: ranks would drift", "a value meets a slice in NAME: ranks would drift"),
        ("abs", "TypeError: `abs` doesn't take [4, 5, 6]", "TypeError: 'NAME' doesn't take [N, N]"),
        ("t", "TypeError: `t` doesn't take [4, 5, 6]", "TypeError: 't' doesn't take [N, N]"),
    ],
)
def test_operators_share_a_reason(name: str, reason: str, general: str) -> None:
    assert page.generalize(reason, name) == general
