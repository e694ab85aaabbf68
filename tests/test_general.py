"""General programs: one trace for all lengths, and the program of each length is the one that is traced there."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor, nn
from torch.nn import functional as F

import fzero
from fzero.base import tree
from fzero.base.reachable import walk
from fzero.budget.fit import find_plan
from fzero.general import programs as general
from fzero.general.programs import General
from fzero.passes import defaults, resolve, run_passes
from fzero.passes.run import name_of_pass
from fzero.program.open import Open, Template, find_difference, make_template
from fzero.program.program import Program
from fzero.tracing.trace import trace

WIDTH, VOCABULARY, MESH = 12, 32, fzero.VirtualMesh(fsdp=2)
SGD = fzero.optim.sgd(0.1, momentum=0.9)
Shape = tuple[int, ...]


class Block(nn.Module):
    """Attention with a window, as every second layer of some models has it, and an MLP."""

    def __init__(self, window: int | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.window, self.dropout = window, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (y.view(rows, length, 3, 4).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        place = torch.arange(length)
        mask = place[:, None] >= place
        if self.window is not None and length > self.window:  # another program behind the window
            mask = mask & (place[:, None] - place < self.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.dropout(self.out(y.transpose(1, 2).reshape(rows, length, WIDTH)))


class Model(nn.Module):
    def __init__(self, window: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(None, dropout), Block(window, dropout)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, :-1, :])


def lm_step(model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """`(params, step)` of a language model: next tokens, a mean over all of them."""
    params, apply = fzero.lower(model)

    def loss_of(params: Any, ids: Tensor) -> Tensor:
        logits = apply(params, ids)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / ids[:, 1:].numel()

    def step(params: Any, state: Any, ids: Tensor) -> Any:
        loss, grads = fzero.value_and_grad(loss_of)(params, ids)
        updates, state = SGD.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state, loss

    return params, step


class Traced:
    """A function that counts its traces."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.count = fn, 0

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.fn(*args)


def make(seed: int = 0, **how: Any) -> tuple[Any, Any, Traced]:
    torch.manual_seed(seed)
    params, step = lm_step(Model(**how))
    params = fzero.partition(params, MESH)
    return params, SGD.init(params), Traced(step)


def tokens(shape: Shape) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(sum(shape)))


def program_of(step: Any, *args: Any) -> Program:
    """The program that a call runs."""
    return step._prepare(*reversed(tree.flatten(args)))


def find_general(step: Any) -> General:
    (found,) = step._pipeline._generals._found
    return found


def full(value: Any) -> list[Tensor]:
    return [x.detach() for x in tree.leaves(fzero.unpartition(value))]


SHAPES: tuple[Shape, ...] = ((4, 7), (4, 9), (4, 18), (4, 5), (4, 31), (4, 12))
FEW_SHAPES = SHAPES[:4]
"""Two that are traced, a longer one and a shorter one: for what takes seconds a shape."""


