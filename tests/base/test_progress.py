"""A trace that takes long says how far it is."""

from __future__ import annotations

import logging
from itertools import count

import pytest
import torch
from torch import Tensor

import fzero
from fzero.base.progress import Progress, WorkProgress, watch
from fzero.tracing import trace


def test_the_logger_says_how_far_a_trace_is_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    seconds = map(float, count())
    progress = Progress("tracing", "train", "operations", clock=lambda: next(seconds))
    with caplog.at_level(logging.INFO, "fzero"):
        for i in range(20):
            progress.count(f"line {i}")
    assert [record.message for record in caplog.records] == [
        f"train: {n} s of tracing, {n} operations, now at line {n - 1}" for n in (2, 4, 8, 16)
    ]


def test_a_trace_counts_its_operations(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = map(float, count())
    monkeypatch.setattr(trace, "Progress", lambda *given: Progress(*given, clock=lambda: next(seconds)))
    mesh = fzero.VirtualMesh(fsdp=2)
    weight = fzero.partition({"w": torch.ones(4, 4)}, mesh)["w"]

    def step(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(8):
            x = (x @ w).tanh()
        return x.sum()

    with caplog.at_level(logging.INFO, "fzero"):
        fzero.simulate(step, mesh).trace(weight, torch.ones(2, 4))
    messages = [record.message for record in caplog.records]
    assert [each.partition(", now at ")[0] for each in messages][:2] == [
        f"step: {n} s of tracing, {n} operations" for n in (2, 4)
    ]
    assert all(each.endswith("in step: x = (x @ w).tanh()") for each in messages[:2])


def test_a_slow_callback_that_works_itself_and_one_in_another() -> None:
    """A callback of 3 s is not called in the 2 s behind it, nor of its own work. One that raises ends the work."""
    now, heard, inner = [0.0], list[int](), list[int]()

    def call_slowly(step: WorkProgress) -> None:
        heard.append(step.done)
        now[0] += 3.0
        Progress("writing", "a log", "lines", 1, clock=lambda: now[0]).count()

    with watch(call_slowly, 2.0), watch(lambda step: inner.append(step.done), 0.0):
        work = Progress("reading", "a file", "parts", 8, clock=lambda: now[0])
        for _ in range(8):
            now[0] += 1.0
            work.count()
    assert heard == [2, 4, 6, 8] and inner == list(range(1, 9))
    with watch(lambda step: 1 / 0, 0.0):
        work = Progress("reading", "a file", "parts", 8)
        with pytest.raises(ZeroDivisionError):
            work.count()
        with pytest.raises(ZeroDivisionError):  # a later work still has its watches
            Progress("reading", "another", "parts", 1).count()
