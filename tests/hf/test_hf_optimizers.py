"""`optim` of TrainingArguments: each name trains as transformers' Trainer, or is refused with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, make_model, read_logs
from transformers.training_args import OptimizerNames

import fzero.hf
from fzero import FzeroError, VirtualMesh
from fzero.hf.optimizers import HELD, REFUSED

SHORT = {"max_steps": 5, "gradient_accumulation_steps": 1}


def train(cls: Any, folder: Path, kind: str = "bigram", model: Any = None, **named: Any) -> list[dict[str, float]]:
    of_trainer = {name: named.pop(name) for name in ("mesh", "optimizers") if name in named}
    model = make_model(kind) if model is None else model
    trainer = cls(model, make_arguments(folder, **SHORT, **named), train_dataset=make_dataset(), **of_trainer)
    trainer.train()
    return read_logs(trainer)


def assert_close(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


SAME: dict[str, dict[str, Any]] = {
    "adafactor": {"optim": "adafactor"},
    "adamw_torch_fused": {"optim": "adamw_torch_fused"},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true"},
    "rmsprop": {"optim": "rmsprop", "optim_args": "alpha=0.9, momentum=0.5, centered=true"},
    "adagrad": {"optim": "adagrad", "optim_args": "lr_decay=0.1, eps=1e-6"},
}


@pytest.mark.parametrize("case", SAME)
def test_names_of_optimizers_mean_the_same(case: str, tmp_path: Path) -> None:
    expected = train(transformers.Trainer, tmp_path, **SAME[case])
    assert_close(train(fzero.hf.Trainer, tmp_path, **SAME[case], mesh=VirtualMesh(fsdp=2)), expected)


OF_BITSANDBYTES = {
    "lion_32bit": (
        [4.172566, 4.110685, 4.105301, 4.075848, 4.128582], [2.701657, 2.482858, 2.497366, 2.664044, 2.644909],
    ),
    "adamw_8bit": (
        [4.172566, 4.110685, 4.104189, 4.095367, 4.136976], [2.701657, 2.482858, 2.496732, 2.651286, 2.723616],
    ),
}  # fmt: skip
"""Losses and gradient norms of transformers' Trainer with bitsandbytes 0.50.2 on a CPU, rounded to six digits."""


@pytest.mark.parametrize("name", OF_BITSANDBYTES)
def test_optimizers_of_bitsandbytes_train_as_it_does(name: str, tmp_path: Path) -> None:
    got = train(fzero.hf.Trainer, tmp_path, "wide llama", optim=name, mesh=VirtualMesh(fsdp=2))
    losses, norms = OF_BITSANDBYTES[name]
    tolerance = 2e-5 if "8bit" in name else 1e-5  # sums in another order round some codes to their neighbours
    assert [each["loss"] for each in got] == pytest.approx(losses, rel=tolerance)
    assert [each["grad_norm"] for each in got] == pytest.approx(norms, rel=tolerance)


ALIKE = {"paged_adamw_32bit": {"optim": "adamw_torch"}, "rmsprop_bnb": {"optim": "rmsprop"}}


@pytest.mark.parametrize("name", ALIKE)
def test_optimizers_of_32_bits_are_those_of_torch(name: str, tmp_path: Path) -> None:
    expected = train(transformers.Trainer, tmp_path, **ALIKE[name])
    assert_close(train(fzero.hf.Trainer, tmp_path, optim=name, mesh=VirtualMesh(fsdp=2)), expected)


def test_state_of_8_bits_has_8_bits_and_embeddings_have_32(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, **SHORT, optim="paged_adamw_8bit")
    trainer = fzero.hf.Trainer(
        make_model("wide llama"), arguments, train_dataset=make_dataset(), mesh=VirtualMesh(fsdp=2)
    )
    trainer.create_optimizer()
    state = trainer.sharded.opt_state
    dtypes = {path: x.dtype for path, x in zip(fzero.tree.paths(state), fzero.tree.leaves(state))}
    of_layer = {dtype for path, dtype in dtypes.items() if path.endswith("mu.model.layers.0.mlp.up_proj.weight")}
    assert of_layer == {torch.uint8}
    assert {x for path, x in dtypes.items() if path.endswith("mu.model.embed_tokens.weight")} == {torch.float32}


def test_a_model_of_files_has_state_of_8_bits_where_its_blocks_are_whole(tmp_path: Path) -> None:
    make_model("wide llama").save_pretrained(tmp_path)
    for given in ({}, {"partition": {"unit": 256}}):
        pretrained = fzero.hf.from_pretrained(tmp_path, VirtualMesh(fsdp=2), **given)
        arguments = make_arguments(tmp_path, **SHORT, optim="adamw_8bit")
        trainer = fzero.hf.Trainer(pretrained, arguments, train_dataset=make_dataset())
        if given:
            trainer.train()
            losses, _ = OF_BITSANDBYTES["adamw_8bit"]
            assert [each["loss"] for each in read_logs(trainer)] == pytest.approx(losses, rel=2e-5)
        else:
            with pytest.raises(FzeroError, match=r"unit=256"):
                trainer.train()


@pytest.mark.parametrize("options", [{"scale_parameter": True}, {"scale_parameter": False, "weight_decay": 0.1}])
def test_a_given_adafactor_of_transformers_is_converted(options: dict[str, Any], tmp_path: Path) -> None:
    both = []
    for cls, mesh in ((transformers.Trainer, {}), (fzero.hf.Trainer, {"mesh": VirtualMesh(fsdp=2)})):
        model = make_model("bigram")
        optimizer = transformers.Adafactor(model.parameters(), lr=0.01, relative_step=False, **options)
        both.append(train(cls, tmp_path, model=model, optimizers=(optimizer, None), **mesh))
    assert_close(both[1], both[0])


def test_an_adafactor_that_chooses_its_rate_is_refused(tmp_path: Path) -> None:
    model = make_model()
    optimizer = transformers.Adafactor(model.parameters())
    with pytest.raises(FzeroError, match=r"optimizer\.params\.relative_step: is true.*give false, and lr"):
        train(fzero.hf.Trainer, tmp_path, model=model, optimizers=(optimizer, None), mesh=VirtualMesh(fsdp=2))


def test_each_name_is_of_torch_or_held_or_refused() -> None:
    of_torch = {"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor"}
    assert of_torch | set(HELD) | set(REFUSED) == {each.value for each in OptimizerNames}
    assert not set(HELD) & set(REFUSED)


@pytest.mark.parametrize("name", ["lion_8bit", "galore_adamw_layerwise", "apollo_adamw", "schedule_free_radam"])
def test_other_names_are_refused_before_anything_is_made(name: str, tmp_path: Path) -> None:
    with pytest.raises(FzeroError, match=rf"^TrainingArguments: optim: is '{name}', which is not supported"):
        fzero.hf.Trainer(make_model(), make_arguments(tmp_path, optim=name), train_dataset=make_dataset())