def test_a_program_of_open_sizes_is_the_program_that_is_traced_at_each_size(stage: int = 3) -> None:
    params, state, fn = make()
    step = fzero.simulate(fn, MESH, stage=stage)
    shapes = [(4, 7), (6, 9), (10, 13), (4, 18), (6, 31), (8, 3)]
    wrong = list[str]()
    for shape in shapes:
        got = program_of(step, params, state, tokens(shape))
        if shape in shapes[:2]:
            continue
        found = find_general(step)
        sizes, late = (
            [shape[0] // 2, shape[1]],
            defaults(stage=stage)[len(defaults(stage=stage)) - len(found.schedule.late) :],
        )
        assert name_of_pass(late[0]) == "relieve"
        traced = resolve(trace(fn, (params, state, tokens(shape).chunk(2)[0]), MESH))
        early = replace(run_passes(traced, defaults(stage=stage)[: -len(late)]), plan=step._pipeline.passes)
        opened = Open(found.schedule.symbols, tuple(sizes))
        filled = make_template(replace(found.schedule.early, open=opened)).fill(sizes)
        wrong += [f"{shape}: {difference}" for difference in [find_difference(filled, early)] if difference]
        if found._find_template(sizes).template.reference == tuple(sizes):  # the schedule is that of these sizes
            flat = step.trace(params, state, tokens(shape))
            wrong += [f"{shape}: {difference}" for difference in [find_difference(got, flat)] if difference]
            wrong += [] if got.memory() == flat.memory() and str(got) == str(flat) else [f"{shape}: memory, listing"]
            wrong += [] if got.comm() == flat.comm() and str(got.timeline()) == str(flat.timeline()) else [str(shape)]
    assert not wrong


def test_a_budget_holds_at_each_length_and_few_lengths_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    params, state, fn = make()
    free = fzero.simulate(fn.fn, MESH, donate=False)
    limit = free.trace(params, state, tokens((4, 31))).memory().peak - 5000
    searches = list[Program]()
    monkeypatch.setattr(
        general, "find_plan", lambda traced, budget: searches.append(traced) or find_plan(traced, budget)
    )
    step = fzero.simulate(fn, MESH, donate=False, memory=limit)
    for length in (31, 28, 30, 29, 27, 14, 15, 31, 13, 26):
        expected, got = free(params, state, tokens((4, length))), step(params, state, tokens((4, length)))
        assert all(map(torch.equal, full(got), full(expected))), length
        program = program_of(step, params, state, tokens((4, length)))
        assert program.memory().peak <= limit and "memory: " in "".join(program.remarks)
        assert ("chosen at another size" in program.remarks[0]) == (length not in (31, 14)), length
    assert fn.count == 2 and len(searches) == 1, "the plan of the first length is known"
    with pytest.raises(fzero.FzeroError, match="the least peak of .* is "):
        step(params, state, tokens((4, 400)))


def test_whether_a_length_is_within_a_budget_is_known_from_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    params, state, fn = make()
    peaks = {n: fzero.simulate(fn.fn, MESH).trace(params, state, tokens((4, n))).memory().peak for n in (20, 31)}
    limit = sum(peaks.values()) // 2
    step = fzero.simulate(fn, MESH, memory=limit)
    for length in (12, 15):
        program_of(step, params, state, tokens((4, length)))
    (scheduled, *_), worked_out = find_general(step)._templates, list[str]()
    expected = {n: scheduled.template.fill([n]).memory().peak <= limit for n in range(8, 40)}
    fill = Template.fill
    monkeypatch.setattr(Template, "fill", lambda self, sizes: worked_out.append("") or fill(self, sizes))
    order = random.Random(0).sample(list(expected), len(expected))
    assert {n: scheduled.is_within(limit, [n]) for n in order} == {n: expected[n] for n in order}
    assert set(expected.values()) == {True, False} and len(worked_out) < len(expected) / 2


def test_results_are_those_of_a_step_that_is_traced_at_each_length_and_it_is_traced_twice() -> None:
    params, state, fn = make()
    step = fzero.simulate(fn, MESH, donate=False)
    for shape in SHAPES:
        alone = fzero.simulate(fn.fn, MESH, donate=False)
        expected, got = alone(params, state, tokens(shape)), step(params, state, tokens(shape))
        assert all(map(torch.equal, full(got), full(expected))), shape
    assert fn.count == 2


def test_batches_may_be_parts_of_longer_ones() -> None:
    """`tokens[:, :-1]` and `tokens[:, 1:]`, as in the README: rows of one tensor, which is one longer than they are."""
    torch.manual_seed(0)
    params, apply = fzero.lower(Model())
    sharded = fzero.partition(params, MESH)

    def step(params: Any, ids: Tensor, targets: Tensor) -> Any:
        def loss_of(p: Any) -> Tensor:
            return F.cross_entropy(apply(p, ids).flatten(0, 1), targets[:, 1:].flatten())

        loss, grads = fzero.value_and_grad(loss_of)(params)
        return fzero.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    fn = Traced(step)
    simulated = fzero.simulate(fn, MESH, donate=False)
    given = [tokens((4, length + 1)) for length in (7, 9, 18, 31, 12)]
    batches = [(each[:, :-1], each[:, 1:]) for each in given]
    batches += [(tokens((4, 40))[:, :length], tokens((4, 40))[:, 1 : length + 1]) for length in (8, 13, 21, 30)]
    batches += [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in given]
    for ids, targets in batches:
        expected, got = step(params, ids, targets), simulated(sharded, ids, targets)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(full(got), tree.leaves(expected))), ids.shape
    assert fn.count == 4  # of rows in longer ones, and of dense ones: a shape, and all others


