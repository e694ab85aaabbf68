"""PowerSGD where gradients are zeros, or not finite, for some steps: it goes on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import passes, tree
from fzero.variants.power_sgd import power_sgd

pytestmark = pytest.mark.usefixtures("shared_traces")

MESH = fzero.VirtualMesh(fsdp=2)


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return ((x @ params["w"]).tanh() @ params["head"] - x.sum(1, keepdim=True)).square().mean()


def make(fn: Any, rank: int) -> Any:
    chosen = passes.insert(passes.defaults(stage=3), partial(power_sgd, rank=rank), before="bucket")
    return fzero.simulate(fn, MESH, passes=chosen)


def step(params: Any, x: Tensor) -> Any:
    return tree.map(lambda p, g: p - 0.1 * g, params, fzero.grad(loss_fn)(params, x))


def draw() -> tuple[Any, Tensor]:
    """Parameters whose head begins as zeros, so that no gradient gets past the head, and a batch."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(24, 24, generator=generator) / 5
    return {"w": first, "head": torch.zeros(24, 6)}, torch.randn(8, 24, generator=generator)


def test_a_gradient_that_begins_as_zeros_is_sent_later() -> None:
    simulated, (whole, x) = make(step, 2), draw()
    params, exact = fzero.partition(whole, MESH), whole
    state = simulated.init_pass_state(params, x)
    for _ in range(20):
        params, state = simulated(params, x, pass_state=state)
        exact = step(exact, x)
    moved, wanted = fzero.unpartition(params)["w"] - whole["w"], exact["w"] - whole["w"]
    assert 0 < (moved - wanted).norm() < 0.3 * wanted.norm()


def test_an_overflow_stops_nothing() -> None:
    simulated, (whole, x) = make(fzero.grad(loss_fn), 2), draw()
    params = fzero.partition(whole | {"head": torch.ones(24, 6)}, MESH)
    state = simulated.init_pass_state(params, x)
    for given in (x, torch.full_like(x, torch.inf), x, x):
        grads, state = simulated(params, given, pass_state=state)
        found = fzero.unpartition(grads)
        assert all(g.isfinite().all() == (given is x) and g.any() for g in found.values())


def test_a_direction_that_meets_zeros_moves_on() -> None:
    """First a gradient of row and column 0 alone, then one of the last row and column alone."""
    simulated, sent = make(fzero.grad(lambda p, x: (p["w"] * x.mean(0)).sum()), 1), []
    params, batches = fzero.partition({"w": torch.zeros(8, 8)}, MESH), torch.eye(8).diag_embed().expand(2, 8, 8, 8)
    state = simulated.init_pass_state(params, batches[:, 0])
    for at in (0, *[7] * 12):
        grads, state = simulated(params, batches[:, at], pass_state=state)
        sent.append(fzero.unpartition(grads)["w"][at, at].item())
    assert sent[0] == pytest.approx(1.0) and sum(sent[1:]) > 6
