"""Stage 0, plain data parallel: state is whole on each rank, and gradients are one all-reduce of means."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
from fzero import FzeroError, VirtualMesh, optim, tree

MESH = VirtualMesh(fsdp=2)


def model() -> tuple[tree.Tree, Any]:
    torch.manual_seed(0)
    return fzero.lower(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))


def make_step(apply: Any, optimizer: optim.GradientTransformation) -> Any:
    def step(params: tree.Tree, state: Any, x: Tensor, y: Tensor) -> tuple[tree.Tree, Any, Tensor]:
        loss, grads = fzero.value_and_grad(lambda p: ((apply(p, x) - y) ** 2).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    return step


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def test_a_step_equals_plain_torch_and_is_one_all_reduce() -> None:
    params, apply = model()
    optimizer = optim.adamw(1e-2)
    plain = make_step(apply, optimizer)(params, optimizer.init(params), *rows())
    held = fzero.partition(params, MESH, persist=sys.maxsize)
    step = fzero.simulate(make_step(apply, optimizer), MESH, stage=0)
    program = step.trace(held, optimizer.init(held), *rows())
    (entry,) = program.comm()
    numel = sum(leaf.numel() for leaf in tree.leaves(params))
    assert entry.nbytes == 4 * (numel + 1)  # the loss travels with the gradients
    new, _, loss = step(held, optimizer.init(held), *rows())
    torch.testing.assert_close(loss, plain[2].detach(), rtol=1e-6, atol=0)
    for leaf, like in zip(tree.leaves(fzero.unpartition(new)), tree.leaves(plain[0])):
        torch.testing.assert_close(leaf, like, rtol=1e-5, atol=1e-6)  # means of two halves round otherwise


def test_microbatches_are_averaged_over_ranks_once() -> None:
    params, apply = model()

    def sums(params: tree.Tree, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return ((apply(params, batch[0]) - batch[1]) ** 2).sum(), batch[1].numel()

    held = fzero.partition(params, MESH, persist=sys.maxsize)
    step = fzero.simulate(fzero.accumulate(sums, 2), MESH, stage=0)
    assert sum(entry.nbytes for entry in step.trace(held, rows()).comm()) == 4 * (83 + 1)  # gradients and the loss
    loss, grads = step(held, rows())
    whole, expected = fzero.value_and_grad(lambda p: ((apply(p, rows()[0]) - rows()[1]) ** 2).mean())(params)
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-6, atol=0)
    for leaf, like in zip(tree.leaves(fzero.unpartition(grads)), tree.leaves(expected)):
        torch.testing.assert_close(leaf, like, rtol=1e-5, atol=1e-6)


def test_slices_are_refused() -> None:
    params, apply = model()
    held, optimizer = fzero.partition(params, MESH), optim.sgd(0.1)
    step = fzero.simulate(make_step(apply, optimizer), MESH, stage=0)
    with pytest.raises(FzeroError, match=r"0\.weight: is cut into slices over 2 ranks.*persist=48, or use"):
        step.trace(held, optimizer.init(held), *rows())