def test_a_branch_by_length_is_a_condition(caplog: pytest.LogCaptureFixture) -> None:
    params, state, fn = make(window=10)
    step = fzero.simulate(fn, MESH, donate=False)
    plain = fzero.unpartition(params)
    with caplog.at_level(logging.DEBUG, "fzero"):
        for shape in (*SHAPES, *((4, length) for length in (10, 11, 24, 8))):
            expected = fn.fn(plain, SGD.init(plain), tokens(shape))
            got = step(params, state, tokens(shape))
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(full(got), tree.leaves(expected))), shape
    asked = [record.message for record in caplog.records if "asked by" in record.message]
    assert any("if self.window is not None and length > self.window" in each for each in asked)
    assert fn.count <= 7  # two of each side, and with open sizes


OPEN: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "linear without bias": lambda x, p: F.linear(x, p["w"]),
    "linear of a view": lambda x, p: F.linear(x[:, 1:], p["w"]),
    "linear of a view, with a bias": lambda x, p: F.linear(x[:, 1:], p["w"], p["w"][0]),
    "@": lambda x, p: x @ p["w"],
    "@ of a view": lambda x, p: x[:, 1:] @ p["w"].T,
    "matmul": lambda x, p: torch.matmul(x, p["w"]),
    "times a vector, as long as the first batch": lambda x, p: torch.stack([y * p["v"] for y in x]),
    "a deviation, which divides by a length less one": lambda x, p: (x @ p["w"]).std(1),
    "a group norm": lambda x, p: F.group_norm((x @ p["w"]).mT, 2),
}


def test_steps_that_are_traced_twice_for_all_lengths() -> None:
    """In front of kernels of products torch 2.11 asks for the values of sizes."""
    torch.manual_seed(0)
    failed, whole = list[str](), {"w": torch.randn(4, 4), "v": torch.randn(4)}
    whole = {name: x.double() for name, x in whole.items()}
    batches = [torch.randn(6, n, 4, dtype=torch.float64) for n in (4, 6, 9, 12)]
    for name, compute in OPEN.items():
        fn = Traced(fzero.value_and_grad(lambda p, x, compute=compute: compute(x, p).pow(4).mean()))
        step, params = fzero.simulate(fn, MESH), fzero.partition(whole, MESH)
        for x in batches:
            loss, grads = step(params, x)
            value, expected = fn.fn(whole, x)
            own = fzero.unpartition(grads)
            same = torch.allclose(loss.mean(), value) and all(torch.allclose(own[k], expected[k]) for k in own)
            failed += [] if same else [f"{name}: {list(x.shape)}"]
        failed += [] if fn.count == 2 else [f"{name}: {fn.count} traces"]
    assert not failed, "\n".join(failed)


def test_sizes_that_meet_a_constant_of_the_model() -> None:
    """Lengths of 1 and 2, of the width of the model, of the number of rows; rows of one example."""
    params, state, fn = make()
    step, plain = fzero.simulate(fn, MESH, donate=False), fzero.unpartition(params)
    shapes = [(4, WIDTH), (4, 4), (4, 2), (2, 3), (4, 3), (8, 8), (24, 24), (2, 12), (6, 6)]
    for shape in shapes:
        expected = fn.fn(plain, SGD.init(plain), tokens(shape))
        got = step(params, state, tokens(shape))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(full(got), tree.leaves(expected))), shape


