"""A budget that may use the host: saved values go there where that takes less time than to compute them again."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_fit import SLACK, Case, case, least_of, list_budgets, whole

import fzero
from fzero import FzeroError
from fzero.budget.saved import Level, find_segments
from fzero.program import ops
from fzero.program.program import Program
from fzero.program.rates import GUESSES, Rates
from fzero.program.records import find_bodies
from fzero.tracing.trace import trace

CPU = GUESSES["cpu"]


def make_step(given: Case, memory: int, rates: Rates = CPU) -> Any:
    """The step with a budget for the device and the host beside it."""
    step = fzero.simulate(given.step, given.mesh, memory=memory, to=fzero.host())
    step._pipeline.reschedule(rates)
    return step


def find_least(given: Case, rates: Rates = CPU) -> int:
    with pytest.raises(FzeroError) as error:
        make_step(given, 1, rates).trace(*given.args)
    return int(re.findall(r"give at least (\d+) bytes", str(error.value))[0])


def count_copies(program: Program) -> int:
    graphs = (program.graph, *(body.graph for body in find_bodies(program.graph)))
    return sum(len(graph.find_nodes(op="call_function", target=ops.to_device)) for graph in graphs)


@pytest.mark.parametrize("name", ["remat by budget", "scan"])
def test_the_host_lowers_the_least_peak(name: str) -> None:
    """Results are those of stage 3, bit for bit, and more bytes never take more time."""
    given = case(name)
    plain = fzero.simulate(given.step, given.mesh, stage=3)
    expected, before = whole(plain(*given.args)), float("inf")
    least, most = find_least(given), plain.trace(*given.args).memory().peak
    assert least < least_of(name)  # by the same rates: those of a CPU
    for budget in list_budgets(least, most, 3)[:2]:
        step = make_step(given, budget)
        program = step.trace(*given.args)
        seconds = program.timeline().seconds
        assert program.memory().peak <= budget and seconds <= SLACK * before
        assert (program.memory().host > 0) == (count_copies(program) > 0)
        assert program.memory().host > 0
        before = min(before, seconds)
        if budget == least:
            assert all(torch.equal(a, b) for a, b in zip(whole(step(*given.args)), expected, strict=True))


def test_a_slow_link_moves_nothing() -> None:
    """The programs are those of a budget without the host."""
    given, rates = case("unrolled"), CPU._replace(link=1e3)
    least = least_of("unrolled")
    program = make_step(given, least, rates).trace(*given.args)
    assert program.lines() == given.trace(rates, memory=least).lines() and program.memory().host == 0


def test_a_report_says_how_much_moves() -> None:
    given = case("unrolled")
    report = "\n".join(make_step(given, find_least(given)).trace(*given.args).remarks)
    assert re.search(r"  has \S+ KiB of saved values on the host, 0\.00 ms more", report)
    assert re.search(r"  computes saved values of \d of 3 segments again: ", report)


def test_values_move_as_far_as_compute_hides_their_copies() -> None:
    """Then those are computed again that take less time than their copies would be waited for. Levels keep less and
    less, and each byte costs more than those before."""
    given = case("unrolled", rows=512)
    (params, state, x), mesh = given.args, given.mesh
    traced = trace(given.step, (params, state, x[: len(x) // 2]), mesh)
    for link in (1e11, 1e9):
        rates = CPU._replace(link=link)
        segments = find_segments(replace(traced, measured=rates), rates, has_host=True)
        first = next(segment for segment in segments if segment.saved)
        levels = [Level(), *first.levels]
        slopes = [(b.cost - a.cost) / (b.freed - a.freed) for a, b in pairwise(levels)]
        assert slopes == sorted(slopes)
        last = levels[-1]
        assert not last.lost & last.moved and last.lost | last.moved <= first.saved
        assert bool(last.moved) == (link == 1e11) and last.nbytes > 0
    others = [segment for segment in segments if not segment.saved]
    assert others and all(len(segment.levels) == 1 and segment.levels[0].moved for segment in others)
