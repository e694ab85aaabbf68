"""A run on real ranks, from its first step to its end, as a user has it: two ranks train and save, three go on from
there, one that differs is named, and one that dies is an error on the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from processes import refusal, run
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fzero
import fzero.checkpoint

OPTIMIZER = fzero.optim.adamw(0.01)
ROWS = 12  # which two ranks share evenly, and three too
STEPS = 3


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def make_step(apply: Callable[..., Tensor]) -> Callable[[fzero.State, Tensor], tuple[fzero.State, Tensor]]:
    def train_step(state: fzero.State, x: Tensor) -> tuple[fzero.State, Tensor]:
        loss, grads = fzero.value_and_grad(lambda params: F.mse_loss(apply(params, x), x[:, :3]))(state.params)
        updates, opt_state = OPTIMIZER.update(grads, state.opt_state, state.params)
        params = fzero.optim.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=opt_state, step=state.step + 1), loss

    return train_step


def batch(count: int, rank: int = 0, world: int = 1) -> Tensor:
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(count))
    return x.chunk(world)[rank]


def begin(params: Any) -> fzero.State:
    return fzero.State(params, OPTIMIZER.init(params), step=torch.tensor(0))


def train(mesh: DeviceMesh, folder: Path, steps: range) -> list[float]:
    """The mean losses over ranks of some steps, from the checkpoint that is there, which is then that of the last."""
    params, apply = fzero.lower(make_model())
    params = fzero.partition(params, mesh)
    state = begin(params)
    step = fzero.shard(make_step(apply), mesh)
    if steps.start:
        state = fzero.checkpoint.load(folder, state)
    losses = []
    for count in steps:
        state, loss = step(state, batch(count, mesh.get_rank(), mesh.size()))
        losses.append(loss.item())
    fzero.checkpoint.save(folder, state, overwrite=True)
    return losses


def train_alone() -> list[float]:
    params, apply = fzero.lower(make_model())
    state, step, losses = begin(params), make_step(apply), []
    for count in range(2 * STEPS):
        state, loss = step(state, batch(count))
        losses.append(loss.item())
    return losses


def test_two_ranks_train_and_three_go_on(tmp_path: Path) -> None:
    first = run(2, train, tmp_path / "run", range(STEPS))
    then = run(3, train, tmp_path / "run", range(STEPS, 2 * STEPS))
    means = [sum(ranks) / len(ranks) for part in (first, then) for ranks in zip(*part)]
    torch.testing.assert_close(means, train_alone(), rtol=1e-5, atol=1e-6)  # sums over rows in another order


def differ(mesh: DeviceMesh) -> list[str]:
    """What ranks are told when rank 1 has another learning rate, and when it asks for another value."""
    params = fzero.partition(fzero.lower(make_model())[0], mesh)
    rate = 0.1 * (1 + mesh.get_rank())
    step = fzero.shard(lambda params: fzero.tree.map(lambda leaf: leaf * rate, params), mesh)
    calls = [lambda: step(params), lambda: fzero.unpartition(params[2 * mesh.get_rank()])]
    refusals = [refusal(call) for call in calls]
    assert [each.kind for each in refusals] == ["FzeroError", "FzeroError"], refusals
    return [each.message for each in refusals]


def test_ranks_that_differ_are_named() -> None:
    ranks = run(2, differ)
    for messages in zip(*ranks):
        assert len(set(messages)) == 1 and "rank 1" in messages[0], messages


def lose(mesh: DeviceMesh) -> str:
    params = fzero.partition(fzero.lower(make_model())[0], mesh)
    if mesh.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return refusal(lambda: fzero.unpartition(params)).message


def test_a_rank_that_dies_is_named() -> None:
    message, _ = run(2, lose, stall=timedelta(seconds=20), lost={1})
    assert "rank 1" in message, message
