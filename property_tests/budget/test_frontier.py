"""The search of a memory budget beside exhaustive search, on random programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import fzero
from fzero import tree
from fzero.base.placement import Placement
from fzero.budget.choices import list_segment_choices
from fzero.budget.fit import Space
from fzero.budget.frontier import Choice, Lifetime, Option, Point, find_frontier
from fzero.budget.programs import mark_trace
from fzero.budget.saved import find_segments
from fzero.passes import Plan, list_passes, resolve, run_passes
from fzero.passes.roll import roll
from fzero.program.program import Program
from fzero.program.rates import GUESSES, Rates
from fzero.tracing.trace import trace

NEAR = 1.02
"""Of the time of the best combination: how long the one that is found may take."""
MOST_CHOICES, RANKS, WIDTH, LIMITS = 12, 4, 16, 20
OPTIMIZER = fzero.optim.adamw(1e-3)


def block(p: tree.Tree, x: Tensor) -> Tensor:
    h = x @ p["in"]
    return x + functional.gelu(functional.layer_norm(h, h.shape[-1:]) @ p["up"]) @ p["down"]


def train(layers: tree.Tree, state: Any, x: Tensor) -> Any:
    def loss(layers: tree.Tree, x: Tensor) -> Tensor:
        for layer in layers:
            x = block(layer, x)
        return x.square().mean()

    value, grads = fzero.value_and_grad(loss)(layers, x)
    updates, state = OPTIMIZER.update(grads, state, layers)
    return fzero.optim.apply_updates(layers, updates), state, value


def train_in_parts(layers: tree.Tree, state: Any, x: Tensor) -> Any:
    def sums(layers: tree.Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in layers:
            x = block(layer, x)
        return x.square().sum(), torch.tensor(float(x.shape[0]))

    value, grads = fzero.accumulate(sums, 2)(layers, x)
    updates, state = OPTIMIZER.update(grads, state, layers)
    return fzero.optim.apply_updates(layers, updates), state, value


def write(traced: Program, plan: Plan) -> Program:
    """What `fzero.budget.programs.Builder` does, with nothing shared."""
    return replace(run_passes(resolve(roll(mark_trace(traced.copy(), plan))), list_passes(plan)), plan=plan)


def make_space(
    inner: list[int], rows: int, rates: Rates, to: Placement | None = None, step: Callable[..., Any] = train
) -> Space:
    """The programs of a step with a layer for each inner width, whose state may lie in `to`."""
    mesh = fzero.VirtualMesh(fsdp=RANKS)
    layers = [
        {"in": torch.zeros(WIDTH, n), "up": torch.zeros(n, 3 * n), "down": torch.zeros(3 * n, WIDTH)} for n in inner
    ]
    params = fzero.partition(layers, mesh)
    traced = trace(step, (params, OPTIMIZER.init(params), torch.zeros(rows, WIDTH)), mesh)
    traced = replace(traced, measured=rates)
    return Space(traced, partial(write, traced), Plan(to=to))


def best(points: list[Point], limit: int) -> float:
    return min((point.seconds for point in points if point.peak <= limit), default=float("inf"))


@given(
    inner=st.lists(st.sampled_from([8, 16, 24, 40, 64]), min_size=2, max_size=6),
    rows=st.sampled_from([8, 64, 512]),
    compute=st.sampled_from([1, 10, 1000]),
    wire=st.sampled_from([0.1, 1, 10]),
)
@settings(max_examples=12)
def test_a_search_is_near_exhaustive_search(inner: list[int], rows: int, compute: float, wire: float) -> None:
    guess = GUESSES["cuda"]
    rates = guess._replace(flops=guess.flops / compute, memory=guess.memory / compute, wire=guess.wire * wire)
    space = make_space(inner, rows, rates)
    line, count = [place.nbytes for place in space.outline.line], len(space.choices)
    assert count <= MOST_CHOICES
    every = find_frontier(line, space.choices, most_combinations=1 << 21)
    fastest = space.outline.timeline.seconds - space.start.seconds
    least, most = every[0].peak, every[-1].peak
    for limit in (least + (most - least) * i // LIMITS for i in range(LIMITS + 1)):
        assert fastest + best(space.frontier, limit) <= NEAR * (fastest + best(every, limit))


@given(
    inner=st.lists(st.sampled_from([8, 16, 24, 40, 64]), min_size=2, max_size=4),
    rows=st.sampled_from([8, 64, 512]),
    link=st.sampled_from([0.01, 0.1, 1]),
    launch=st.sampled_from([0.01, 1]),
)
@settings(max_examples=4)
def test_a_search_of_placements_is_near_exhaustive_search(
    inner: list[int], rows: int, link: float, launch: float
) -> None:
    """Of state elsewhere too: each layer's optimizer state, and its parameters."""
    guess = GUESSES["cuda"]
    rates = guess._replace(link=guess.link * link, host=guess.host * link, launch=guess.launch * launch)
    space = make_space(inner, rows, rates, fzero.host())
    line = [place.nbytes for place in space.outline.line]
    segments = list_segment_choices(find_segments(space.traced, rates), space.outline)  # none on the host
    choices = [choice for choice, _ in (*space.buckets, *segments, *space.placements)]
    every, found = (find_frontier(line, choices, most_combinations=most) for most in (1 << 22, 0))
    assert len(space.placements) == len(inner) and len(choices) <= MOST_CHOICES
    fastest = space.outline.timeline.seconds - space.start.seconds
    least, most = every[0].peak, every[-1].peak
    for limit in (least + (most - least) * i // LIMITS for i in range(LIMITS + 1)):
        assert fastest + best(found, limit) <= NEAR * (fastest + best(every, limit))


@given(
    inner=st.lists(st.sampled_from([8, 24, 64]), min_size=2, max_size=4),
    rows=st.sampled_from([8, 64, 512]),
    compute=st.sampled_from([1, 100]),
    step=st.sampled_from([train, train_in_parts]),
)
@settings(max_examples=3)
def test_more_memory_never_takes_more_time(inner: list[int], rows: int, compute: float, step: Any) -> None:
    """By the timelines of finished programs, where collectives start ahead."""
    guess = GUESSES["cuda"]
    rates = guess._replace(flops=guess.flops / compute, memory=guess.memory / compute)
    space = make_space(inner, rows, rates, step=step)
    before = float("inf")
    for limit in [point.peak for point in space.frontier][:: max(1, len(space.frontier) // LIMITS)]:
        found = space.find(limit)
        if found is not None:
            seconds = found.program.timeline().seconds
            assert found.program.memory().peak <= limit and seconds <= before
            before = seconds


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=8),
    line=st.lists(st.integers(0, 20), min_size=10, max_size=10),
)
def test_a_frontier_trades_bytes_for_seconds(sizes: list[tuple[int, int, int]], line: list[int]) -> None:
    """Along a frontier bytes grow and seconds shrink, its points are what they say, and no combination is left out."""
    choices = [
        Choice(str(i), (Option(float(seconds), ()), Option(0.0, (Lifetime(start, min(start + nbytes, 10), nbytes),))))
        for i, (nbytes, start, seconds) in enumerate(sizes)
    ]

    def weigh(picks: tuple[int, ...]) -> tuple[int, float]:
        chosen = [choice.options[pick] for choice, pick in zip(choices, picks)]
        spans = [span for option in chosen for span in option.spans]
        alive = [x + sum(s.nbytes for s in spans if s.start <= i < s.stop) for i, x in enumerate(line)]
        return max(alive), sum(option.seconds for option in chosen)

    every = [weigh(picks) for picks in product((0, 1), repeat=len(choices))]
    for most in (0, 4096):
        points = find_frontier(line, choices, most_combinations=most)
        assert all(weigh(point.picks) == (point.peak, point.seconds) for point in points)
        if most:
            assert all(best(points, peak) <= seconds for peak, seconds in every)
        assert all(a.peak < b.peak and a.seconds > b.seconds for a, b in pairwise(points))
        assert points[-1].seconds == 0
