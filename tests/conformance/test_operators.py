"""Operators of torch's operator database do in a sharded step what they do in plain torch, as the table says.

Each operator of the table with a few of its samples. `make conformance` takes all operators and all samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance import table
from conformance.operators import DTYPE, Verdict, compare_values, judge, judge_sample, operators
from torch import Tensor

import fzero

SAMPLES = 3
"""Of each operator: for the whole file some 90 seconds of one core."""

ROWS = table.from_text(table.FILE.read_text())


@pytest.mark.parametrize("name", ROWS)
def test_an_operator_is_no_worse_than_in_the_table(name: str) -> None:
    if name not in operators():
        pytest.skip(f"torch {torch.__version__} lacks {name}")
    worse = table.regressions(table.load(), {name: judge(name, SAMPLES, also=ROWS[name].sample)})
    assert not worse, f"{name}: {worse[name]}"


def test_the_table_is_sorted_and_reads_as_it_is_written() -> None:
    text = table.FILE.read_text()
    assert text.splitlines()[1:] == table.to_text(ROWS).splitlines()[1:]
    assert table.counts(ROWS) in text.splitlines()[0]


ORDER = ["wrong", "raw", "refused", "equal"]


@pytest.mark.parametrize("before", [*ORDER, "skipped"])
@pytest.mark.parametrize("today", [*ORDER, "skipped"])
def test_an_outcome_only_gets_better(before: str, today: str) -> None:
    if before == "skipped":
        expected = {"wrong": "worse", "skipped": "same"}.get(today, "better")
    elif today == "skipped" or ORDER.index(today) < ORDER.index(before):
        expected = "worse"
    else:
        expected = "same" if today == before else "better"
    rows = {"op": Verdict(before)}, {"op": Verdict(today, sample=3)}
    found = {"worse": table.regressions(*rows), "better": table.improvements(*rows)}
    assert {key for key, changes in found.items() if changes} == ({expected} - {"same"})


@pytest.mark.parametrize("outcome", [*ORDER, "skipped"])
def test_an_operator_that_the_table_lacks_may_be_anything_but_wrong(outcome: str) -> None:
    assert bool(table.regressions({}, {"op": Verdict(outcome)})) == (outcome == "wrong")


def test_an_operator_that_torch_lacks_is_no_change() -> None:
    assert not table.regressions({"op": Verdict("equal")}, {})
    assert not table.improvements({"op": Verdict("equal")}, {})


class Operator:
    """An entry of the database with one sample, a matrix."""

    supports_autograd = True

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self.call = call

    def __call__(self, x: Any) -> Any:
        return self.call(x)

    def supported_backward_dtypes(self, device: str) -> set[torch.dtype]:
        return {DTYPE}

    def judged(self) -> Verdict:
        from torch.testing._internal.opinfo.core import SampleInput

        return judge_sample(self, SampleInput(torch.linspace(1, 2, 20, dtype=DTYPE).reshape(4, 5)))


def only_sharded(sharded: Callable[[Any], Any], plain: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """A function that treats a partitioned tensor differently."""
    return lambda x: sharded(x) if isinstance(x, fzero.Sharded) else plain(x)


def raising(error: Exception) -> Callable[[Any], Any]:
    def raise_it(x: Any) -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("call", "outcome", "reason"),
    [
        (torch.sin, "equal", ""),
        (lambda x: (x.sum(0), [x @ x.T, 3]), "equal", ""),
        (lambda x: x * float("nan"), "equal", ""),
        (only_sharded(lambda x: x * (2 + 1e-10), lambda x: x * 2), "wrong", "result 0 differs in 20 of 20 elements"),
        (only_sharded(lambda x: x.detach() * 2, lambda x: x * 2), "wrong", "gradient differs in 20 of 20 elements"),
        (only_sharded(lambda x: x.sum(0), lambda x: x.sum(1)), "wrong", "result 0 is torch.float64 [5], expected"),
        (only_sharded(lambda x: (x, 3), lambda x: (x, 4)), "wrong", "result 1 is 3, expected 4"),
        (only_sharded(lambda x: x, lambda x: (x, x)), "wrong", "1 results, expected 2"),
        (only_sharded(raising(TypeError("no")), torch.sin), "raw", "TypeError: no"),
        (only_sharded(raising(fzero.FzeroError("x", "no")), torch.sin), "refused", "FzeroError: no"),
        (lambda x: x * torch.rand(4, 5, dtype=DTYPE), "skipped", "random"),
        (lambda x: x[4:], "skipped", "no elements"),
        (raising(TypeError("no")), "skipped", "plain torch raises TypeError: no"),
    ],
)
def test_each_outcome_is_told(call: Callable[[Any], Any], outcome: str, reason: str) -> None:
    found = Operator(call).judged()
    assert found.outcome == outcome and found.reason.startswith(reason)


def test_what_is_not_finite_has_its_place() -> None:
    want = torch.tensor([1.0, float("nan"), float("inf")], dtype=DTYPE)
    assert not compare_values(want.clone(), want)
    assert compare_values(want.flip(0), want) == "differs in 2 of 3 elements"
    assert compare_values(want.nan_to_num(posinf=float("inf")), want) == "differs in 1 of 3 elements"
