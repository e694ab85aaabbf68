"""`shard(..., memory=, to=)` and `simulate(..., memory=, to=)`: state lies where the budget has it, and results are
those of state on the device."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peaks import Peaks
from processes import run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import optim, tree
from fzero.base.errors import FzeroError
from fzero.program.program import Program
from fzero.program.rates import GUESSES, Rates

HOST, WIDTH, ROWS = fzero.host(), 16, 16
ADAMW = optim.adamw(1e-2)
CLIPPED = optim.chain(optim.clip_by_global_norm(0.1), ADAMW)
SLACK = 1.03
"""How much slower, by the timeline, a step with more memory may be: the search knows seconds to a few percent."""


def make_params(dtype: torch.dtype = torch.float32) -> tree.Tree:
    draw = torch.Generator().manual_seed(0)
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    blocks = [{name: torch.randn(shape, generator=draw) / WIDTH for name, shape in shapes.items()} for _ in "ab"]
    return tree.map(lambda x: x.to(dtype), {"blocks": blocks, "head": torch.randn(WIDTH, 3 * WIDTH, generator=draw)})


def make_batch(ranks: int, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Tensor:
    return torch.randn(rows * ranks, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def block(x: Tensor, p: tree.Tree) -> Tensor:
    return x + torch.tanh(x @ p["up"]) @ p["down"]


def unroll(p: tree.Tree, x: Tensor) -> Tensor:
    for layer in p["blocks"]:
        x = block(x, layer)
    return (x @ p["head"]).logsumexp(-1).mean()


def scan(p: tree.Tree, x: Tensor) -> Tensor:
    x, _ = fzero.scan(lambda x, _, layer: (block(x, layer), None), x, layers=p["blocks"])
    return (x @ p["head"]).logsumexp(-1).mean()


def train(optimizer: Any, loss: Callable[..., Tensor], params: tree.Tree, state: Any, x: Tensor) -> Any:
    value, grads = fzero.value_and_grad(loss)(params, x)
    updates, state = optimizer.update(grads, state, params)
    return optim.apply_updates(params, updates), state, value


class Case:
    """A training step on virtual ranks, and where its state is given."""

    def __init__(
        self, optimizer: Any = ADAMW, loss: Any = unroll, dtype: torch.dtype = torch.float32, rows: int = ROWS
    ) -> None:
        self.optimizer, self.dtype, self.mesh = optimizer, dtype, fzero.VirtualMesh(fsdp=2)
        self.step = partial(train, optimizer, loss)
        self.x = make_batch(2, dtype, rows)

    def begin(self, params_to: Any = None, state_to: Any = None) -> tuple[Any, ...]:
        params = fzero.partition(make_params(self.dtype), self.mesh, to=params_to)
        return params, self.optimizer.init(params, to=state_to), self.x

    def simulate(self, rates: Rates | None = None, **how: Any) -> Any:
        step = fzero.simulate(self.step, self.mesh, **how)
        if rates:
            step._pipeline.reschedule(rates)
        return step

    def trace(self, rates: Rates | None = None, **how: Any) -> Program:
        return self.simulate(rates, **how).trace(*self.begin())

    def least(self, rates: Rates | None = None, **how: Any) -> int:
        """The least budget, which the error of one byte names."""
        with pytest.raises(FzeroError) as error:
            self.trace(rates, memory=1, **how)
        return int(re.findall(r"give at least (\d+) bytes", str(error.value))[0])


def whole(results: Any) -> list[Tensor]:
    """All values, the first ones of the state among them."""
    return tree.leaves(fzero.unpartition(results))


def where(program: Program) -> list[Any]:
    return [x.place for x in program.arguments if x.bucket is not None]


@pytest.mark.parametrize(
    ("case", "donate", "given"),
    [
        (Case(), True, (None, None)),
        (Case(CLIPPED, dtype=torch.bfloat16), True, (None, HOST)),
        (Case(optim.lamb(1e-2), scan), False, (HOST, HOST)),
    ],
    ids=["adamw", "clipped bfloat16", "lamb in a loop, arguments kept"],
)
def test_results_are_those_of_stage_3(case: Case, donate: bool, given: Any) -> None:
    """Bit for bit, with state given anywhere. The device holds what is predicted. The second call moves nothing and
    traces nothing."""
    plain = case.simulate(stage=3, donate=donate)
    budget = int(0.75 * plain.trace(*case.begin()).memory().peak)
    first = plain(*case.begin())
    expected = whole(first) + whole(plain(*first[:2], case.x))
    step = case.simulate(memory=budget, to=HOST, donate=donate)
    program = step.trace(*case.begin())
    assert program.memory().peak <= budget and HOST in where(program)
    peaks = Peaks(program)
    first = step(*case.begin(*given), watch=peaks.watch)
    assert peaks.most["device"] <= program.memory().peak <= 1.05 * peaks.most["device"]
    kept = [leaf.place for leaf in tree.leaves(first[:2])]
    got = whole(first) + whole(step(*first[:2], case.x))
    assert [leaf.place for leaf in tree.leaves(first[:2])] == kept and len(step._pipeline._cache) == 1
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


RATES = GUESSES["cuda"]._replace(launch=1e-7)
"""Rates of a device on which small operations are no slower than on the host, as large ones are not."""
SLOW_LINK = RATES._replace(link=1e7, host=1e8)


def test_more_bytes_never_take_more_time() -> None:
    case, before = Case(), float("inf")
    least, most = case.least(RATES, to=HOST), case.trace(stage=2).memory().peak
    for budget in (least, (2 * least + most) // 3, (least + 2 * most) // 3, most):
        program = case.trace(RATES, memory=budget, to=HOST)
        seconds = program.timeline().seconds
        assert program.memory().peak <= budget and seconds <= SLACK * before
        before = min(seconds, before)


def test_what_is_cheapest_is_chosen() -> None:
    """Where the link is slow, state stays, and values are computed again and collectives start late."""
    case = Case(rows=4 * ROWS)
    budget, slow = int(0.8 * case.trace(stage=3).memory().peak), RATES._replace(memory=RATES.memory / 1e3)
    assert HOST not in where(case.trace(SLOW_LINK, memory=budget, to=HOST))
    assert HOST in where(case.trace(slow, memory=budget, to=HOST))


def test_state_without_a_placement_stays_where_it_was_given() -> None:
    case = Case()
    step = case.simulate(memory="1GiB")
    assert where(step.trace(*case.begin(None, HOST))).count(HOST) == 2 * len(tree.leaves(make_params()))
    other = fzero.host(pin=False)
    assert other in where(case.simulate(memory="1GiB", to=HOST).trace(*case.begin(None, other)))


def test_a_budget_that_a_placement_makes_possible_says_so() -> None:
    case = Case()
    least = case.least(to=HOST)
    with pytest.raises(FzeroError, match=re.escape("or give to=fzero.host() too, so that state may lie there; the l")):
        case.trace(memory=least)
    with pytest.raises(FzeroError, match="the least peak of .* more ranks, or smaller batches; the largest"):
        case.trace(memory=least - 1, to=HOST)
    with pytest.raises(FzeroError) as error:
        case.trace(memory=least // 2)
    assert "fzero.host()" not in str(error.value)


def test_a_report_says_where_state_lies_and_what_is_moved() -> None:
    case = Case()
    args = case.begin(None, HOST)
    step = case.simulate(memory=int(0.5 * case.trace(stage=3).memory().peak), to=HOST)
    lines = step.report(*args).remarks
    text = "\n".join(lines)
    assert re.search(r"  has \S+ KiB of state in fzero.host\(pin=True\), \d+\.\d\d ms more", text)
    assert "    optimizer state of 3 of 3 layers: blocks.0 to head" in lines
    assert re.search(r"    parameters of \d of 3 layers: ", text)
    moved = sum(x.local.nbytes for x, place in zip(tree.leaves(args), where(step.trace(*args))) if x.place != place)
    assert f"moves {moved / 2048:.1f} KiB to fzero.host(pin=True), once, in " in lines[-1]
    params, state, _ = step(*args)
    assert not any("moves" in line for line in step.report(params, state, case.x).remarks)
    plenty = case.simulate(memory="1GiB", to=HOST).report(*case.begin()).remarks
    assert "  has no state in fzero.host(pin=True)" in plenty and "moves" not in plenty[-1]


def test_one_value_in_two_arguments_is_moved_for_each(tmp_path: Path) -> None:
    """An average of parameters that begins as the parameters."""
    case, budget = Case(), int(0.7 * Case().trace(stage=3).memory().peak)

    def step(params: tree.Tree, average: tree.Tree, x: Tensor) -> Any:
        value, grads = fzero.value_and_grad(unroll)(params, x)
        average = tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads), average, value

    results = []
    for how in ({"stage": 3}, {"memory": budget, "to": HOST}, {"memory": budget, "to": fzero.disk(tmp_path)}):
        params, _, x = case.begin()
        results.append(whole(fzero.simulate(step, case.mesh, **how)(params, params, x)))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*results, strict=True))


def train_on_a_rank(mesh: DeviceMesh, budget: int) -> tuple[list[str], list[Tensor], list[Any], int]:
    """The lines of the program, the results of two steps on real ranks, where the first arguments lie behind the first
    step, and the number of programs. Rank 1 gives optimizer state on the host."""
    step = fzero.shard(partial(train, ADAMW, unroll), mesh, memory=budget, to=HOST, donate=False)
    params = fzero.partition(make_params(), mesh)
    state = ADAMW.init(params, to=HOST if mesh.get_rank() else None)
    x = make_batch(mesh.size()).chunk(mesh.size())[mesh.get_rank()]
    first = step(params, state, x)
    second = step(*first[:2], x)
    lines = step.trace(*second[:2], x).lines()
    places = [leaf.place for leaf in tree.leaves((params, state))]
    return lines, whole(first) + whole(second), places, len(step._pipeline._cache)


def test_real_ranks_choose_and_move_alike() -> None:
    case = Case()
    budget = int(0.8 * case.trace(stage=3).memory().peak)
    program = case.trace(memory=budget, to=HOST, donate=False)
    plain = case.simulate(stage=3)
    first = plain(*case.begin())
    expected = whole(first) + whole(plain(*first[:2], case.x))
    for lines, got, places, count in run(2, train_on_a_rank, budget):
        assert lines == program.lines() and places == where(program) and HOST in places and count == 1
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"to": HOST}, "to: is fzero.host(pin=True), where a memory budget may put state, and there is none"),
        ({"to": HOST, "stage": 2}, "to: is fzero.host(pin=True), where a memory budget may put state"),
        ({"to": "host", "memory": "1GiB"}, "to: is 'host'"),
    ],
)
def test_bad_options_are_named(how: dict[str, Any], message: str) -> None:
    with pytest.raises(FzeroError, match=re.escape(message)):
        fzero.simulate(lambda: None, 2, **how)
