"""Ranks whose batches have other sizes: each trains on its own, as in plain torch, by one schedule."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Case, Outcome, run, run_cases, values
from test_general import Traced
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy, embedding, rms_norm

import fzero

WORDS, WIDTH, MOST = 11, 6, 40
Call = tuple[int, int]
"""The sequences of a rank's batch, and their length."""
LENGTHS: list[list[Call]] = [
    [(2, 5), (2, 9)],
    [(2, 7), (2, 3)],
    [(4, 12), (6, 12)],
    [(2, 9), (2, 9)],
    [(2, 4), (2, 8)],
    [(2, 6), (1, 4)],
    [(2, 31), (2, 2)],
]
"""The batches of two ranks in each step."""
FOUR_ROWS = [[(4, 5), (4, 9)], [(4, 7), (6, 3)], [(4, 9), (4, 9)], [(8, 4), (4, 4)]]


def make_params() -> Any:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2

    layers = [{"in": draw(WIDTH, 2 * WIDTH), "out": draw(2 * WIDTH, WIDTH)} for _ in range(2)]
    return {"words": draw(WORDS, WIDTH), "places": draw(MOST, WIDTH), "layers": layers}


def make_batch(call: Call, seed: int) -> Tensor:
    sequences, length = call
    return torch.randint(WORDS, (sequences, length + 1), generator=torch.Generator().manual_seed(seed))


