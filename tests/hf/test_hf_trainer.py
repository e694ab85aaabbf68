"""The Trainer in one process: equal to transformers' own, on one rank and on virtual ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, make_model, read_evaluations, read_logs

import fzero.hf
from fzero import FzeroError, VirtualMesh
from fzero.hf import checks


def train(cls: Any, folder: Path, kind: str = "gpt2", changed: dict[str, Any] | None = None, **named: Any) -> Any:
    dataset = make_dataset()
    arguments = make_arguments(folder, **(changed or {}))
    trainer = cls(make_model(kind), arguments, train_dataset=dataset, eval_dataset=dataset[:8], **named)
    trainer.train()
    return trainer


def assert_equal(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    ours, theirs = read_logs(got), read_logs(expected)
    assert len(ours) == len(theirs) > 0
    for mine, their in zip(ours, theirs):
        assert mine == pytest.approx(their, rel=tolerance, abs=tolerance)


def test_training_evaluation_and_prediction_are_those_of_transformers(tmp_path: Path) -> None:
    changed = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    expected = train(transformers.Trainer, tmp_path / "theirs", changed=changed)
    got = train(fzero.hf.Trainer, tmp_path / "ours", changed=changed, mesh=VirtualMesh(fsdp=2))
    assert_equal(got, expected)
    assert len(read_evaluations(got)) == 2
    assert read_evaluations(got) == pytest.approx(read_evaluations(expected), abs=1e-5)
    ours, theirs = (trainer.predict(make_dataset()[:8]) for trainer in (got, expected))
    assert ours.predictions == pytest.approx(theirs.predictions, abs=1e-4)
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], abs=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "llama in bfloat16, activation checkpointing": {
        "kind": "llama", "changed": {"bf16": True, "gradient_checkpointing": True},
    },
    "label smoothing, SGD, no clipping, frozen weights, a last update of two batches": {
        "kind": "gpt2 with frozen positions",
        "changed": {
            "label_smoothing_factor": 0.1, "max_grad_norm": 0.0, "optim": "sgd", "lr_scheduler_type": "cosine",
            "gradient_accumulation_steps": 4, "max_steps": 4,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_arguments_mean_the_same(case: str, tmp_path: Path) -> None:
    expected = train(transformers.Trainer, tmp_path / "theirs", **CASES[case])
    got = train(fzero.hf.Trainer, tmp_path / "ours", **CASES[case], mesh=VirtualMesh(fsdp=1))
    assert_equal(got, expected, 1e-3 if "bfloat16" in case else 1e-5)  # autocast rounds to 8 bits


def test_an_optimizer_that_is_not_converted_is_refused_by_type(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.Rprop(model.parameters())
    arguments = make_arguments(tmp_path)
    with pytest.raises(FzeroError, match=r"optimizer: is a torch\.optim\.rprop\.Rprop, which is not converted"):
        fzero.hf.Trainer(model, arguments, train_dataset=make_dataset(), optimizers=(optimizer, None))


def test_a_model_of_from_pretrained_trains_and_is_saved(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "first")
    pretrained = fzero.hf.from_pretrained(tmp_path / "first", VirtualMesh(fsdp=2))
    pretrained.save_pretrained(tmp_path / "second")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    for (name, ours), (_, theirs) in zip(read.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    changed = {"max_steps": 2, "gradient_accumulation_steps": 1}
    expected = transformers.Trainer(model, make_arguments(tmp_path, **changed), train_dataset=make_dataset())
    got = fzero.hf.Trainer(pretrained, make_arguments(tmp_path, **changed), train_dataset=make_dataset())
    expected.train()
    got.train()
    assert_equal(got, expected)


def test_a_mesh_other_than_that_of_from_pretrained_is_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    pretrained = fzero.hf.from_pretrained(tmp_path, VirtualMesh(fsdp=2))
    with pytest.raises(FzeroError, match=r"mesh: is not that of from_pretrained"):
        fzero.hf.Trainer(pretrained, make_arguments(tmp_path), mesh=VirtualMesh(fsdp=4))
    with pytest.raises(FzeroError, match=r"device_map: is 'auto'"):
        fzero.hf.from_pretrained(tmp_path, VirtualMesh(fsdp=2), device_map="auto")


def test_a_parameter_that_is_frozen_too_late_is_refused_by_name(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    pretrained = fzero.hf.from_pretrained(tmp_path, VirtualMesh(fsdp=2))
    pretrained.model.transformer.wpe.requires_grad_(False)
    trainer = fzero.hf.Trainer(pretrained, make_arguments(tmp_path), eval_dataset=make_dataset())
    with pytest.raises(FzeroError, match=r"transformer\.wpe\.weight: requires_grad became False"):
        trainer.evaluate()


def test_a_checkpoint_of_transformers_is_refused_and_its_weights_are_read(tmp_path: Path) -> None:
    changed = {"max_steps": 1, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
    theirs = train(transformers.Trainer, tmp_path, changed=changed)
    trainer = fzero.hf.Trainer(make_model(), make_arguments(tmp_path), train_dataset=make_dataset())
    with pytest.raises(FzeroError, match=r"checkpoint-1: has no folder 'fzero'"):
        trainer.train(resume_from_checkpoint=True)
    held = fzero.unpartition(trainer.sharded.params)
    for path, leaf in zip(fzero.tree.paths(held), fzero.tree.leaves(held)):
        assert torch.equal(leaf, theirs.model.get_parameter(path)), path


def test_a_script_may_put_our_class_in_the_place_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = fzero.hf.Trainer(make_model(), make_arguments(tmp_path), train_dataset=make_dataset())
    monkeypatch.setattr(transformers, "Trainer", fzero.hf.Trainer)
    assert isinstance(trainer.create_optimizer(), torch.optim.AdamW)


class Scaled(torch.nn.Module):
    """A module of no family, with `config = None`, as models of tests have it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.config = torch.nn.Parameter(torch.tensor(2.0)), None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.scale * x - labels).square().mean(), self.scale * x


def test_a_model_without_a_config_is_evaluated(tmp_path: Path) -> None:
    rows = [{"x": torch.ones(1), "labels": torch.zeros(1)}] * 4
    trainer = fzero.hf.Trainer(Scaled(), make_arguments(tmp_path), eval_dataset=rows)
    assert trainer.evaluate()["eval_loss"] == 4


def test_the_group_of_a_parameter_is_found(tmp_path: Path) -> None:
    trainer = fzero.hf.Trainer(make_model(), make_arguments(tmp_path))
    with pytest.raises(ValueError, match="optimizer is None"):
        trainer.get_optimizer_group()
    trainer.create_optimizer()
    decayed, others = trainer.get_optimizer_group()
    assert len(decayed) + len(others) == len(list(trainer.model.parameters()))
    group = trainer.get_optimizer_group(trainer.model.transformer.h[0].attn.c_attn.bias)
    assert group["weight_decay"] == 0 and group["params"] == others  # lists compare by identity first


def test_no_private_name_of_transformers_is_taken_by_accident() -> None:
    own = [base for base in fzero.hf.Seq2SeqTrainer.__mro__ if base.__module__.startswith("fzero.")]
    ours = {name for base in own for name in vars(base)}
    private = {name for name in ours if name.startswith("_") and not name.startswith("__")}
    assert private & set(dir(transformers.Trainer)) == set(checks.SEAMS)
