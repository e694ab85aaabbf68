"""Each outcome is told: of functions that do something else to a leaf than to a plain tensor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance import judge
from conformance.forms import FORMS
from conformance.operators import judge_sample, undo_repeat
from conformance.verdict import Trial, Verdict, compare_lists, compare_values, deadline
from torch import Tensor

import fzero

DTYPE = torch.float64


class Operator:
    """An entry of the database with one sample, a matrix."""

    supports_autograd = True

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = self.inplace_variant = call

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call(x, *args, **kwargs)

    def supported_backward_dtypes(self, device: str) -> set[torch.dtype]:
        return {DTYPE}

    def judged(self, form: str = "value", *args: Tensor) -> Verdict:
        from torch.testing._internal.opinfo.core import SampleInput

        return judge_sample(self, SampleInput(matrix(), args=args), FORMS[form], DTYPE)


def matrix() -> Tensor:
    return torch.linspace(1, 2, 20, dtype=DTYPE).reshape(4, 5)


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
        (only_sharded(lambda x: x.detach() * 2, lambda x: x * 2), "wrong", "gradient 0 differs in 20 of 20 elements"),
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


def test_a_second_leaf_that_is_treated_differently_is_told() -> None:
    def call(x: Any, y: Any) -> Any:
        return x @ (y.detach() if isinstance(y, fzero.Sharded) else y)

    outcomes = {form: Operator(call).judged(form, matrix().T).outcome for form in ("value", "others", "all", "batch")}
    assert outcomes == {"value": "equal", "others": "wrong", "all": "wrong", "batch": "equal"}


def test_a_batch_that_is_taken_for_another_is_told() -> None:
    """Rank 0's part is right, the others' are not."""

    def call(x: Any, y: Any) -> Any:
        return x @ y if not isinstance(x, fzero.Sharded) else x @ (y * (1 + fzero.axis_index("fsdp")))

    assert Operator(call).judged("batch", matrix().T).outcome == "wrong"


def test_parts_of_ranks_may_differ_in_their_last_bits() -> None:
    want = torch.tensor(0.1 + 2j)
    got = torch.stack([want, want * (1 + 1e-7), want])
    assert not torch.equal(got[1], got[0]) and torch.equal(undo_repeat(got, want), want)
    assert undo_repeat(got + torch.tensor([0.0, 0.0, 1.0]), want).shape == (3,)


def test_state_that_differs_after_the_second_step_is_told() -> None:
    """A function that is right near the first state alone."""
    call = only_sharded(lambda x: torch.where(x < 2.5, x + 1, x + 2), lambda x: x + 1)
    assert Operator(lambda x: x + 1).judged("state").outcome == "equal"
    assert Operator(call).judged("state").reason.startswith("state 1 differs")


def test_a_leaf_that_is_written_to_is_told() -> None:
    def call(x: Any) -> Any:
        return x

    assert Operator(call).judged("in_place_leaf") == Verdict("wrong", "is not refused, but writes to a leaf")
    assert Operator(torch.Tensor.sin_).judged("in_place_leaf").outcome == "refused"


def test_what_is_not_finite_has_its_place() -> None:
    want = torch.tensor([1.0, float("nan"), float("inf")], dtype=DTYPE)
    assert not compare_values(want.clone(), want)
    assert compare_values(want.flip(0), want) == "differs in 2 of 3 elements"
    assert compare_values(want.nan_to_num(posinf=float("inf")), want) == "differs in 1 of 3 elements"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_both_parts_of_a_complex_number_are_compared(dtype: torch.dtype) -> None:
    want = torch.tensor([1 + 2j, complex(float("nan"), 1)], dtype=dtype)
    assert not compare_values(want.clone(), want)
    assert compare_values(want.conj(), want) == "differs in 2 of 4 elements"
    assert compare_values(want.real + 0j, want)


def test_a_float32_result_may_differ_in_its_last_bits() -> None:
    want = torch.linspace(-1, 1, 9)
    assert not compare_values(want + 1e-6, want) and compare_values(want + 1e-4, want)


def test_a_float32_result_may_be_as_imprecise_as_plain_torch() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    want = (exact + 1e-3).float()
    assert not compare_lists([want + 3e-3], [want], precise=[exact])
    assert compare_lists([want + 5e-3], [want], precise=[exact])
    assert compare_lists([want + 3e-3], [want]) and compare_lists([want + 3e-3], [want], precise=[exact[:1]])


def test_a_trial_that_takes_too_long_is_raw() -> None:
    def wait() -> Verdict:
        with deadline(1):
            time.sleep(5)
        return Verdict("equal")

    assert judge.run(Trial(3, wait)) == Verdict("raw", "TimeoutError: longer than 1 s", 3)
