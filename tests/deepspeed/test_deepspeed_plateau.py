"""A ReduceLROnPlateau moves the rates of an engine as those of torch's optimizer, also behind a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_models import make_batches, make_engine, make_model
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import fzero.deepspeed
from fzero import FzeroError

CONFIG = {"train_batch_size": 8, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3}}
METRICS = [3.0, 3.5, 4.0, 2.0, 2.5, 2.5]
"""Worse twice, better once, and worse again: with a patience of 1 the rates fall behind the third and the sixth."""


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    groups = [{"params": model.blocks.parameters(), "lr": 0.2}, {"params": model.head.parameters()}]
    return torch.optim.SGD(groups, lr=0.1)


def make_plateau(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=1, min_lr=[0.11, 0.0])


def make() -> Any:
    model = make_model()
    optimizer = make_optimizer(model)
    how: dict[str, Any] = {"optimizer": optimizer, "lr_scheduler": make_plateau(optimizer)}
    return make_engine(CONFIG, model=model, **how)


def go_on(engine: Any, epochs: range) -> list[tuple[float, list[float]]]:
    """The loss of each update and the rates behind the epoch's metric."""
    found = []
    for epoch, batch in zip(epochs, make_batches(len(METRICS))[epochs.start :]):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        engine.lr_scheduler.step(METRICS[epoch])
        assert engine.get_lr() == pytest.approx(engine.lr_scheduler.get_last_lr(), rel=1e-6)  # float32
        found.append((loss.item(), engine.lr_scheduler.get_last_lr()))
    return found


def test_it_moves_rates_as_in_torch_and_goes_on_behind_a_checkpoint(tmp_path: Path) -> None:
    plain: nn.Module = make_model()
    optimizer = make_optimizer(plain)
    plateau, expected = make_plateau(optimizer), []
    for batch, metric in zip(make_batches(len(METRICS)), METRICS):
        optimizer.zero_grad()
        loss = plain(*batch)
        loss.backward()
        optimizer.step()
        plateau.step(metric)
        expected.append((loss.item(), [group["lr"] for group in optimizer.param_groups]))
    assert [rates for _, rates in expected][2::3] == [[0.11, 0.05], [0.11, 0.025]]
    engine = make()
    found = go_on(engine, range(4))
    engine.save_checkpoint(str(tmp_path))
    other = make()
    other.load_checkpoint(str(tmp_path))
    assert other.get_lr() == engine.get_lr()
    found += go_on(other, range(4, 6))
    assert [rates for _, rates in found] == [rates for _, rates in expected]
    torch.testing.assert_close(*(torch.tensor([loss for loss, _ in each]) for each in (found, expected)))


def test_the_state_of_another_scheduler_is_named() -> None:
    with pytest.raises(
        FzeroError, match=r"lr_scheduler: the state has 0 rates of a ReduceLROnPlateau, the optimizer 2"
    ):
        make().lr_scheduler.load_state_dict({"last_batch_iteration": 3})


def test_initialize_returns_it() -> None:
    config = CONFIG | {"optimizer": {"type": "AdamW"}}
    given = fzero.deepspeed.initialize(
        model=make_model(), config=config, mesh=fzero.VirtualMesh(fsdp=2), lr_scheduler=make_plateau_of_one
    )
    assert given.lr_scheduler is given.engine.lr_scheduler and given.lr_scheduler.get_last_lr() == [1e-3]


def make_plateau_of_one(optimizer: torch.optim.Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer)