def compute_loss(params: Any, tokens: Tensor) -> Tensor:
    """The loss of a language model on the words above 3. By their number a term shrinks that no word is part of."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    h = embedding(inputs, params["words"]) + params["places"][: inputs.shape[1]]
    for layer in params["layers"]:
        means = h.cumsum(1) / torch.arange(1, inputs.shape[1] + 1, dtype=h.dtype)[:, None]
        h = h + torch.tanh(rms_norm(means, (WIDTH,)) @ layer["in"]) @ layer["out"]
    known = targets > 3
    size = sum(x.square().sum() for x in fzero.tree.leaves(params["layers"]))
    return cross_entropy(h[known] @ params["words"].T, targets[known]) + size / known.sum().item()


def compute_sums(params: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of all words, as a sum and a count."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    h = torch.tanh(embedding(inputs, params["words"]) + params["places"][: inputs.shape[1]])
    for layer in params["layers"]:
        h = h + torch.tanh(h @ layer["in"]) @ layer["out"]
    losses = cross_entropy((h @ params["words"].T).flatten(0, 1), targets.flatten(), reduction="sum")
    return losses, torch.tensor(1.0, dtype=h.dtype) * targets.shape[0] * targets.shape[1]


def accumulate(params: Any, tokens: Tensor) -> Any:
    loss, grads = fzero.accumulate(compute_sums, 2)(params, tokens)
    return fzero.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def update(params: Any, tokens: Tensor) -> Any:
    loss, grads = fzero.value_and_grad(compute_loss)(params, tokens)
    return fzero.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def train(mesh: DeviceMesh, calls: Sequence[Sequence[Call]], how: Any, step: Any = update) -> Any:
    """The losses, the last parameters, and how often the step was traced."""
    traced = Traced(step)
    step, params = fzero.shard(traced, mesh, **how), fzero.partition(make_params(), mesh)
    losses = []
    for i, row in enumerate(calls):
        params, loss = step(params, make_batch(row[mesh.get_rank()], 10 * i + mesh.get_rank()))
        losses.append(float(loss))
    return losses, fzero.unpartition(params), traced.count


def mean_of_losses(params: Any, batches: Sequence[Tensor]) -> Tensor:
    return sum(compute_loss(params, tokens) for tokens in batches) / len(batches)


def mean_of_words(params: Any, batches: Sequence[Tensor]) -> Tensor:
    """The sum of all ranks over the count of all ranks."""
    sums, counts = zip(*(compute_sums(params, tokens) for tokens in batches))
    return sum(sums) / sum(counts)


def check_training(found: Sequence[Any], calls: Sequence[Sequence[Call]], mean: Any) -> None:
    """Hold the losses and parameters of each rank against those of plain torch on one."""
    leaves, treedef = fzero.tree.flatten(make_params())
    losses = []
    for i, row in enumerate(calls):
        given = [x.detach().requires_grad_() for x in leaves]
        batches = [make_batch(call, 10 * i + rank) for rank, call in enumerate(row)]
        loss = mean(fzero.tree.unflatten(treedef, given), batches)
        leaves = [(x - 0.1 * g).detach() for x, g in zip(given, torch.autograd.grad(loss, given))]
        losses.append(float(loss))
    for got, trained in found:
        torch.testing.assert_close(got, losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(fzero.tree.leaves(trained), leaves, rtol=1e-11, atol=1e-11)


def exchange_rows(mesh: DeviceMesh) -> None:
    def step(w: Any, x: Tensor) -> Any:
        return w, (fzero.psum(x * x, "fsdp") @ w).sum()

    w = fzero.partition({"w": torch.ones(3, 3)}, mesh)["w"]
    fzero.shard(step, mesh)(w, torch.ones(2 + mesh.get_rank(), 3))


def scale_by_a_number_of_the_rank(mesh: DeviceMesh) -> None:
    def step(w: Any, x: Tensor, scale: float) -> Any:
        return w, (x @ w).sum() * scale

    w = fzero.partition({"w": torch.ones(3, 3)}, mesh)["w"]
    fzero.shard(step, mesh)(w, torch.ones(2, 3), 1.0 + mesh.get_rank())


def shorten(mesh: DeviceMesh) -> None:
    calls = [(2, 5), (2, 5)], [(2, 5), (2, 9)], [(2, 7), (2, 7)], [(2, 1), (2, 1)], [(2, 1), (2, 4)]
    train(mesh, calls, {})


def branch(mesh: DeviceMesh) -> None:
    def step(w: Any, x: Tensor) -> Any:
        return w, (x @ w).sum() * (2 if x.shape[0] > 2 else 1)

    w = fzero.partition({"w": torch.ones(3, 3)}, mesh)["w"]
    fzero.shard(step, mesh)(w, torch.ones(2 + mesh.get_rank(), 3))


def train_compiled(mesh: DeviceMesh) -> Any:
    return train(mesh, LENGTHS[:4], {"compile": True})[:2]


def accumulate_over_ranks(mesh: DeviceMesh) -> Any:
    return train(mesh, FOUR_ROWS, {"donate": False}, accumulate)[:2]


WAYS: dict[str, Any] = {
    "as it is": {},
    "stage 2": {"stage": 2, "donate": False, "dynamic": {"args.1": {1: None}}},
    "a budget": {"memory": "1MiB"},
}
ERRORS = {
    exchange_rows: r"argument 1: ranks are about to run different steps.*ranks exchange values whose shapes differ",
    scale_by_a_number_of_the_rank: "ranks are about to run different steps",
    branch: r"Batches may have other sizes, but not here: .*asked by .*x.shape\[0\] > 2",
    shorten: r"Batches may have other sizes, but not here: .*a trace shows that it is another one",
}
CASES: dict[Any, Case] = {
    **{name: functools.partial(train, calls=LENGTHS, how=how) for name, how in WAYS.items()},
    accumulate: accumulate_over_ranks,
    **{case: case for case in ERRORS},
    "compiled": train_compiled,
}


@pytest.fixture(scope="module")
def outcomes() -> Mapping[Any, list[Outcome]]:
    return run_cases(2, CASES, timeout=280.0)


@pytest.mark.parametrize("name", WAYS)
def test_ranks_train_on_batches_of_other_sizes(outcomes: Mapping[Any, list[Outcome]], name: str) -> None:
    found = values(outcomes[name])
    check_training([each[:2] for each in found], LENGTHS, mean_of_losses)
    most = 15 if "dynamic" in WAYS[name] else 9  # of seven calls, which open lengths, and then numbers of sequences
    assert all(count <= most for *_, count in found), [count for *_, count in found]


def test_ranks_train_compiled_on_batches_of_other_sizes(outcomes: Mapping[Any, list[Outcome]]) -> None:
    check_training(values(outcomes["compiled"]), LENGTHS[:4], mean_of_losses)


def test_microbatches_of_other_lengths_weigh_by_their_words(outcomes: Mapping[Any, list[Outcome]]) -> None:
    check_training(values(outcomes[accumulate]), FOUR_ROWS, mean_of_words)


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.__name__)
def test_sizes_that_no_schedule_serves_are_an_error_of_all_ranks(
    outcomes: Mapping[Any, list[Outcome]], case: Case
) -> None:
    for outcome in outcomes[case]:
        assert re.search(ERRORS[case], outcome.error, re.DOTALL), outcome


def train_from_a_folder(mesh: DeviceMesh, folder: str) -> Any:
    calls = [[(4, 6), (4, 6)], [(4, 6), (4, 9)], [(4, 7), (4, 6)], [(4, 6), (4, 6)]]
    return train(mesh, calls, {"cache": folder}, accumulate)[0], train(mesh, calls, {}, accumulate)[0]


def test_a_folder_of_programs_stands_beside_other_sizes(tmp_path: Path) -> None:
    for _ in "ab":
        for stored, traced in run(2, train_from_a_folder, str(tmp_path)):
            torch.testing.assert_close(stored, traced, rtol=1e-12, atol=1e-12)
