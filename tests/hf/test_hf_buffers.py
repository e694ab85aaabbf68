"""Running statistics: the Trainer trains, saves and resumes a model that changes buffers as transformers' does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


class Spectral(Normalized):
    """A model with both spectral norms of torch, and with SyncBatchNorm."""

    def __init__(self, norm: type[nn.Module] = nn.SyncBatchNorm) -> None:
        super().__init__()
        self.first = nn.utils.spectral_norm(self.first)
        self.norm = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), norm(4))  # type: ignore[assignment]


def make_rows(name: str, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(1)
    return [{name: torch.randn(shape, generator=draws) + row % 3, "labels": row % 3} for row in range(4 * ROWS)]


class Kind(NamedTuple):
    """A model with running statistics, and how it is trained."""

    make: Callable[[], nn.Module]
    rows: list[dict[str, Any]]
    buffers: tuple[str, ...]  # some that training moves
    batches: int = 1  # of an update
    ranks: int = 1  # beside one process of transformers
    plain: Callable[[], nn.Module] | None = None  # what `make` equals there, where it is another model


OF_TORCH = make_rows("x", (2,))
IN_RESNET = "resnet.embedder.embedder.normalization.running_var"
IN_SPECTRAL = ("first.weight_u", "norm.0.parametrizations.weight.0._u", "norm.1.running_var")
KINDS = {
    "ResNet": Kind(make_resnet, make_rows("pixel_values", (2, 8, 8)), (IN_RESNET,)),
    "torch": Kind(Normalized, OF_TORCH, ("norm.running_var",), 2),
    "spectral": Kind(Spectral, OF_TORCH, IN_SPECTRAL, 2, ranks=2, plain=lambda: Spectral(nn.BatchNorm1d)),
}


def train(cls: Any, kind: Kind, folder: Path, resume: Any = None) -> Any:
    changed = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    changed |= {"gradient_accumulation_steps": kind.batches}
    arguments = make_arguments(folder, per_device_eval_batch_size=ROWS, **changed)
    is_plain = cls is transformers.Trainer
    named: dict[str, Any] = {} if is_plain else {"mesh": VirtualMesh(fsdp=kind.ranks)}
    model = kind.plain() if is_plain and kind.plain is not None else kind.make()
    trainer = cls(model, arguments, train_dataset=kind.rows, eval_dataset=kind.rows[:ROWS], **named)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def describe(trainer: Any, folder: Path) -> tuple[list[dict[str, float]], float, dict[str, Tensor]]:
    """The logs of updates, the loss of an evaluation, and the values in the file of the model."""
    trainer.save_model(str(folder))
    return read_logs(trainer), trainer.evaluate()["eval_loss"], load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", KINDS)
def test_running_statistics_are_those_of_transformers_also_resumed(name: str, tmp_path: Path) -> None:
    """Three updates. Statistics move with each batch, and are in the files."""
    kind, before = KINDS[name], KINDS[name].make().state_dict()
    theirs = train(transformers.Trainer, kind, tmp_path / "plain")
    ours = train(fzero.hf.Trainer, kind, tmp_path / "first")
    resumed = train(fzero.hf.Trainer, kind, tmp_path / "second", str(tmp_path / "first" / "checkpoint-2"))
    logs, loss, values = describe(theirs, tmp_path / "theirs")
    assert len(logs) == 3 and not any(torch.allclose(values[name], before[name]) for name in kind.buffers)
    for trainer, updates in ((ours, 3), (resumed, 1)):
        found, other, held = describe(trainer, tmp_path / f"ours-{updates}")
        for got, expected in zip(found[-updates:], logs[-updates:], strict=True):
            assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert other == pytest.approx(loss, abs=1e-5) and held.keys() == values.keys()
        for path, value in values.items():
            torch.testing.assert_close(held[path], value, rtol=1e-5, atol=1e-5)
            assert not path.endswith("num_batches_tracked") or value == 3 * kind.batches


def test_statistics_of_two_ranks_are_their_mean(tmp_path: Path) -> None:
    model, rows = Normalized(), OF_TORCH[:ROWS]
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
    model, rows = make_resnet(), KINDS["ResNet"].rows[:ROWS]
    model.train()(torch.stack([row["pixel_values"] for row in rows]))  # moves statistics
    model.save_pretrained(tmp_path / "saved")
    cls = transformers.ResNetForImageClassification
    pretrained = fzero.hf.from_pretrained(tmp_path / "saved", MESH, cls=cls)
    named = {
        "args": make_arguments(tmp_path, per_device_eval_batch_size=ROWS),
        "eval_dataset": KINDS["ResNet"].rows[:ROWS],
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
