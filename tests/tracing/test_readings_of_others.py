"""Readings in code that was not written around them: how often such steps are traced, and what they compute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import fzero

Batch = dict[str, Tensor]
ROWS = (6, 6, 10, 14, 8, 16, 12)
"""Of the calls of a step. Programs of open sizes are there from the third on."""


def flattened(h: Tensor, b: Batch) -> Tensor:
    labels = b["y"][:, 1:].reshape(-1)
    return h[:, :-1].reshape(-1, 3)[labels != -100].square().mean()


def counted(h: Tensor, b: Batch) -> Tensor:
    places = torch.arange(b["n"].shape[0])
    return h[places < 3 * b["n"]].square().mean()


def marked(h: Tensor, b: Batch) -> Tensor:
    mask = torch.zeros(b["n"].shape[0], dtype=torch.bool)
    mask[b["n"] > 1] = True
    return h[mask].exp().mean()


def padded(h: Tensor, b: Batch) -> Tensor:
    mask = torch.cat([b["y"] > 0, torch.ones(b["y"].shape[0], 1, dtype=torch.bool)], 1)
    return pad(h, (0, 0, 0, 1))[mask].exp().mean()


def halves(h: Tensor, b: Batch) -> Tensor:
    rows = b["n"].shape[0] // 2  # a reading of other sizes finds something here, and something else
    return h[:rows][b["n"][:rows] > 1].square().mean()


def selected(h: Tensor, b: Batch) -> Tensor:
    return h.masked_select(b["y"].unsqueeze(-1) > 0).square().mean() + torch.masked_select(h[..., 0], b["y"] < 0).sum()


def make_batch(rows: int, draws: torch.Generator) -> Batch:
    y = torch.randint(0, 3, (rows, 4), generator=draws)
    y[torch.rand(y.shape, generator=draws) < 0.4] = -100
    return {
        "x": torch.randn(rows, 4, 5, generator=draws, dtype=torch.float64),
        "y": y,
        "n": torch.randint(1, 4, (rows,), generator=draws),
    }


@pytest.mark.parametrize("loss", [flattened, counted, marked, padded, halves, selected])
def test_sizes_and_rows_that_change_at_each_call_have_one_program(
    loss: Callable[[Tensor, Batch], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    def step(w: Any, b: Batch) -> Any:
        value, gradient = fzero.value_and_grad(lambda w: loss(torch.tanh(b["x"] @ w), b))(w)
        return w - 0.1 * gradient, value

    draws = torch.Generator().manual_seed(0)
    w = torch.randn(5, 3, generator=draws, dtype=torch.float64)
    simulated = fzero.simulate(step, 1)
    state = fzero.partition({"w": w}, simulated.mesh)["w"]
    for number, rows in enumerate(ROWS):
        batch = make_batch(rows, draws)
        caplog.clear()
        with caplog.at_level(logging.INFO, "fzero"):
            state, found = simulated(state, batch)
        w, expected = step(w, batch)
        assert torch.equal(found.reshape(()), expected) and torch.equal(fzero.unpartition({"w": state})["w"], w), rows
        is_traced = any("is traced" in x.message for x in caplog.records)
        assert number < 3 or not is_traced or (loss is halves and number == 3), rows


class Chooser(torch.nn.Module):
    """Trains what a mask among its buffers chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 6, dtype=torch.float64)
        self.register_buffer("chosen", torch.tensor([True, False, True, True, False, True]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, self.chosen].square().mean() + self.layer(x)[:, self.chosen].sum()


def test_a_mask_that_is_captured_is_read_as_it_is_at_each_call() -> None:
    module = Chooser()
    params, apply = fzero.lower(module)

    def step(p: Any, x: Tensor) -> Any:
        value, gradient = fzero.value_and_grad(lambda p: apply(p, x))(p)
        return gradient, value

    simulated = fzero.simulate(step, 1, donate=False)
    state = fzero.partition(params, simulated.mesh)
    for chosen in ("101101", "110001", "010000", "111111"):
        module.chosen.copy_(torch.tensor([each == "1" for each in chosen]))
        x = torch.randn(5, 4, dtype=torch.float64)
        gradient, value = simulated(state, x)
        expected = step(params, x)
        assert torch.equal(value.reshape(()), expected[1]), chosen
        got = fzero.unpartition(gradient)
        assert torch.equal(got["layer"]["weight"], expected[0]["layer"]["weight"]), chosen


def test_a_mask_of_bytes_is_a_mask() -> None:
    def step(w: Any, x: Tensor, mask: Tensor) -> Any:
        value, gradient = fzero.value_and_grad(lambda w: torch.tanh(x @ w)[mask].square().sum())(w)
        return gradient, value

    w = torch.randn(4, 3, dtype=torch.float64)
    simulated = fzero.simulate(step, 1, donate=False)
    state = fzero.partition({"w": w}, simulated.mesh)["w"]
    for mask in ([1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 2]):
        x = torch.randn(4, 4, dtype=torch.float64)
        gradient, value = simulated(state, x, torch.tensor(mask, dtype=torch.uint8))
        expected = step(w, x, torch.tensor(mask) != 0)
        assert torch.equal(value.reshape(()), expected[1])
        assert torch.equal(fzero.unpartition({"w": gradient})["w"], expected[0])
