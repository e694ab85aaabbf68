"""Running statistics: the Trainer trains, saves and resumes a model with BatchNorm as transformers' Trainer does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
import transformers
from hf_models import make_arguments, make_model, read_logs
from safetensors.torch import load_file
from torch import Tensor, nn

import fzero.hf
from fzero import FzeroError, VirtualMesh, tree

MESH = VirtualMesh(fsdp=1)
BOTH: tuple[Any, ...] = ((transformers.Trainer, {}), (fzero.hf.Trainer, {"mesh": MESH}))
ROWS = 8


def make_resnet() -> Any:
    torch.manual_seed(0)
    sizes = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic", "num_labels": 3}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_channels=2, **sizes))


class Normalized(nn.Module):
    """A model of torch with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(2, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.norm(self.first(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_rows(name: str, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(1)
    return [{name: torch.randn(shape, generator=draws) + row % 3, "labels": row % 3} for row in range(4 * ROWS)]


KINDS: dict[str, Any] = {
    "ResNet": (make_resnet, make_rows("pixel_values", (2, 8, 8)), 1),
    "torch": (Normalized, make_rows("x", (2,)), 2),
}
"""The model, its rows, and the batches of an update."""


def train(cls: Any, kind: str, folder: Path, resume: Any = None, **named: Any) -> Any:
    make, rows, batches = KINDS[kind]
    changed = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    changed |= {"gradient_accumulation_steps": batches}
    arguments = make_arguments(folder, per_device_eval_batch_size=ROWS, **changed)
    trainer = cls(make(), arguments, train_dataset=rows, eval_dataset=rows[:ROWS], **named)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_equal(got: Any, expected: Any, folders: list[Path], updates: int) -> None:
    for ours, theirs in zip(read_logs(got)[-updates:], read_logs(expected)[-updates:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert got.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], abs=1e-5)
    for folder, trainer in zip(folders, (got, expected)):
        trainer.save_model(str(folder))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in folders)
    assert ours.keys() == theirs.keys() and any("running_var" in name for name in ours)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-5)
    counts = {int(value) for name, value in ours.items() if name.endswith("num_batches_tracked")}
    assert counts == {3 * got.args.gradient_accumulation_steps}


@pytest.mark.parametrize("kind", KINDS)
def test_batch_norm_is_that_of_transformers_also_resumed(kind: str, tmp_path: Path) -> None:
    """Three updates. Statistics move with each batch, and are in the files."""
    theirs, ours = (train(cls, kind, tmp_path / cls.__module__, **mesh) for cls, mesh in BOTH)
    assert_equal(ours, theirs, [tmp_path / "ours", tmp_path / "theirs"], 3)
    resumed = train(
        fzero.hf.Trainer, kind, tmp_path / "new", str(tmp_path / "fzero.hf.trainer" / "checkpoint-2"), mesh=MESH
    )
    assert_equal(resumed, theirs, [tmp_path / "resumed", tmp_path / "again"], 1)


def test_statistics_of_two_ranks_are_their_mean(tmp_path: Path) -> None:
    model, rows = Normalized(), KINDS["torch"][1][:ROWS]
    found, losses = [], []
    for part in (rows[: ROWS // 2], rows[ROWS // 2 :]):
        plain = copy.deepcopy(model).train()
        output = plain(torch.stack([row["x"] for row in part]), torch.tensor([row["labels"] for row in part]))
        found.append(dict(plain.norm.named_buffers()))
        losses.append(output["loss"].item())
    changed = {"max_steps": 1, "gradient_accumulation_steps": 1, "train_sampling_strategy": "sequential"}
    arguments = make_arguments(tmp_path, per_device_train_batch_size=ROWS, **changed)
    trainer = fzero.hf.Trainer(model, arguments, train_dataset=rows, mesh=VirtualMesh(fsdp=2))
    trainer.train()
    assert read_logs(trainer)[0]["loss"] == pytest.approx(sum(losses) / 2, abs=1e-6)
    held = fzero.unpartition(trainer.sharded.buffers)
    for path, value in zip(tree.paths(held), tree.leaves(held), strict=True):
        each = [buffers[path.removeprefix("norm.")] for buffers in found]
        torch.testing.assert_close(value, each[0] if each[0].ndim == 0 else (each[0] + each[1]) / 2)


def test_a_pretrained_model_goes_on_with_its_statistics(tmp_path: Path) -> None:
    model, rows = make_resnet(), KINDS["ResNet"][1][:ROWS]
    model.train()(torch.stack([row["pixel_values"] for row in rows]))  # moves statistics
    model.save_pretrained(tmp_path / "saved")
    cls = transformers.ResNetForImageClassification
    pretrained = fzero.hf.from_pretrained(tmp_path / "saved", MESH, cls=cls)
    named = {
        "args": make_arguments(tmp_path, per_device_eval_batch_size=ROWS),
        "eval_dataset": KINDS["ResNet"][1][:ROWS],
    }
    theirs = transformers.Trainer(cls.from_pretrained(tmp_path / "saved"), **named).evaluate()
    assert fzero.hf.Trainer(pretrained, **named).evaluate()["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-5)


def test_generation_from_a_model_with_statistics_is_refused_by_name(tmp_path: Path) -> None:
    model = make_model()
    model.norm = nn.BatchNorm1d(2)
    trainer = fzero.hf.Trainer(model, make_arguments(tmp_path), mesh=MESH)
    with pytest.raises(
        FzeroError, match=r"generate: GPT2LMHeadModel has running statistics.*from_pretrained\(folder\)"
    ):
        trainer.generate(torch.ones(1, 2, dtype=torch.long))
