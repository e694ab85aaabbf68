"""Readings where sizes, or masks, differ between ranks or layers: values without a number, and copied layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run
from test_readings import Batch, cut, make_batch, make_params, train, train_plainly
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import FzeroError

PLACES = torch.tensor([True, False, True, True, False, True, True, False] * 5)
DOUBLE = torch.float64


def find_rows(b: Batch) -> Tensor:
    return b["x"][b["y"] != -100, 0]


def of_ones(p: Any, b: Batch, h: Tensor) -> Tensor:
    return p["w"].square().sum() * torch.ones_like(find_rows(b)).sum()


def of_zeros(p: Any, b: Batch, h: Tensor) -> Tensor:
    return (p["w"].mean() + torch.zeros_like(find_rows(b))).sum()


def of_twos_in_a_loop(p: Any, b: Batch, h: Tensor) -> Tensor:
    rows = find_rows(b)

    def turn(carry: Tensor, x: Tensor) -> Any:
        return carry + x * p["w"].square().sum() * torch.full_like(rows, 2.0).sum(), None

    return fzero.scan(turn, p["w"].sum() * 0, torch.arange(3, dtype=DOUBLE))[0]


def in_a_captured_mask(p: Any, b: Batch, h: Tensor) -> Tensor:
    places = PLACES[: find_rows(b).shape[0]].nonzero()
    return p["w"].mean() * places.to(DOUBLE).sum() + p["w"].square().sum() * places.shape[0]


READ = [of_ones, of_zeros, of_twos_in_a_loop, in_a_captured_mask]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("read", READ, ids=lambda read: read.__name__)
def test_what_is_made_in_the_shape_of_a_batch_differs_with_its_sizes(read: Callable[..., Tensor], ranks: int) -> None:
    mesh = fzero.VirtualMesh(fsdp=ranks)
    expected, params = make_params(), fzero.partition(make_params(), mesh)
    step = fzero.simulate(lambda p, b: train(read, p, b), mesh)
    for i, rows in enumerate([12, 17, 12]):
        batch = make_batch(rows, ranks, i)
        expected, value = train_plainly(read, expected, cut(batch, ranks))
        params, loss = step(params, batch)
        torch.testing.assert_close(loss, value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(fzero.unpartition(params)["w"], expected["w"], rtol=1e-12, atol=1e-12)


def test_ranks_that_read_zeros_of_other_signs_are_refused() -> None:
    def read(p: Any, b: Batch, h: Tensor) -> Tensor:
        zero = (b["x"][0, 0] * 0).item()
        return h.sum() * torch.atan2(torch.tensor(zero), torch.tensor(-1.0))

    mesh, batch = fzero.VirtualMesh(fsdp=2), make_batch(6, 2, 0)
    batch["x"][0], batch["x"][6] = 1, -1
    step = fzero.simulate(lambda p, b: train(read, p, b), mesh)
    with pytest.raises(FzeroError, match="batches of ranks ask for other programs"):
        step(fzero.partition(make_params(), mesh), batch)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5, dtype=DOUBLE)


class ByList(Layer):
    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.linear(h)) + 0.1 * sum(mask.tolist())


class ByRows(Layer):
    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.linear(h)) + h[mask].sum(0)


class ByCount(Layer):
    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.linear(h)) + 0.1 * mask.sum().item()


class Layers(nn.Module):
    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(6))

    def forward(self, h: Tensor, masks: list[Tensor]) -> Tensor:
        for layer, mask in zip(self.layers, masks):
            h = layer(h, mask)
        return h


@pytest.mark.parametrize("order", ["000000", "001100", "012340"])
@pytest.mark.parametrize("layer", [ByList, ByRows, ByCount])
def test_equal_layers_read_their_own_masks(layer: type[Layer], order: str) -> None:
    """The first and the last layer take one mask, and those between them other ones."""
    torch.manual_seed(0)
    module, mesh = Layers(layer), fzero.VirtualMesh(fsdp=1)
    params, apply = fzero.lower(module)

    def compute_loss(call: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
        masks = [y > at for at in range(5)]
        return call(x, [masks[int(at)] for at in order]).square().mean()

    def step(p: Any, x: Tensor, y: Tensor) -> Any:
        return fzero.value_and_grad(lambda p: compute_loss(lambda *args: apply(p, *args), x, y))(p)

    x, y = torch.randn(8, 5, dtype=DOUBLE), torch.tensor([0, 2, 5, 3, 1, 4, 2, 0])
    loss, _ = fzero.simulate(step, mesh)(fzero.partition(params, mesh), x, y)
    torch.testing.assert_close(loss, compute_loss(module, x, y).detach(), rtol=1e-12, atol=1e-12)


def train_by_zeros(mesh: DeviceMesh) -> Any:
    batch = cut(make_batch(12, 2, 0), 2)[mesh.get_rank()]
    params, loss = fzero.shard(lambda p, b: train(of_zeros, p, b), mesh)(fzero.partition(make_params(), mesh), batch)
    return fzero.unpartition(params)["w"], loss


def test_gradients_of_what_is_made_in_the_shape_of_a_batch_are_means_over_ranks() -> None:
    params, value = train_plainly(of_zeros, make_params(), cut(make_batch(12, 2, 0), 2))
    for got, loss in run(2, train_by_zeros):
        torch.testing.assert_close(loss, value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got, params["w"], rtol=1e-12, atol=1e-12)


def fail_at_the_second_trace_of_one_row(mesh: DeviceMesh) -> None:
    traces: list[int] = []

    def step(w: Any, x: Tensor) -> Any:
        if x.shape[0] == 1:
            traces.append(1)
            if len(traces) > 1:
                raise ValueError("one row is traced once")
        return w, (x @ w).sum()

    w = fzero.partition({"w": torch.ones(3, 3)}, mesh)["w"]
    with pytest.raises((FzeroError, ValueError), match="one row is traced once"):
        fzero.shard(step, mesh)(w, torch.ones(4 - 3 * mesh.get_rank(), 3))


def test_a_rank_that_fails_while_ranks_look_for_one_schedule_tells_the_others() -> None:
    run(2, fail_at_the_second_trace_of_one_row, timeout=60.0)
