"""Estimates of a budget, the costs of state elsewhere and bytes: they are what programs say."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_placements import ADAMW, CLIPPED, train, unroll

import fzero
from fzero import optim
from fzero.budget.costs import estimate_costs, measure_costs
from fzero.budget.fit import Space
from fzero.budget.movable import NOTHING, Movable, Paths
from fzero.budget.outline import Outline
from fzero.budget.programs import Builder
from fzero.passes import Plan
from fzero.program.program import Program
from fzero.program.rates import GUESSES
from fzero.tracing.trace import trace

MESH, WIDTH = fzero.VirtualMesh(fsdp=8), 2048
OPTIMIZERS = {
    "adamw": ADAMW,
    "clipped": CLIPPED,
    "momentum": optim.sgd(0.1, momentum=0.9),
    "plain": optim.sgd(0.1),
}


def trace_large(optimizer: Any, layers: int = 5, rows: int = WIDTH) -> Program:
    """A step of layers that take as long as their collectives, without data."""
    with torch.device("meta"):
        blocks = [{"up": torch.empty(WIDTH, 4 * WIDTH), "down": torch.empty(4 * WIDTH, WIDTH)} for _ in range(layers)]
        params = {"blocks": blocks, "head": torch.empty(WIDTH, 3 * WIDTH)}
        x = torch.empty(8 * rows, WIDTH)
    params = fzero.partition(params, MESH)
    return trace(partial(train, optimizer, unroll), (params, optimizer.init(params), x), MESH)


@pytest.mark.parametrize("link", [2.5e10, 2e9])
@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_estimate_is_what_programs_say(name: str, where: str, link: float, tmp_path: Path) -> None:
    """Near enough to choose by, where copies are hidden and where they are the step."""
    rates = GUESSES["cpu"]._replace(flops=1e14, memory=1e12, host=1e11, wire=2.5e10, link=link)
    traced = replace(trace_large(OPTIMIZERS[name]), measured=rates)
    movable = Movable(traced, fzero.host() if where == "host" else fzero.disk(tmp_path))
    programs = Builder(traced)

    def build(away: Paths) -> Program:
        return programs(Plan(to=movable.to, away=away))

    base = Outline(build(NOTHING))
    step = base.timeline.seconds
    measured, estimated = measure_costs(base, movable, build), estimate_costs(base, movable)
    for real, guess in zip(measured, estimated):
        assert abs(guess - real) <= max(0.6 * real, 0.05 * step), (step, measured, estimated)


def test_buckets_that_are_gathered_early_take_the_room_of_those_that_are_kept() -> None:
    """The peak of a program is less than a bucket above the estimate, where some buckets are kept."""
    traced = replace(trace_large(ADAMW, layers=8, rows=512), measured=GUESSES["cuda"]._replace(wire=5e9))
    space = Space(traced, Builder(traced), Plan(to=fzero.host()))
    points = [point for point in space.frontier if 0 < len(space.pick(point).keep) < 8]
    errors = [space.build(point).memory().peak - point.peak for point in points[:: len(points) // 4]]
    assert len(errors) >= 4 and max(errors) < max(space.gathered), errors


@pytest.mark.parametrize("rows", [512, 1024])
def test_the_fastest_program_of_a_frontier_is_found(rows: int) -> None:
    """Also where estimates are a bucket too high, because nothing is left to be gathered early."""
    traced = trace_large(ADAMW, layers=4, rows=rows)
    space = Space(traced, Builder(traced), Plan())
    programs = [space.build(point) for point in space.frontier]
    peaks = [program.memory().peak for program in programs]
    seconds = [program.timeline().seconds for program in programs]
    assert min(peak - point.peak for peak, point in zip(peaks, space.frontier)) <= -max(space.gathered)
    for limit in peaks:
        found = space.find(limit)
        assert found is not None and found.program.memory().peak <= limit
        assert found.program.timeline().seconds <= 1.005 * min(
            each for peak, each in zip(peaks, seconds) if peak <= limit
        )
