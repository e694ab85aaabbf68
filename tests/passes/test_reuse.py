"""The reuse pass: a cross entropy works in the memory of its logits, with the bits of torch's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs import EVERY_STEP, MESH, Case, assert_same, calls, names, on_rows, tried
from torch import Tensor
from torch.nn.functional import cross_entropy, nll_loss

import fzero
from fzero import passes, value_and_grad
from fzero.base.mesh import VirtualMesh
from fzero.passes import reuse
from fzero.program import ops
from fzero.program.ops import losses
from fzero.program.program import Program

WIDTH, TOKENS, CLASSES = 5, 40, 77
"""A rank has `TOKENS` tokens, which the cross entropy takes in pieces of 16. Rows of 77 classes are not aligned."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.PIECE, "cpu", 1)


def labels(x: Tensor) -> Tensor:
    """The label of each row of a batch: some are -100, which a loss ignores."""
    found = (x.sum(1).abs() * 1000).long() % CLASSES
    return torch.where(found % 5 == 0, -100, found)


def classify(loss: Callable[[Tensor, Tensor], Tensor], mesh: VirtualMesh = MESH, dtype: Any = torch.float32) -> Case:
    """The loss of the logits of `TOKENS` tokens a rank, and the gradient of the head."""
    draw = torch.Generator().manual_seed(0)
    params = {"head": torch.randn(CLASSES, WIDTH, generator=draw)}
    rows = torch.randn(TOKENS * mesh.size(), WIDTH, generator=draw)

    def of_batch(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss((x @ params["head"].t()).to(dtype), y)

    return Case(value_and_grad(of_batch), mesh, (fzero.partition(params, mesh), rows, labels(rows)))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": cross_entropy,
    "sum": lambda x, y: cross_entropy(x, y, reduction="sum"),
    "none": lambda x, y: (cross_entropy(x, y, reduction="none") * torch.arange(len(y))).sum(),
    "another label": lambda x, y: cross_entropy(x, y.clamp(min=0), ignore_index=3),
    "weights": lambda x, y: cross_entropy(x, y, weight=(torch.arange(CLASSES) / 7).to(x.dtype)),
    "capped": lambda x, y: cross_entropy(torch.tanh(x / 3) * 3, y),
    "nan": lambda x, y: cross_entropy(x / (x[:, :1] * 0), y),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_bits_are_those_of_torchs_kernels(name: str, dtype: torch.dtype, world: int) -> None:
    case = classify(LOSSES[name], VirtualMesh(fsdp=world), dtype)
    program = case.trace()
    result = reuse(program)
    assert len(calls(result, ops.log_softmax_)) == len(calls(result, ops.nll_gradient_)) == 1
    assert not {"_log_softmax", "nll_loss_backward", "_log_softmax_backward_data"} & set(names(result))
    for got, expected in zip(case.run(result), case.run(program)):
        for x, y in zip(got, expected, strict=True):
            assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))


@pytest.mark.parametrize(("name", "world"), EVERY_STEP)
def test_other_steps_are_as_they_were(name: str, world: int) -> None:
    case, program, before = tried(name, world)
    assert_same(case.run(reuse(program)), before)


def test_one_tensor_of_the_logits_size_is_alive_instead_of_three() -> None:
    program = classify(cross_entropy).trace()
    logits = TOKENS * CLASSES * 4
    beside = [each.memory().peak - each.memory().timeline[0] for each in (program, reuse(program))]
    assert beside[0] >= 3 * logits
    assert beside[1] < 2 * logits + 2 * 16 * CLASSES * 4


def _penalize(softmax: Tensor, y: Tensor) -> Tensor:
    return nll_loss(softmax, y) + softmax.square().mean()


KEPT: dict[str, tuple[Callable[[Tensor, Tensor], Any], int, int]] = {
    "another softmax": (lambda x, y: cross_entropy(x, y) + x.log_softmax(-1).square().mean(), 1, 1),
    "log-softmax again": (lambda x, y: _penalize(x.log_softmax(-1), y), 1, 0),
    "logits again": (lambda x, y: cross_entropy(x, y) + x.square().mean(), 0, 1),
    "smoothed labels": (lambda x, y: cross_entropy(x, y, label_smoothing=0.1), 1, 0),
    "another dimension": (lambda x, y: cross_entropy(x.t(), y[:CLASSES].clamp(0, 9)[:1].expand(CLASSES)), 0, 0),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_read_later_is_not_overwritten(name: str) -> None:
    loss, softmaxes, gradients = KEPT[name]
    case = classify(loss)
    program = case.trace()
    result = reuse(program)
    assert len(calls(result, ops.log_softmax_)) >= softmaxes
    assert len(calls(result, ops.nll_gradient_)) == gradients
    assert_same(case.run(result), case.run(program))


def test_results_and_batches_are_not_overwritten() -> None:
    def step(params: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ params["w"]
        return logits, logits.log_softmax(1), x.log_softmax(1)

    case = on_rows(step, {"w": torch.randn(5, 5, generator=torch.Generator().manual_seed(0))})
    program = case.trace()
    assert not calls(reuse(program), ops.log_softmax_)
    assert_same(case.run(reuse(program)), case.run(program))


def train(stage: int, **how: Any) -> tuple[Program, Any]:
    """The program and the result of two steps of training on virtual ranks."""
    draw = torch.Generator().manual_seed(0)
    params = {"up": torch.randn(WIDTH, 8, generator=draw), "head": torch.randn(CLASSES, 8, generator=draw)}
    optimizer = fzero.optim.adamw(1e-2)

    def loss_fn(params: Any, batch: Any, reduction: str = "mean") -> Tensor:
        logits = torch.tanh(batch["x"] @ params["up"]) @ params["head"].t()
        return cross_entropy(logits, batch["y"], reduction=reduction)

    def sums(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return loss_fn(params, batch, "sum"), (batch["y"] != -100).sum()

    differentiate = fzero.accumulate(sums, 2) if how.get("loop") else value_and_grad(loss_fn)

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = differentiate(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return fzero.optim.apply_updates(params, updates), state, loss

    held = fzero.partition(params, MESH)
    rows = torch.randn(4 * TOKENS, WIDTH, generator=draw)
    args = held, optimizer.init(held), {"x": rows, "y": labels(rows)}
    chosen = passes.defaults(stage=stage)
    if how.get("without"):
        chosen = tuple(each for each in chosen if each is not reuse)
    step = fzero.simulate(train_step, MESH, passes=chosen)
    program = step.trace(*args)
    for _ in range(2):
        params, state, loss = step(*args)
        args = params, state, args[2]
    return program, (fzero.unpartition(args[0]), loss)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("loop", [False, True])
def test_training_has_the_same_bits(stage: int, loop: bool) -> None:
    (program, got), (_, expected) = train(stage, loop=loop), train(stage, loop=loop, without=True)
    assert len(program.find(ops.nll_gradient_)) == len(program.find(ops.log_softmax_)) == 1
    assert all(map(torch.equal, *map(fzero.tree.leaves, (got, expected))))


def test_rows_are_whole_pieces_of_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.PIECE, "cpu", 512 << 10)
    assert losses.count_rows(torch.empty(512, 2048, device="cpu")) == 64
    assert losses.count_rows(torch.empty(512, 50257)) == 16
    assert losses.count_rows(torch.empty(8192, 128000, device="meta")) == 512
    assert losses.count_rows(torch.empty(64, 1000, device="meta")) == 2096
