"""Shared traces of tests: an equal step is traced once, and nothing else is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import programs as p
import pytest
import torch
import traces
from torch import nn

import fzero
from fzero import optim

Step = Callable[[Any], Any]


def scaled(by: Any) -> Step:
    """A step over a value."""

    def step(params: Any) -> Any:
        factor = by["factor"] if isinstance(by, dict) else by
        return {"w": params["w"] * (factor() if callable(factor) else factor)}

    return step


def run(step: Step, stage: int = 3, dtype: torch.dtype = torch.float32, mesh: fzero.VirtualMesh = p.MESH) -> Any:
    params = {"w": torch.arange(6.0, dtype=dtype)}
    return fzero.unpartition(fzero.simulate(step, mesh, stage=stage)(fzero.partition(params, mesh)))["w"]


@pytest.mark.parametrize("by", [3, {"factor": 3}, lambda: 3], ids=["a number", "a dict", "a function"])
def test_an_equal_step_is_traced_once_for_all_stages(by: Any) -> None:
    with traces.share_traces() as counts:
        got = [run(scaled(by), stage) for stage in (1, 2, 3, 3)]
    assert counts == [1, 3]
    assert all(torch.equal(x, 3 * torch.arange(6.0)) for x in got)


def test_a_step_over_another_value_is_another() -> None:
    with traces.share_traces() as counts:
        got = [run(scaled(by)).tolist()[1] for by in (2, 2.0, {"factor": 5}, lambda: 7, lambda: 8)]
    assert counts == [5, 0] and got == [2, 2, 5, 7, 8]


def test_other_arguments_meshes_and_settings_are_traced_anew() -> None:
    with traces.share_traces() as counts:
        run(scaled(2))
        run(scaled(2), dtype=torch.float64)
        run(scaled(2), mesh=fzero.VirtualMesh(fsdp=3))
        with torch.no_grad():
            run(scaled(2))
    assert counts == [4, 0]


@pytest.mark.parametrize("by", [torch.tensor(2.0), nn.Parameter(torch.tensor(2.0)), nn.Linear(1, 1)], ids=type)
def test_nothing_is_shared_of_a_step_over_what_may_change(by: Any) -> None:
    with traces.share_traces() as counts:
        for _ in range(2):
            run(scaled(by if isinstance(by, torch.Tensor) else lambda: by.weight.detach()[0, 0]))
    assert counts == [0, 0]


def test_a_step_that_counts_its_traces_is_traced_each_time() -> None:
    def counting(calls: list[int]) -> Step:
        def step(params: Any) -> Any:
            calls.append(0)
            return {"w": params["w"] * 2}

        return step

    calls = list[int]()
    with traces.share_traces() as counts:
        run(counting(calls))
        run(counting(calls))
    assert len(calls) == 2 and counts == [2, 0]


def test_what_passes_do_to_a_shared_trace_stays_with_them() -> None:
    def text(stage: int, donate: bool) -> str:
        held = fzero.partition(p.layers(), p.MESH)
        optimizer = optim.adamw(0.1)
        step = fzero.simulate(p.training(optim.adamw(0.1)), p.MESH, stage=stage, donate=donate)
        return str(step.trace(held, optimizer.init(held), p.rows(p.MESH)).graph)

    plans = [(1, True), (3, False), (3, True), (2, True)]
    expected = [text(*plan) for plan in plans]
    with traces.share_traces() as counts:
        assert [text(*plan) for plan in plans] == expected
    assert counts == [1, 3]
