"""Schedules against their closed forms, and against torch.optim.lr_scheduler."""

from __future__ import annotations

import math

import pytest
import torch
from schedule_references import CASES, STEPS

from fzero import optim
from fzero.base.errors import FzeroError

FLOAT32 = {"rel": 1e-6, "abs": 1e-8}  # a handful of float32 operations of 6e-8


def values(schedule, counts):
    return [schedule(torch.tensor(count, dtype=torch.int32)).item() for count in counts]


def cosine(fraction):
    return 0.5 * (1 + math.cos(math.pi * fraction))


SCHEDULES = [
    optim.constant_schedule(0.3),
    optim.linear_schedule(0.0, 1.0, 10),
    optim.linear_schedule(0.2, 1.0, 0),
    optim.cosine_decay_schedule(1.0, 10),
    optim.warmup_cosine_decay_schedule(0.0, 1.0, 3, 10),
    optim.join_schedules([optim.constant_schedule(1.0), optim.linear_schedule(1.0, 0.0, 4)], [3]),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_a_0d_float32_of_a_tensor_or_an_int(schedule):
    for count in range(12):
        value = schedule(torch.tensor(count, dtype=torch.int32))
        assert value.shape == ()
        assert value.dtype == torch.float32
        assert torch.equal(value, schedule(count))


@pytest.mark.parametrize("name", CASES)
def test_a_schedule_is_its_reference(name):
    got, want = values(CASES[name].schedule, range(STEPS)), CASES[name].values(STEPS)
    assert got == pytest.approx(want, rel=1.2e-7, abs=0)  # rounded once, to float32: half a unit is 6e-8


def test_constant():
    assert values(optim.constant_schedule(0.25), [0, 1, 1000]) == [0.25, 0.25, 0.25]


def test_linear_begins_late_and_stays_at_the_end():
    schedule = optim.linear_schedule(1.0, 3.0, transition_steps=4, transition_begin=2)
    assert values(schedule, range(9)) == [1.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]


def test_linear_without_steps_stays_at_the_beginning():
    assert values(optim.linear_schedule(1.0, 3.0, 0), [0, 5]) == [1.0, 1.0]


def test_cosine_decays_to_alpha():
    schedule = optim.cosine_decay_schedule(2.0, decay_steps=10, alpha=0.1)
    want = [2.0 * (0.9 * cosine(min(count, 10) / 10) + 0.1) for count in range(13)]
    assert values(schedule, range(13)) == pytest.approx(want, **FLOAT32)


@pytest.mark.parametrize("end", [0.0, 0.02])
def test_warmup_cosine_is_its_closed_form(end):
    schedule = optim.warmup_cosine_decay_schedule(0.01, 0.2, warmup_steps=5, decay_steps=25, end_value=end)
    warmup = [0.01 + (0.2 - 0.01) * count / 5 for count in range(5)]
    decay = [end + (0.2 - end) * cosine((count - 5) / 20) for count in range(5, 26)]
    assert values(schedule, range(30)) == pytest.approx([*warmup, *decay, *[end] * 4], **FLOAT32)


def test_warmup_cosine_without_warmup_begins_at_the_peak():
    schedule = optim.warmup_cosine_decay_schedule(0.0, 1.0, 0, 10)
    assert values(schedule, range(11)) == pytest.approx([cosine(count / 10) for count in range(11)], **FLOAT32)


def test_a_peak_of_zero_divides_by_nothing():
    assert values(optim.warmup_cosine_decay_schedule(0.0, 0.0, 2, 4), range(6)) == [0.0] * 6


def test_joined_schedules_count_from_their_boundary():
    rising = optim.linear_schedule(0.0, 4.0, 4)
    schedule = optim.join_schedules([rising, rising, rising], [3, 5])
    assert values(schedule, range(10)) == [0, 1, 2, 0, 1, 0, 1, 2, 3, 4]


def test_joined_schedules_may_return_numbers():
    schedule = optim.join_schedules([lambda count: 1.0, lambda count: 0.5], [2])
    assert values(schedule, range(4)) == [1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.linear_schedule(0.0, 1.0, -1), "transition_steps is -1"),
        (lambda: optim.linear_schedule(0.0, 1.0, 1, -2), "transition_begin is -2"),
        (lambda: optim.cosine_decay_schedule(1.0, 0), "decay_steps is 0"),
        (lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 10, 5), "warmup_steps is 10, decay_steps 5"),
        (lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 5, 5), "warmup_steps is 5, decay_steps 5"),
        (lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, 0, -5), "decay_steps is -5"),
        (lambda: optim.warmup_cosine_decay_schedule(0.0, 1.0, -1, 5), "warmup_steps is -1"),
        (lambda: optim.join_schedules([], []), "0 schedules with 0 boundaries"),
        (lambda: optim.join_schedules(SCHEDULES[:2], []), "2 schedules with 0 boundaries"),
        (lambda: optim.join_schedules(SCHEDULES[:3], [5, 2]), r"boundaries are \[5, 2\]"),
    ],
)
def test_bad_hyperparameters_show_their_numbers(make, message):
    with pytest.raises(FzeroError, match=message):
        make()
