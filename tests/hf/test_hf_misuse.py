"""What transformers' Trainer takes from a subclass or a callback, and a program cannot: each is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, make_model, make_ragged_dataset, pad_rows, read_logs
from torch import Tensor
from transformers import BertConfig, BertModel, TrainerCallback, TrainingArguments

import fzero.hf
import fzero.hf.trainer
from fzero import FzeroError, VirtualMesh
from fzero.hf.progress import CHANGING, TracedState

BOTH: tuple[Any, ...] = ((transformers.Trainer, {}), (fzero.hf.Trainer, {"mesh": VirtualMesh(fsdp=1)}))
OURS = BOTH[1:]


def train(cls: Any, folder: Path, mesh: Any, **named: Any) -> Any:
    arguments = make_arguments(folder, max_steps=3, gradient_accumulation_steps=1)
    trainer = cls(make_model("bigram"), arguments, train_dataset=make_dataset(), **mesh, **named)
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
    with pytest.raises(FzeroError, match=r"predict_with_generate: is True.*fzero\.hf\.Seq2SeqTrainer"):
        fzero.hf.Trainer(make_model(), arguments)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a name": (lambda folder: make(folder, "gpt2"), r"model: is 'gpt2', which is no model; give a model, such as"),
    "a class": (lambda folder: make(folder, transformers.GPT2LMHeadModel), r"model: is <class .*GPT2LM.* no model"),
    "another class": (lambda folder: make(folder, torch.nn.Linear), r"model: is <class .*Linear.* no model"),
    "a dict": (lambda folder: make(folder, {}), r"model: is \{\}, which is no model"),
    "model_init": (lambda folder: make(folder, model_init=lambda: 3), r"model_init: is 3, which is no model"),
    "a class of arguments": (lambda _: fzero.hf.Trainer(make_model(), TrainingArguments), r"args: is <class .*give tr"),
    "a text of arguments": (lambda _: fzero.hf.Trainer(make_model(), "out"), r"args: is 'out'; give transformers\.T"),
    "stage": (lambda folder: make(folder, make_model(), stage=7), r"stage: is 7; stages are 0, 1, 2 and 3"),
    "mesh": (lambda folder: make(folder, make_model(), mesh="cpu"), r"mesh: str has no named axes"),
    "compile": (lambda _: generate(make_model(), compile="max"), r"compile: is 'max'; give True or False or 'graph'"),
    "an encoder": (lambda _: generate(BertModel(BERT)), r"generate: BertModel has no generate; give a model with a h"),
    "a class for generate": (lambda _: generate(BertModel), r"generate: type has no generate"),
    "cls": (lambda folder: fzero.hf.from_pretrained(folder, MESH, cls="AutoModel"), r"cls: is 'AutoModel'; give a c"),
    "seed": (lambda folder: fzero.hf.from_pretrained(folder, MESH, seed=2**70), r"seed: is 1180591.*of 64 bits"),
}
"""A value that is none of an argument -> the error."""
MESH = VirtualMesh(fsdp=1)
BERT = BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)


def make(folder: Path, model: Any = None, **named: Any) -> Any:
    return fzero.hf.Trainer(model, make_arguments(folder), **{"mesh": MESH, **named})


def generate(model: Any, **how: Any) -> Any:
    params = fzero.partition(fzero.lower(model)[0], MESH) if isinstance(model, torch.nn.Module) else {}
    return fzero.hf.Generator(model, MESH, **how)(params, torch.tensor([[5, 6]]), max_new_tokens=1)


@pytest.mark.parametrize("case", BAD)
def test_a_value_that_an_argument_cannot_have_is_named(case: str, tmp_path: Path) -> None:
    act, message = BAD[case]
    with pytest.raises(FzeroError, match=message):
        act(tmp_path)


def test_a_number_of_tokens_with_a_fraction_is_rounded_up_as_in_transformers() -> None:
    params = fzero.partition(fzero.lower(make_model())[0], MESH)
    tokens, named = torch.tensor([[5, 6]]), {"max_new_tokens": 1.5, "eos_token_id": None, "pad_token_id": 0}
    got = fzero.hf.Generator(make_model(), MESH)(params, tokens, **named)
    assert torch.equal(got, make_model().eval().generate(tokens, **named))


def test_adafactor_of_torch_means_the_same(tmp_path: Path) -> None:
    logs = []
    for cls, mesh in BOTH:
        model = make_model("bigram")
        optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
        arguments = make_arguments(tmp_path, max_steps=2, gradient_accumulation_steps=1)
        trainer = cls(model, arguments, train_dataset=make_dataset(), optimizers=(optimizer, None), **mesh)
        trainer.train()
        logs.append([x["loss"] for x in read_logs(trainer)])
    assert logs[1] == pytest.approx(logs[0], abs=1e-5)


def test_further_lengths_are_not_traced_and_no_one_is_told_that_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{name: x[: 5 + i // 4] for name, x in each.items()} for i, each in enumerate(make_dataset())]
    changed = {"gradient_accumulation_steps": 1, "train_sampling_strategy": "sequential", "max_steps": 5}
    arguments = make_arguments(tmp_path, **changed)
    trainer = fzero.hf.Trainer(make_model("llama"), arguments, train_dataset=rows, data_collator=pad_rows, **OURS[0][1])
    with caplog.at_level("INFO", "fzero"):
        trainer.train()
    told = [record.getMessage() for record in caplog.records if "traced" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith("Trainer: training step(") and "with open sizes" in told[0], told


def test_a_further_trace_is_logged_by_a_name_that_the_user_knows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(tmp_path, make_model("llama"), eval_dataset=make_ragged_dataset(8), data_collator=pad_rows)
    with caplog.at_level("INFO", "fzero"):
        for rows in (make_ragged_dataset(4), make_dataset(4, length=7)):
            trainer.evaluate(rows)
            trainer.generate(torch.ones(len(rows[0]["input_ids"]), 3, dtype=torch.long), max_new_tokens=1)
    told = [record.getMessage() for record in caplog.records if " is traced " in record.getMessage()]
    names = dict.fromkeys(message.partition("(")[0] for message in told)
    assert list(names) == ["Trainer: evaluation step", "generate: forward pass of a prompt"]


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
