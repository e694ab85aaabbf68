"""What a user changes while a Trainer, an Accelerator or an engine trains takes effect, as in plain code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which fzero.hf is not there

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from hf_models import make_arguments, read_logs
from torch import Tensor, nn

import fzero.deepspeed
import fzero.hf

TWO = fzero.VirtualMesh(fsdp=2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.act = nn.Linear(4, 1).double(), nn.Softplus()
        self.scale, self.config = 1.0, SimpleNamespace(rate=1.0)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.act(self.linear(x)) * self.scale * self.config.rate
        return {"loss": (output - y).square().mean(), "logits": output}


def set_scale(owner: Any) -> None:
    owner.scale += 1


def set_rate(owner: Any) -> None:
    owner.config.rate += 1


def add_hook(owner: Any) -> None:
    owner.linear.register_forward_hook(lambda module, args, output: output * 2)


def replace_module(owner: Any) -> None:
    owner.act = nn.Softplus(beta=owner.act.beta + 1)


CHANGES = {"an attribute": set_scale, "an object inside": set_rate, "a hook": add_hook, "a module": replace_module}


def make_rows(count: int = 12) -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [
        {name: torch.randn(size, generator=draws, dtype=torch.float64) for name, size in (("x", 4), ("y", 1))}
        for _ in range(count)
    ]


def weigh(owner: Any, loss: Tensor) -> Tensor:
    return loss * owner.scale * owner.config.rate


def train(cls: Any, folder: Path, change: Callable[[Any], None], is_of_trainer: bool, **how: Any) -> list[float]:
    class Weighed(cls):  # type: ignore[misc]
        scale, config = 1.0, SimpleNamespace(rate=1.0)

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            output = model(**inputs)
            loss = weigh(self, output["loss"])
            return (loss, output) if return_outputs else loss

    class Change(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            change(trainer if is_of_trainer else trainer.model)

    args = make_arguments(folder, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    trainer = Weighed(Net(), args, train_dataset=make_rows(), callbacks=[Change()], **how)
    trainer.train()
    return [x["loss"] for x in read_logs(trainer)]


OF_TRAINERS = [("an attribute", True), ("an object inside", True), *((name, False) for name in CHANGES)]


@pytest.mark.parametrize(("name", "is_of_trainer"), OF_TRAINERS)
def test_a_trainer_follows(name: str, is_of_trainer: bool, tmp_path: Path) -> None:
    expected = train(transformers.Trainer, tmp_path, CHANGES[name], is_of_trainer)
    got = train(fzero.hf.Trainer, tmp_path, CHANGES[name], is_of_trainer, mesh=TWO)
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.fixture
def alone() -> Iterator[None]:
    """accelerate's state is of the process, and no other test has it."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    rows = make_rows()
    parts = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    return [(torch.stack([row["x"] for row in part]), torch.stack([row["y"] for row in part])) for part in parts]


def run_plain(change: Callable[[Any], None]) -> list[float]:
    model, losses = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in make_batches():
        loss = model(x, y)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        change(model)
    return losses


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("alone")
def test_an_accelerator_follows(name: str) -> None:
    model, losses = Net(), []
    accelerator = fzero.hf.Accelerator(cpu=True, mesh=TWO)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    for x, y in make_batches():
        loss = prepared(x, y)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        CHANGES[name](model)
    assert losses == pytest.approx(run_plain(CHANGES[name]), rel=1e-6)


@pytest.mark.parametrize("name", CHANGES)
def test_an_engine_follows(name: str) -> None:
    model, losses = Net(), []
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    config = {"train_batch_size": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": 3}}
    engine, *_ = fzero.deepspeed.initialize(model=model, config={**config, "optimizer": optimizer}, mesh=TWO)
    for x, y in make_batches():
        loss = engine(x, y)["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        CHANGES[name](model)
    assert losses == pytest.approx(run_plain(CHANGES[name]), rel=1e-6)
