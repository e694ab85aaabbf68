"""`shard(..., memory=)` and `simulate(..., memory=)`: equal results, peaks within budgets, and what is said of both."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from processes import run
from programs import measure_peak
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.program.program import Program
from fzero.program.rates import GUESSES, Rates

pytestmark = pytest.mark.usefixtures("shared_traces")

WIDTH, LAYERS, STEPS = 16, 3, 4
SLACK = 1.005
"""How much slower, by the timeline, a step with more memory may be: programs of four smaller plans are compared."""
OPTIMIZER = optim.adamw(1e-2)
Block = Callable[[tree.Tree, Tensor], Tensor]


def block(p: tree.Tree, x: Tensor) -> Tensor:
    return x + functional.gelu(functional.layer_norm(x, (WIDTH,)) @ p["up"]) @ p["down"]


def unroll(p: tree.Tree, x: Tensor, block: Block = block) -> Tensor:
    for layer in p["blocks"]:
        x = block(layer, x)
    return (x @ p["head"]).logsumexp(-1).mean()


def scan(p: tree.Tree, x: Tensor) -> Tensor:
    x, _ = fzero.scan(lambda x, _, layer: (block(layer, x), None), x, layers=p["blocks"])
    return (x @ p["head"]).logsumexp(-1).mean()


def train(loss: Callable[..., Tensor], params: tree.Tree, state: Any, x: Tensor) -> Any:
    value, grads = fzero.value_and_grad(loss)(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optim.apply_updates(params, updates), state, value


def accumulate(params: tree.Tree, state: Any, x: Tensor) -> Any:
    def sums(p: tree.Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        return unroll(p, x) * x.shape[0], torch.tensor(float(x.shape[0]))

    value, grads = fzero.accumulate(sums, 2)(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optim.apply_updates(params, updates), state, value


TRAININGS: dict[str, Callable[..., Any]] = {
    "unrolled": partial(train, unroll),
    "dropout": partial(train, partial(unroll, block=lambda p, x: functional.dropout(block(p, x), 0.1))),
    "remat": partial(train, partial(unroll, block=fzero.remat(block))),
    "remat by budget": partial(train, partial(unroll, block=fzero.remat(block, "budget"))),
    "scan": partial(train, scan),
    "microbatches": accumulate,
}


class Case(NamedTuple):
    step: Callable[..., Any]
    mesh: fzero.VirtualMesh
    params: tree.Tree
    x: Tensor

    @property
    def args(self) -> tuple[Any, ...]:
        params = fzero.partition(self.params, self.mesh)
        return params, OPTIMIZER.init(params), self.x

    def trace(self, rates: Rates | None = None, **how: Any) -> Program:
        step = fzero.simulate(self.step, self.mesh, **how)
        if rates:
            step._pipeline.reschedule(rates)
        return step.trace(*self.args)

    def least(self, rates: Rates | None = None) -> int:
        """The least budget, which the error of one byte names."""
        with pytest.raises(FzeroError) as error:
            self.trace(rates, memory=1)
        return int(re.findall(r"give at least (\d+) bytes", str(error.value))[0])


@cache
def least_of(name: str, ranks: int = 2) -> int:
    return case(name, ranks).least()


def case(name: str, ranks: int = 2, rows: int = 64) -> Case:
    draw = torch.Generator().manual_seed(0)
    blocks = [
        {
            "up": torch.randn(WIDTH, 4 * WIDTH, generator=draw) / WIDTH**0.5,
            "down": torch.randn(4 * WIDTH, WIDTH, generator=draw) / WIDTH,
        }
        for _ in range(LAYERS)
    ]
    params = {"blocks": blocks, "head": torch.randn(WIDTH, 5 * WIDTH, generator=draw)}
    x = torch.randn(rows * ranks, WIDTH, generator=draw)
    return Case(TRAININGS[name], fzero.VirtualMesh(fsdp=ranks), params, x)


def list_budgets(least: int, most: int, steps: int = STEPS) -> list[int]:
    return [least + (most - least) * i // (steps - 1) for i in range(steps)]


def whole(results: Any) -> list[Tensor]:
    params, _, loss = results
    return [*tree.leaves(fzero.unpartition(params)), loss]


@pytest.mark.parametrize("name", TRAININGS)
def test_from_the_least_to_the_most(name: str, rates: Rates = GUESSES["cuda"]) -> None:
    """The peak is within the budget, and more bytes never take more time."""
    given = case(name)
    plain = given.trace(rates, stage=3)
    least, before = given.least(rates), float("inf")
    for budget in list_budgets(least, max(plain.memory().peak, given.trace(rates, stage=2).memory().peak)):
        program = given.trace(rates, memory=budget)
        seconds = program.timeline().seconds
        assert program.memory().peak <= budget
        assert seconds <= SLACK * before
        before = min(seconds, before)
    assert before <= SLACK * plain.timeline().seconds
    assert least < 0.95 * plain.memory().peak or name == "remat"


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in TRAININGS), ("unrolled", 1), ("scan", 1), ("scan", 4)]
)
def test_results_are_equal(name: str, ranks: int) -> None:
    """Bit for bit those of stage 3, also of a second step, at the least budget and in the middle."""
    given = case(name, ranks)
    plain = fzero.simulate(given.step, given.mesh, stage=3)
    most = plain.trace(*given.args).memory().peak
    torch.manual_seed(0)
    first = plain(*given.args)
    expected = whole(first) + whole(plain(*first[:2], given.x))
    for budget in list_budgets(least_of(name, ranks), most, 3)[: 2 if name in ("unrolled", "scan") else 1]:
        step = fzero.simulate(given.step, given.mesh, memory=budget)
        torch.manual_seed(0)
        first = step(*given.args)
        got = whole(first) + whole(step(*first[:2], given.x))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["unrolled", "scan"])
@pytest.mark.parametrize("donate", [True, False])
def test_the_measured_peak_is_the_predicted_one(name: str, donate: bool) -> None:
    given = case(name)
    for budget in list_budgets(least_of(name), given.trace(stage=2).memory().peak, 3):
        try:
            program, most = measure_peak(
                fzero.simulate(given.step, given.mesh, memory=budget, donate=donate), *given.args
            )
        except FzeroError as error:
            assert not donate and "the least peak" in str(error)
        else:
            assert most <= program.memory().peak <= budget
            assert program.memory().peak <= 1.05 * most


def train_on_a_rank(mesh: DeviceMesh, name: str, budget: int) -> tuple[list[str], list[Tensor]]:
    """The lines of the program, and the results of two steps on real ranks."""
    given = case(name, mesh.size())
    step = fzero.shard(given.step, mesh, memory=budget)
    params = fzero.partition(given.params, mesh)
    x = given.x.chunk(mesh.size())[mesh.get_local_rank()]
    lines = step.trace(params, OPTIMIZER.init(params), x).lines()
    params, state, _ = step(params, OPTIMIZER.init(params), x)
    return lines, whole(step(params, state, x))


def test_real_ranks_choose_alike() -> None:
    """Each process hashes names and nodes in its own way."""
    given = case("unrolled")
    budget = list_budgets(least_of("unrolled"), given.trace(stage=3).memory().peak)[1]
    (lines, first), (others, second) = run(2, train_on_a_rank, "unrolled", budget)
    virtual = fzero.simulate(given.step, given.mesh, memory=budget)
    expected = whole(virtual(*virtual(*given.args)[:2], given.x))
    assert lines == others and lines == given.trace(memory=budget).lines()
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, first, second, strict=True))


def test_a_region_by_budget_keeps_everything_where_there_is_no_budget() -> None:
    kept, plain = case("remat by budget"), case("unrolled")
    for stage in (1, 2, 3):
        assert kept.trace(stage=stage).memory() == plain.trace(stage=stage).memory()


def test_a_region_by_budget_is_computed_again_as_a_whole_or_in_part() -> None:
    given = case("remat by budget")
    plain, least = given.trace(stage=3), given.trace(memory=least_of("remat by budget"))
    assert least.memory().peak < plain.memory().peak
    assert [str(node.target) for node in least.graph.nodes].count("aten.gelu.default") == 2 * LAYERS


def test_a_region_by_budget_decides_about_the_regions_inside_it() -> None:
    """The budget computes the values of an inner region again too."""
    outer = fzero.remat(fzero.remat(block), "budget")
    nested = case("remat by budget")._replace(step=partial(train, partial(unroll, block=outer)))
    least = nested.least()
    assert least == case("remat by budget").least()
    plain, step = (fzero.simulate(nested.step, nested.mesh, **how) for how in ({"stage": 3}, {"memory": least}))
    for a, b in zip(whole(plain(*nested.args)), whole(step(*nested.args)), strict=True):
        assert torch.equal(a, b)


def test_a_report_says_what_was_chosen_and_what_more_would_buy() -> None:
    given, least = case("unrolled"), least_of("unrolled")
    report = fzero.simulate(given.step, given.mesh, memory=least).report(*given.args)
    lines = "\n".join(report.remarks)
    assert report.peak <= least and lines in str(report).replace("\n  ", "\n")
    assert re.search(r"memory: \S+ KiB of \S+ KiB", lines)
    assert re.search(r"keeps \d of \d buckets gathered: gathering the others again costs \d+\.\d\d ms", lines)
    assert re.search(r"computes saved values of 3 of \d segments again: \S+ KiB less, \d+\.\d\d ms more", lines)
    assert re.search(r"1 GiB more would save \d+\.\d\d ms", lines)
    plain = fzero.simulate(given.step, given.mesh, memory="1GiB").report(*given.args)
    assert len(plain.remarks) == 3 and "again: 0 B less, 0.00 ms more" in plain.remarks[-1]


def test_a_budget_below_the_least_names_the_largest_values() -> None:
    given = case("unrolled", rows=512)
    with pytest.raises(FzeroError) as error:
        given.trace(memory="40KiB")
    text = str(error.value)
    assert "memory: is 40.0 KiB, and the least peak of partial is " in text
    values = text.split("the largest values there: ")[1].split("; ")
    assert len(values) == 5 and "gelu" in text and "test_fit.py" in values[0]
    sizes = [float(re.findall(r"([\d.]+) KiB of", value)[0]) for value in values]
    assert sizes == sorted(sizes, reverse=True)
    least = given.least()
    given.trace(memory=least)
    with pytest.raises(FzeroError, match="the least peak"):
        given.trace(memory=least - 1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"memory": 0}, "memory: is 0"),
        ({"memory": "4 parsecs"}, "memory: is '4 parsecs'"),
        ({"memory": "1GiB", "stage": 2}, "stage is given too"),
        ({"memory": "1GiB", "passes": ()}, "passes is given too"),
    ],
)
def test_bad_options_are_named(how: dict[str, Any], message: str) -> None:
    with pytest.raises(FzeroError, match=re.escape(message)):
        fzero.simulate(lambda: None, 2, **how)