def test_draws_have_the_numbers_that_they_have_in_a_trace_of_their_length() -> None:
    params, state, fn = make(dropout=0.5)
    step, losses = fzero.simulate(fn, MESH, donate=False), list[list[Tensor]]()
    for shape in SHAPES[:4]:
        for each in (step, fzero.simulate(fn.fn, MESH, donate=False)):
            torch.manual_seed(3)
            losses.append(full(each(params, state, tokens(shape))))
    assert all(torch.equal(a, b) for ours, theirs in zip(losses[::2], losses[1::2]) for a, b in zip(ours, theirs))
    assert fn.count == 2


STEPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "divides by a length": lambda w, x: (x @ w).sum() / x.shape[1],
    "a power of a length": lambda w, x: (x @ w).sum() * x.shape[1] ** -0.5,
    "a number in a list": lambda w, x: (x @ w).sum() + torch.tensor([x.shape[1], 2.0]).sum(),
    "an even length": lambda w, x: (x @ w).sum() * (2 if x.shape[1] % 2 == 0 else 3),
    "a length as text": lambda w, x: (x @ w).sum() * len(str(x.shape[1])),
    "a set of lengths": lambda w, x: (x @ w).sum() * (2 if x.shape[1] in {5, 9} else 3),
    "a loop": lambda w, x: sum(((x[:, i] @ w).sum() * i for i in range(x.shape[1])), torch.zeros(())),
    "a rounded length": lambda w, x: F.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4)).amax(1).matmul(w).sum(),
    "the longer one": lambda w, x: (x.new_ones(max(x.shape[1], 8), WIDTH) @ w).sum() * x.sum(),
    "two parts": lambda w, x: (x[:, : x.shape[1] // 2] @ w).sum() - (x[:, x.shape[1] // 2 :] @ w).prod(),
    "split": lambda w, x: sum((part.amax() * i for i, part in enumerate((x @ w).split(4, 1))), torch.zeros(())),
    "circular": lambda w, x: (F.pad(x.transpose(1, 2), (2, 1), mode="circular").transpose(1, 2) @ w).prod(-1).sum(),
    "unset": lambda w, x: (x.new_empty(x.shape).copy_(x)[:, 1:] @ w).prod(-1).mean(),
    "convolution": lambda w, x: F.conv1d(x.mT, w.unsqueeze(-1).expand(-1, -1, 3), stride=2).square().mean(),
    "two floats": lambda w, x: (x @ w).sum() * (x.shape[1] * 0.1 * 0.3 + 0.7),
    "interpolation": lambda w, x: F.interpolate(x.transpose(1, 2), scale_factor=1.5).transpose(1, 2).matmul(w).mean(),
    "eye": lambda w, x: (torch.eye(x.shape[1], dtype=x.dtype) @ x @ w).square().mean(),
    "masked": lambda w, x: (x @ w).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu()[0, :, None] > 0, 2.0).mean(),
    "sorted": lambda w, x: ((x @ w).sort(1).values[:, x.shape[1] // 3]).sum(),
    "top": lambda w, x: (x @ w).topk(2, 1).values.mean(),
    "cumulative": lambda w, x: (x @ w).cumsum(1).square().mean(),
    "einsum": lambda w, x: torch.einsum("btc,bsc->bts", x @ w, x).softmax(-1).amax(-1).mean(),
    "a batch norm": lambda w, x: F.batch_norm((x @ w).flatten(0, 1), None, None, training=True).square().sum(),
    "same as the rows": lambda w, x: (x @ w).sum() * (2 if x.shape[1] == x.shape[0] else 3),
}  # fmt: skip


def run_lengths(name: str, **options: Any) -> Iterator[str]:
    """Differences of a step of `STEPS` from plain torch, over many shapes: forward, gradients and an update. The step
    is traced with these options of `simulate`."""
    loss_of = STEPS[name]

    def plain(w: Tensor, x: Tensor) -> Any:
        return w, *torch.func.grad_and_value(loss_of)(w, x)

    def step(w: Any, x: Tensor) -> Any:
        loss, grad = fzero.value_and_grad(loss_of)(w, x)
        return fzero.optim.apply_updates(w, -0.5 * grad), grad, loss

    on_one = fzero.VirtualMesh(fsdp=1)
    w = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sharded, ours = fzero.simulate(step, on_one, donate=False, **options), fzero.partition({"w": w}, on_one)["w"]
    for rows, length in ((3, 5), (3, 9), (3, 8), (3, 16), (4, 6), (5, 5), (3, 3), (4, 11)):
        x = torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
        _, grad, loss = plain(w, x)
        try:
            new, our_grad, our_loss = sharded(ours, x)
        except fzero.FzeroError:
            continue
        got = [*full(new), *full(our_grad), our_loss.reshape(())]
        for what, a, b in zip(("state", "gradient", "loss"), got, (w - 0.5 * grad, grad, loss)):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-9, atol=1e-12):
                yield f"{name} at {rows} x {length}, {options}: {what}"


def train_on_ranks(mesh: Any, budgets: tuple[int | None, ...]) -> list[tuple[list[float], int]]:
    """For each budget: the losses of a step on rows of this rank, which lie in one batch of all ranks, and how often it
    was traced."""
    found = []
    for memory in budgets:
        torch.manual_seed(0)
        params, fn = lm_step(Model())
        params, fn = fzero.partition(params, mesh), Traced(fn)
        step, state, losses = fzero.shard(fn, mesh, memory=memory), SGD.init(params), list[float]()
        for shape in FEW_SHAPES:
            params, state, loss = step(params, state, tokens(shape).chunk(2)[mesh.get_rank()])
            losses.append(loss.item())
        found.append((losses, fn.count))
    return found


def test_ranks_bind_the_same_sizes_with_a_stage_and_with_a_budget() -> None:
    params, state, fn = make()
    step, expected, peaks = fzero.simulate(fn.fn, MESH, max_programs=1), list[float](), list[int]()
    for shape in FEW_SHAPES:
        peaks.append(step.trace(params, state, tokens(shape)).memory().peak)
        params, state, loss = step(params, state, tokens(shape))
        expected.append(loss.item())
    ranks = run(2, train_on_ranks, (None, max(peaks) - 5000))
    for (first, count), (second, other) in zip(*ranks, strict=True):
        assert count == other == 2
        assert first == second == pytest.approx(expected, rel=1e-6)


def test_a_step_may_reach_a_step_with_open_sizes() -> None:
    """Nothing of the library of its symbols is compared: torch loads modules of that library while a step is traced."""
    params, state, fn = make()
    inner = fzero.simulate(fn, MESH, donate=False)
    for shape in SHAPES[:3]:
        inner(params, state, tokens(shape))
    assert len(inner._pipeline._generals._found) == 1
    modules = {(value if isinstance(value, type) else type(value)).__module__ for _, value in walk("step", inner)}
    assert not [name for name in map(str, modules) if name.startswith(("sympy", "torch.fx.experimental.sym"))]


OPTIONS: tuple[dict[str, Any], ...] = ({}, {"dynamic": {"x": {0: None, 1: (1, 64)}}})
"""Open from the second shape on, and from the first."""
FEW = (
    "a power of a length",
    "an even length",
    "a rounded length",
    "two parts",
    "circular",
    "same as the rows",
    "unset",
)
"""The steps of the suite. `python tests/test_general.py` runs all of them."""


def test_steps_that_compute_with_lengths_are_those_of_plain_torch() -> None:
    assert not [wrong for name in FEW for options in OPTIONS for wrong in run_lengths(name, **options)]


if __name__ == "__main__":
    found = {name: [wrong for options in OPTIONS for wrong in run_lengths(name, **options)] for name in STEPS}
    print(*(f"{name}: {', '.join(wrong) or 'equal'}" for name, wrong in found.items()), sep="\n")
    sys.exit(any(found.values()))


def test_a_number_around_the_step_that_changes_costs_two_traces_however_often(caplog: pytest.LogCaptureFixture) -> None:
    factor = [1.0]
    step = fzero.simulate(lambda x: x * factor[0], 2)
    with caplog.at_level("INFO", "fzero"):
        for factor[0] in map(float, range(6)):
            for rows in (8, 12, 16, 20):
                assert torch.equal(step(x := torch.ones(rows, 3)), x * factor[0])
    assert sum("is traced with open sizes" in message for message in caplog.messages) == 6
