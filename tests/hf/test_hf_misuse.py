"""What transformers' Trainer takes from a subclass or a callback, and a program cannot: each is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, make_model, read_logs
from torch import Tensor
from transformers import TrainerCallback

import fzero.hf
import fzero.hf.trainer
from fzero import FzeroError, VirtualMesh
from fzero.hf.progress import CHANGING, TracedState

BOTH: tuple[Any, ...] = ((transformers.Trainer, {}), (fzero.hf.Trainer, {"mesh": VirtualMesh(fsdp=1)}))
OURS = BOTH[1:]


def train(cls: Any, folder: Path, mesh: Any, **named: Any) -> Any:
    arguments = make_arguments(folder, max_steps=3, gradient_accumulation_steps=1)
    trainer = cls(make_model(), arguments, train_dataset=make_dataset(), **mesh, **named)
    trainer.train()
    return trainer


class Changer(TrainerCallback):
    """Sets an option of the optimizer's first group before each update."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        optimizer.param_groups[0][self.name] = self.value


CHANGES = {"weight_decay": 5.0, "betas": (0.5, 0.9), "eps": 1e-3, "amsgrad": True}


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_of_a_group_that_changes_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match=rf"optimizer: group 0: {name}: was .* and is .*a rate, lr, may change"):
        train(*OURS[0][:1], tmp_path, OURS[0][1], callbacks=[Changer(name, CHANGES[name])])


def test_a_rate_may_change(tmp_path: Path) -> None:
    theirs, ours = (read_logs(train(cls, tmp_path, mesh, callbacks=[Changer("lr", 0.05)])) for cls, mesh in BOTH)
    assert [x["loss"] for x in ours] == pytest.approx([x["loss"] for x in theirs], abs=1e-5)


class Staged(fzero.hf.Trainer):
    """A loss that grows with the updates."""

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        return super().compute_loss(*args, **named) * (10.0 if self.state.global_step >= 2 else 1.0)


def test_a_number_of_the_state_that_changes_is_named_while_a_loss_is_traced(tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match=r"compute_loss: self\.state\.global_step: changes from update to update"):
        train(Staged, tmp_path, OURS[0][1])
    state = transformers.TrainerState(max_steps=7)
    traced: Any = TracedState(state)
    assert traced.max_steps == 7 and set(vars(state)) >= set(CHANGING)
    with pytest.raises(FzeroError, match=r"self\.state\.max_steps: is set"):
        traced.max_steps = 8


def make_weighted(base: Any) -> Any:
    """A Trainer whose batches have a number that grows with the updates."""

    class Weighted(base):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            number = torch.tensor(1.0 + self.state.global_step)
            return super().training_step(model, {**inputs, "number": number}, num_items_in_batch)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            number = inputs.pop("number")
            return super().compute_loss(model, inputs, *args, **named) * number

    return Weighted


def test_a_number_that_changes_goes_in_the_batch(tmp_path: Path) -> None:
    theirs, ours = (read_logs(train(make_weighted(cls), tmp_path, mesh)) for cls, mesh in BOTH)
    assert [x["loss"] for x in ours] == pytest.approx([x["loss"] for x in theirs], rel=1e-5)


class Backward(fzero.hf.Trainer):
    """A training step that differentiates the loss itself."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_training_step_that_calls_backward_is_named(tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match=r"is called for gradients outside of compute_loss; .*super\(\)\.training_st"):
        train(Backward, tmp_path, OURS[0][1])


def test_a_model_that_is_replaced_is_named(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path)
    trainer = fzero.hf.Trainer(make_model(), arguments, eval_dataset=make_dataset(8), **OURS[0][1])
    trainer.model = make_model()
    with pytest.raises(FzeroError, match=r"trainer\.model: was replaced by another GPT2LMHeadModel"):
        trainer.evaluate()


def test_generation_in_predict_is_refused_by_name(tmp_path: Path) -> None:
    arguments = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, use_cpu=True, report_to="none"
    )
    with pytest.raises(FzeroError, match=r"predict_with_generate: is True.*trainer\.generate"):
        fzero.hf.Trainer(make_model(), arguments)


def test_adafactor_of_torch_means_the_same(tmp_path: Path) -> None:
    logs = []
    for cls, mesh in BOTH:
        model = make_model()
        optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
        arguments = make_arguments(tmp_path, max_steps=2, gradient_accumulation_steps=1)
        trainer = cls(model, arguments, train_dataset=make_dataset(), optimizers=(optimizer, None), **mesh)
        trainer.train()
        logs.append([x["loss"] for x in read_logs(trainer)])
    assert logs[1] == pytest.approx(logs[0], abs=1e-5)


def test_batches_of_many_lengths_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = fzero.hf.Trainer(make_model(), make_arguments(tmp_path), **OURS[0][1])
    with caplog.at_level("WARNING", "fzero"):
        for length in (8, 8, 8, 8, 9, 10, 11, 12):
            trainer._count_shapes({"input_ids": torch.ones(2, length)})
    assert sum("pad_to_multiple_of" in record.getMessage() for record in caplog.records) == 1


class Own(fzero.hf.Trainer):
    """A loss of its own."""

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        return super().compute_loss(*args, **named)


@pytest.mark.parametrize("cls", [Own, fzero.hf.Trainer])
def test_padding_beside_a_loss_of_the_users_own_is_logged_once(
    cls: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pad_more(inputs: Any, *_: Any) -> dict[str, Tensor]:
        return {name: torch.nn.functional.pad(x, (0, 2), value=-100 * (name == "labels")) for name, x in inputs.items()}

    monkeypatch.setattr(fzero.hf.trainer, "pad_to_longest", pad_more)
    with caplog.at_level("WARNING", "fzero"):
        train(cls, tmp_path, OURS[0][1])
    told = [record for record in caplog.records if "a loss that counts padding changes" in record.getMessage()]
    assert len(told) == (cls is Own)
