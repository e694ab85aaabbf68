"""A model that was given to the Trainer: each use of its old values is an error that names the way out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, make_model, read_logs
from transformers import TrainerCallback

import fzero.hf
from fzero import FzeroError, VirtualMesh

MESH = VirtualMesh(fsdp=1)
SHORT = {"max_steps": 2, "gradient_accumulation_steps": 1}
TOKENS = torch.ones(1, 4, dtype=torch.int64)

USES: dict[str, Callable[[Any, Path], Any]] = {
    "call": lambda net, _: net(TOKENS),
    "generate": lambda net, _: net.generate(TOKENS, max_new_tokens=2),
    "save_pretrained": lambda net, folder: net.save_pretrained(folder / "saved"),
    "torch.save": lambda net, folder: torch.save(net.state_dict(), folder / "saved.pt"),
    "load_state_dict": lambda net, _: net.load_state_dict(make_model().state_dict()),
    "pickle": lambda net, _: pickle.dumps(net),
    "deepcopy": lambda net, _: copy.deepcopy(net),
    "freeze": lambda net, _: net.requires_grad_(False),
    "freeze one": lambda net, _: setattr(net.lm_head.weight, "requires_grad", False),
    "clamp": lambda net, _: [x.clamp_(-1, 1) for x in net.parameters()],
    "data": lambda net, _: [x.data for x in net.parameters()],
    "grad": lambda net, _: [x.grad for x in net.parameters()],
    "is nan": lambda net, _: any(torch.isnan(x).any() for x in net.parameters()),
    "half": lambda net, _: net.half(),
    "optimizer": lambda net, _: torch.optim.SGD(net.parameters(), 0.1).step(),
    "a second Trainer": lambda net, folder: fzero.hf.Trainer(net, make_arguments(folder), mesh=MESH),
}


def make_trainer(model: Any, folder: Path, **named: Any) -> Any:
    data = {"train_dataset": make_dataset(), "eval_dataset": make_dataset(8), "mesh": MESH}
    return fzero.hf.Trainer(model, make_arguments(folder, **SHORT), **{**data, **named})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    model = make_model()
    trainer = make_trainer(model, tmp_path_factory.mktemp("trained"))
    trainer.train()
    return model, trainer


@pytest.mark.parametrize("use", USES)
def test_a_use_of_old_values_is_named(use: str, trained: Any, tmp_path: Path) -> None:
    model, trainer = trained
    assert trainer.model is model
    with pytest.raises(FzeroError, match=r"^model: .*(Trainer)"):
        USES[use](model, tmp_path)


def test_the_structure_and_the_trainer_stay(trained: Any, tmp_path: Path) -> None:
    model, trainer = trained
    plain = make_model()
    assert model.num_parameters() == plain.num_parameters() == trainer.get_num_trainable_parameters()
    assert [(name, x.shape, x.dtype) for name, x in model.named_parameters()] == [
        (name, x.shape, x.dtype) for name, x in plain.named_parameters()
    ]
    assert trainer.state.total_flos > 0
    trainer.create_model_card()
    trainer.save_model(str(tmp_path))
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    loss = transformers.Trainer(read, make_arguments(tmp_path), eval_dataset=make_dataset(8)).evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-6)
    assert torch.equal(trainer.generate(TOKENS, max_new_tokens=3), read.generate(TOKENS, max_new_tokens=3))


def test_a_model_that_the_trainer_refuses_keeps_its_values(tmp_path: Path) -> None:
    model = make_model()
    for refused in ({"auto_find_batch_size": True}, {"debug": "underflow_overflow"}):
        with pytest.raises(FzeroError):
            fzero.hf.Trainer(model, make_arguments(tmp_path, **refused))
    with pytest.raises(FzeroError, match="relative_step: is true"):
        optimizer = transformers.optimization.Adafactor(model.parameters())
        make_trainer(model, tmp_path, optimizers=(optimizer, None))
    assert torch.equal(model.lm_head.weight, make_model().lm_head.weight)


def test_a_pretrained_structure_is_taken_once(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path / "first")
    pretrained = fzero.hf.from_pretrained(tmp_path / "first", MESH)
    trainer = make_trainer(pretrained, tmp_path, mesh=None)
    trainer.train()
    pretrained.save_pretrained(tmp_path / "second", trainer.sharded.params)
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "second").num_parameters() > 0
    for act in (lambda: pretrained.model.state_dict(), lambda: make_trainer(pretrained, tmp_path, mesh=None)):
        with pytest.raises(FzeroError, match=r"^model: transformer\.wte\.weight"):
            act()


def test_hooks_of_the_given_model_are_in_the_programs(tmp_path: Path) -> None:
    trainers = []
    for cls, mesh in ((transformers.Trainer, {}), (fzero.hf.Trainer, {"mesh": MESH})):
        model = make_model()
        trainer = cls(model, make_arguments(tmp_path, **SHORT), train_dataset=make_dataset(), **mesh)
        model.transformer.h[0].register_forward_hook(lambda _, inputs, output: output * 3)
        trainer.train()
        trainers.append(trainer)
    theirs, ours = map(read_logs, trainers)
    assert [x["loss"] for x in ours] == pytest.approx([x["loss"] for x in theirs], abs=1e-5)


class Freezer(TrainerCallback):
    """Freezes a parameter while the model trains."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.head.requires_grad_(False)


def test_a_callback_that_freezes_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(make_model("bigram"), tmp_path, callbacks=[Freezer()])
    with pytest.raises(FzeroError, match=r"model: .*requires_grad_ .*before Trainer gets it"):
        trainer.train()


class OwnOptimizer(fzero.hf.Trainer):
    """Makes its optimizer of the parameters of its model. `ends` says whether by the method of the base."""

    ends = True

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3, weight_decay=0.1)
        return super().create_optimizer() if self.ends else self.optimizer


def test_an_optimizer_of_a_subclass_is_taken_or_named(tmp_path: Path) -> None:
    model = make_model("bigram")
    given = (torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1), None)
    data = {"train_dataset": make_dataset()}
    theirs = transformers.Trainer(model, make_arguments(tmp_path, **SHORT), optimizers=given, **data)
    ours = OwnOptimizer(make_model("bigram"), make_arguments(tmp_path, **SHORT), mesh=MESH, **data)
    for trainer in (theirs, ours):
        trainer.train()
    assert [x["loss"] for x in read_logs(ours)] == pytest.approx([x["loss"] for x in read_logs(theirs)], abs=1e-5)
    trainer = OwnOptimizer(make_model("bigram"), make_arguments(tmp_path, **SHORT), mesh=MESH, **data)
    trainer.ends = False
    with pytest.raises(FzeroError, match=r"create_optimizer of your own ends with"):
        trainer.train()
