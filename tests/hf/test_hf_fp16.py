"""fp16 of TrainingArguments: autocast and the loss scale of torch's GradScaler, as accelerate has them on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_dataset, make_model, read_logs

import fzero.hf
from fzero import VirtualMesh

SHORT = {"gradient_accumulation_steps": 2, "max_steps": 6, "logging_nan_inf_filter": False}


def make_plain(folder: Path, cls: Any, kind: str = "bigram", **changed: Any) -> Any:
    """transformers' Trainer in float16 on a CPU, where accelerate refuses it: with what accelerate has on a GPU."""
    arguments = make_arguments(folder, **SHORT, **changed)
    trainer = cls(make_model(kind), arguments, train_dataset=make_dataset())
    trainer.accelerator.native_amp, trainer.accelerator.scaler = True, torch.amp.GradScaler("cpu")
    trainer.accelerator.state._mixed_precision = "fp16"
    return trainer


def make_ours(folder: Path, cls: Any, ranks: int = 2, kind: str = "bigram", **changed: Any) -> Any:
    arguments = make_arguments(folder, **SHORT, **changed, fp16=True)
    return cls(make_model(kind), arguments, train_dataset=make_dataset(), mesh=VirtualMesh(fsdp=ranks))


def enlarge(base: Any) -> Any:
    """A Trainer whose first gradients are not finite in float16: the scale is too large for its loss."""

    class Enlarged(base):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **named: Any) -> Any:
            return super().compute_loss(*args, **named) * 300

    return Enlarged


def assert_close(got: Any, expected: Any) -> None:
    for ours, theirs in zip(read_logs(got), read_logs(expected), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3, abs=1e-5, nan_ok=True)  # autocast rounds to 11 bits


def test_fp16_trains_as_plain(tmp_path: Path) -> None:
    expected = make_plain(tmp_path, transformers.Trainer, "llama")
    expected.train()  # before other arguments are made, which reset the state that accelerate shares
    got = make_ours(tmp_path, fzero.hf.Trainer, kind="llama")
    got.train()
    assert_close(got, expected)
    assert float(got.sharded.scale.scale.full_tensor()) == expected.accelerator.scaler.get_scale()
    loss = got.accelerator.scaler.scale(torch.tensor(2.0))  # as accelerate's backward asks for it
    assert float(loss) == 2 * expected.accelerator.scaler.get_scale()
    wide = [x.dtype for x in fzero.tree.leaves(got.sharded.params)]
    assert set(wide) == {torch.float32}


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_an_overflow_skips_the_update_and_halves_the_scale(optim: str, tmp_path: Path) -> None:
    expected = make_plain(tmp_path, enlarge(transformers.Trainer), optim=optim)
    expected.train()
    got = make_ours(tmp_path, enlarge(fzero.hf.Trainer), ranks=1, optim=optim)
    got.train()
    assert_close(got, expected)
    rates = [entry["learning_rate"] for entry in read_logs(got)]
    assert (rates[1] == 0.0) == (optim == "adamw_torch")  # torch's scaler calls a fused optimizer in any case
    scale = expected.accelerator.scaler.get_scale()
    assert scale < 2.0**16 and float(got.sharded.scale.scale.full_tensor()) == scale


def test_the_scale_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    first = make_ours(tmp_path, enlarge(fzero.hf.Trainer), **saving)
    first.train()
    again = make_ours(tmp_path, enlarge(fzero.hf.Trainer), **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for ours, theirs in zip(read_logs(again)[-3:], read_logs(first)[-3:], strict=True):
        assert ours == pytest.approx(theirs, nan_ok=True)
    assert float(again.sharded.scale.scale.full_tensor()) == float(first.sharded.scale.scale.full_tensor())
