"""`torch.utils.checkpoint` in a step is `fzero.remat`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from programs import Case, dense, layers, names, rows, training
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import fzero
from fzero.base.errors import FzeroError

MESH = fzero.VirtualMesh(fsdp=2)
Wrap = Callable[..., Any]


def case(wrap: Wrap) -> Case:
    """Two layers and dropout, each layer through `wrap(fn, *args)`."""

    def layer(layer: Any, x: Tensor) -> Tensor:
        return nn.functional.dropout(dense(layer, x), 0.5)

    def loss(params: Any, x: Tensor) -> Tensor:
        for each in params["layers"]:
            x = wrap(layer, each, x)
        return x.square().mean()

    params, optimizer = fzero.partition(layers(), MESH), fzero.optim.sgd(0.1)
    return Case(training(optimizer, loss), MESH, (params, optimizer.init(params), rows(MESH)))


WRAPS: dict[str, Wrap] = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": lambda fn, layer, x: checkpoint(
        lambda w, b, x: fn({"w": w, "b": b}, x), layer["w"], layer["b"], x, use_reentrant=True
    ),
    "its options": partial(checkpoint, use_reentrant=False, preserve_rng_state=False, determinism_check="none"),
    "by keyword": lambda fn, layer, x: checkpoint(fn, layer, x=x, use_reentrant=False),
}


def reaching_end(wrap: Wrap) -> tuple[list[str], Any]:
    """The names of the nodes of a step's program after all passes, and its peak of memory."""
    given = case(wrap)
    program = fzero.simulate(given.step, MESH).trace(*given.args)
    return names(program), program.memory().peak


@pytest.mark.parametrize("name", WRAPS)
def test_a_checkpoint_is_remat_node_for_node(name: str) -> None:
    expected = reaching_end(lambda fn, *args: fzero.remat(fn)(*args))
    assert reaching_end(WRAPS[name]) == expected != reaching_end(lambda fn, *args: fn(*args))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_sequence_of_checkpoints_trains_as_plain_torch(stage: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)))
    params, apply = fzero.lower(Checkpointed(module))
    x = rows(MESH)
    step = fzero.simulate(fzero.value_and_grad(lambda p, x: apply(p, x).square().mean()), MESH, stage=stage)
    value, grads = step(fzero.partition(params, MESH), x)
    expected = module(x).square().mean()
    expected.backward()
    torch.testing.assert_close(value.mean(), expected.detach())
    for path, grad in zip(fzero.tree.paths(grads), fzero.tree.leaves(fzero.unpartition(grads))):
        torch.testing.assert_close(grad, module.get_parameter(path.removeprefix("sequence.")).grad)


class Checkpointed(nn.Module):
    """A sequence in two segments."""

    def __init__(self, sequence: nn.Sequential) -> None:
        super().__init__()
        self.sequence = sequence

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.sequence, 2, x, use_reentrant=False)


def differentiate(loss: Callable[..., Tensor]) -> None:
    fzero.simulate(fzero.grad(loss), MESH)(fzero.partition({"w": torch.ones(5)}, MESH), rows(MESH))


def test_a_selective_checkpoint_is_refused() -> None:
    chosen = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    with pytest.raises(FzeroError, match=r"test_checkpoint\.py:\d+ .*given a context_fn.*policy="):
        differentiate(lambda p, x: checkpoint(lambda x: x * p["w"], x, use_reentrant=False, context_fn=chosen).sum())


def test_a_reentrant_checkpoint_that_trains_nothing_in_plain_torch_is_refused() -> None:
    with pytest.raises(FzeroError, match=r"trains nothing inside.*give use_reentrant=False"):
        differentiate(lambda p, x: checkpoint(lambda x: x * p["w"], x, use_reentrant=True).sum())
    with pytest.raises(ValueError, match="Unexpected keyword arguments: x"):
        differentiate(lambda p, x: checkpoint(lambda x: x * p["w"], x=x, use_reentrant=True).sum())


def test_outside_of_a_trace_a_checkpoint_is_that_of_torch() -> None:
    """Before, behind, and in another thread while a trace goes on."""
    calls: list[int] = []

    def square(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin().square()

    def run() -> None:
        x = torch.ones(2, requires_grad=True)
        checkpoint(square, x, use_reentrant=False).sum().backward()

    def step(x: Tensor) -> Tensor:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return x + 1

    run()
    fzero.simulate(step, MESH)(torch.ones(2))
    with pytest.raises(KeyError):
        fzero.simulate(lambda x: {}["missing"], MESH)(torch.ones(2))
    run()
    assert len(calls) == 6  # each function twice: the backward pass computed it again


def test_to_require_grad_within_a_gradient_changes_nothing() -> None:
    """As hooks of transformers do with the output of an embedding, whose weight may be frozen."""
    params = fzero.partition({"w": torch.ones(5)}, MESH)

    def loss(p: Any, x: Tensor) -> Tensor:
        return (x.requires_grad_() * p["w"]).requires_grad_(True).sum()

    x = rows(MESH)
    grads = fzero.simulate(fzero.grad(loss), MESH)(params, x)
    torch.testing.assert_close(fzero.unpartition(grads)["w"], x.sum(0) / 2)  # a mean over ranks
