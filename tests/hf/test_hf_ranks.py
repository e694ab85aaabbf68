"""The Trainer on two processes: equal to transformers' on one, saved there and resumed on one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import transformers
from hf_models import make_arguments, make_dataset, make_model, read_logs
from processes import run
from torch.distributed.device_mesh import DeviceMesh

import fzero.hf


def train_on_two(mesh: DeviceMesh, folder: Path) -> tuple[list[dict[str, float]], float]:
    """Logs and evaluation loss of a rank, whose batches are half of those of one process."""
    rank = mesh.get_local_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")  # as torchrun
    changed = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3}
    dataset = make_dataset()
    trainer = fzero.hf.Trainer(
        make_model(), make_arguments(folder, **changed), train_dataset=dataset, eval_dataset=dataset[:8]
    )
    assert trainer.args.world_size == trainer.accelerator.num_processes == 2
    trainer.train()
    return read_logs(trainer), trainer.evaluate()["eval_loss"]


def train_plainly(folder: Path) -> Any:
    dataset = make_dataset()
    trainer = transformers.Trainer(
        make_model(), make_arguments(folder), train_dataset=dataset, eval_dataset=dataset[:8]
    )
    trainer.train()
    return trainer


def test_two_ranks_train_as_one_and_one_goes_on_from_their_checkpoint(tmp_path: Path) -> None:
    expected = train_plainly(tmp_path / "theirs")
    logs = read_logs(expected)
    for got, loss in run(2, train_on_two, tmp_path / "two"):
        assert len(got) == len(logs) == 6
        for ours, theirs in zip(got, logs):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
        assert loss == pytest.approx(expected.evaluate()["eval_loss"], abs=1e-5)
    resumed = fzero.hf.Trainer(make_model("gpt2"), make_arguments(tmp_path / "one"), train_dataset=make_dataset())
    resumed.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))
    for ours, theirs in zip(read_logs(resumed)[-3:], logs[-3:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
