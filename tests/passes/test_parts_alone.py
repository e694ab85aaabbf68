"""Gradients on a mesh with one rank along its shard axis: no rank has others to scatter them to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero.passes import reuse
from fzero.program import ops

MESH = fzero.VirtualMesh(fsdp=1, tp=2)
WIDTH = 16
SPLIT = {"up": ("tp", 0), "again": ("tp", 0), "down": ("tp", 1)}
OPTIMIZER = fzero.optim.adamw(1e-2)


def make_params() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"up": (4 * WIDTH, WIDTH), "again": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) / 4 for name, shape in shapes.items()}


def own(params: Any, x: Tensor) -> Tensor:
    """A loss in which each leaf has a gradient of its own."""
    hidden = torch.tanh(x @ params["up"].t()) * torch.sigmoid(x @ params["again"].t())
    return fzero.psum(hidden @ params["down"].t(), "tp").square().mean()


def shared(params: Any, x: Tensor) -> Tensor:
    """A loss in which the gradients of two leaves lie in one memory."""
    up, again = (x @ torch.cat([params["up"], params["again"]]).t()).chunk(2, -1)
    return fzero.psum((torch.tanh(up) * again) @ params["down"].t(), "tp").square().mean()


def train(params: Any, state: Any, x: Tensor, loss_of: Any) -> tuple[Any, Any, Any]:
    loss, grads = fzero.value_and_grad(loss_of)(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return fzero.optim.apply_updates(params, updates), state, (loss, grads)


def run(loss_of: Any, mesh: Any, **options: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    """The program of a step on a mesh, or None, and losses, leaves and gradients of two steps."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    params: Any = make_params()
    step, program = train, None
    if mesh is not None:
        params = fzero.partition(params, mesh, split=SPLIT)
        step = fzero.simulate(train, mesh, data=("fsdp",), **options)
        program = step.program(params, OPTIMIZER.init(params), x, loss_of)
    state, losses = OPTIMIZER.init(params), []
    for _ in range(2):
        params, state, (loss, grads) = step(params, state, x, loss_of)
        losses.append(loss.mean())
    found = fzero.unpartition((params, grads)) if mesh is not None else (params, grads)
    return program, losses, [*found[0].values(), *found[1].values()]


def scatters(program: Any) -> list[Any]:
    return program.graph.find_nodes(op="call_function", target=ops.reduce_scatter)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_divided_where_they_lie(stage: int) -> None:
    program, losses, values = run(own, MESH, stage=stage)
    assert [x.kwargs.get("divided") for x in scatters(program)] == [True] * len(scatters(program)) != []
    without = [each for each in fzero.passes.defaults(stage=stage) if each is not reuse]
    plain, *same = run(own, MESH, passes=without)
    assert not any(x.kwargs.get("divided") for x in scatters(plain))
    assert torch.equal(torch.stack(losses), torch.stack(same[0]))
    assert all(map(torch.equal, values, same[1]))
    assert program.memory().peak < plain.memory().peak
    _, exact, whole = run(own, None)
    torch.testing.assert_close(losses, exact, rtol=1e-12, atol=0)
    torch.testing.assert_close(values, whole, rtol=1e-9, atol=1e-12)


def test_gradients_in_one_memory_are_left_as_they_are() -> None:
    program, losses, values = run(shared, MESH)
    assert any(not x.kwargs.get("divided") for x in scatters(program))
    _, exact, whole = run(shared, None)
    torch.testing.assert_close(losses, exact, rtol=1e-12, atol=0)
    torch.testing.assert_close(values, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sync", ["once", "each"])
def test_replicas_of_whole_leaves_add_up_turns_as_one_device(sync: str) -> None:
    """In each turn the slices of gradients are the gradients where they lie."""

    def loss_of(params: Any, x: Tensor) -> Tensor:
        return (torch.tanh(x @ params["up"].t()) @ params["down"].t()).square().mean()

    def sums(params: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return loss_of(params, x) * len(x), torch.tensor(len(x))

    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mesh, expected = fzero.VirtualMesh(replica=2, fsdp=1), fzero.value_and_grad(loss_of)(make_params(), x)
    for stage in (1, 2, 3):
        step = fzero.simulate(fzero.accumulate(sums, 2, sync=sync), mesh, stage=stage)
        found = fzero.unpartition(step(fzero.partition(make_params(), mesh), x))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
