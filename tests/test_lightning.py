"""Lightning's Trainer with fzero's Strategy trains, saves and goes on as it does with its own, to 1e-6."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import fzero
from fzero.lightning import Strategy

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make()
        self.register_buffer("count", torch.zeros(()))
        self.losses, self.scores = list[float](), list[float]()

    def make(self) -> None:
        self.model = Classifier()

    def compute(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.compute(batch)
        self.count += 1
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.scores.append(self.compute(batch).item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Manual(Module):
    """Optimizes by hand: an update for each batch, of half the loss."""

    automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, number) / 2
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.2)
        optimizer.step()
        self.lr_schedulers().step()


class OwnForward(Module):
    """Has its layers itself, beside a module without parameters."""

    def make(self) -> None:
        self.first, self.second, self.loss = nn.Linear(8, 16), nn.Linear(16, 4), nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def compute(self, batch: Any) -> Tensor:
        return self.loss(self(batch[0]), batch[1])


class OwnLoss(Module):
    """Its model returns the loss, so that one program computes gradients too."""

    def make(self) -> None:
        class WithLoss(Classifier):
            def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
                return {"loss": F.cross_entropy(super().forward(x), y)}

        self.model = WithLoss()

    def compute(self, batch: Any) -> Tensor:
        return self.model(*batch)["loss"]


class Changing(OwnLoss):
    """Changes its model between calls, and the loss that the model returned."""

    def make(self) -> None:
        class Scaled(Classifier):
            def __init__(self) -> None:
                super().__init__()
                self.power = 0
                self.register_buffer("scale", torch.ones(()))

            def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
                return {"loss": F.cross_entropy(super().forward(x) * self.scale**self.power, y)}

        self.model = Scaled()

    def training_step(self, batch: Any, number: int) -> Any:
        self.model.power = number % 2
        self.model.scale.fill_(2 + number // 2)
        loss = super().training_step(batch, number)
        loss *= 3
        return loss

    def backward(self, loss: Tensor, *args: Any, **named: Any) -> None:
        (loss / 2).backward(*args, **named)


def loader() -> Any:
    draws = torch.Generator().manual_seed(1)
    rows = [(torch.randn(8, generator=draws), torch.randint(4, (), generator=draws)) for _ in range(24)]
    return DataLoader(rows, batch_size=4)


def make_trainer(strategy: Any, folder: Path, **named: Any) -> L.Trainer:
    named = {"max_epochs": 1, "enable_checkpointing": False, **named}
    return L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=folder, **named,
    )  # fmt: skip


def strategy(ranks: int = 2) -> Strategy:
    return Strategy(mesh=fzero.VirtualMesh(fsdp=ranks))


CASES: dict[str, tuple[type[Module], dict[str, Any], float]] = {
    "accumulation and a norm": (Module, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.3}, 1e-6),
    "by hand": (Manual, {}, 1e-6),
    "a forward of its own": (OwnForward, {"accumulate_grad_batches": 2}, 1e-6),
    "a loss of its own, values are clipped": (
        OwnLoss,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        1e-6,
    ),
    "a model and a loss that change": (Changing, {}, 1e-6),
    "float64": (Module, {"precision": "64-true"}, 1e-14),
    "autocast": (OwnForward, {"precision": "bf16-mixed"}, 2e-3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_module_trains_as_with_lightnings_own_strategy(case: str, tmp_path: Path) -> None:
    cls, named, apart = CASES[case]
    plain, ours = cls(), cls()
    make_trainer("auto", tmp_path, **named).fit(plain, loader(), loader())
    make_trainer(strategy(), tmp_path, **named).fit(ours, loader(), loader())
    assert len(ours.losses) == 6 and len(ours.scores) == len(plain.scores)
    assert ours.losses == pytest.approx(plain.losses, abs=apart)
    assert ours.scores == pytest.approx(plain.scores, abs=apart)


def test_training_goes_on_from_a_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    plain, first, second = Module(), Module(), Module()
    make_trainer("auto", tmp_path, max_epochs=2).fit(plain, loader())
    trainer = make_trainer(strategy(), tmp_path)
    trainer.fit(first, loader())
    for _ in range(2):  # the second save takes the place of the first
        trainer.save_checkpoint(tmp_path / "whole")
    trainer.strategy.checkpoint_io.save_checkpoint = fill_disk  # a save that fails leaves the one before
    with pytest.raises(fzero.FzeroError, match="whole: .*No space left"):
        trainer.save_checkpoint(tmp_path / "whole")
    trainer = make_trainer(strategy(4), tmp_path, max_epochs=2)
    trainer.fit(second, loader(), ckpt_path=tmp_path / "whole")
    assert [*first.losses, *second.losses] == pytest.approx(plain.losses, abs=1e-6)
    assert second.count == plain.count == 12

    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    read = Module.load_from_checkpoint(tmp_path / "weights.ckpt")
    torch.testing.assert_close(dict(read.state_dict()), dict(plain.state_dict()))

    trainer = make_trainer(strategy(), tmp_path)
    found = trainer.validate(read, loader(), verbose=False)
    make_trainer("auto", tmp_path).validate(plain, loader(), verbose=False)
    assert read.scores == pytest.approx(plain.scores, abs=1e-6) and found == [{}]
    with pytest.raises(fzero.FzeroError, match=r"weights.ckpt: has no slices of this model; give a folder that"):
        trainer.validate(read, loader(), ckpt_path=tmp_path / "weights.ckpt")


def test_a_trainer_fits_twice(tmp_path: Path) -> None:
    plain, ours = OwnForward(), OwnForward()
    for module, how in ((plain, "auto"), (ours, strategy())):
        trainer = make_trainer(how, tmp_path)
        trainer.fit(module, loader())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader())
    assert len(ours.losses) == 12 and ours.losses == pytest.approx(plain.losses, abs=1e-6)


def fill_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


class TwoOptimizers(Module):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class TwoModels(OwnForward):
    forward = L.LightningModule.forward


class ReadsValues(Module):
    def compute(self, batch: Any) -> Tensor:
        return super().compute(batch) + self.model.first.weight.square().sum()


class CallsAChild(OwnForward):
    def compute(self, batch: Any) -> Tensor:
        return self.loss(self.second(torch.tanh(self.first(batch[0]))), batch[1])


REFUSED: dict[str, tuple[type[Module], dict[str, Any], str]] = {
    "optimizers": (TwoOptimizers, {}, "configure_optimizers: returns 2 optimizers; return one"),
    "models": (TwoModels, {}, "TwoModels: has parameters in first, second; put what computes"),
    "values": (ReadsValues, {}, r"model: first.weight: square needs values, which are in slices since trainer.fit"),
    "children": (CallsAChild, {}, r"model: first.weight: linear needs values, which are in slices since trainer.fit"),
    "batch norms": (Module, {"sync_batchnorm": True}, "Trainer: sync_batchnorm: is True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused(case: str, tmp_path: Path) -> None:
    cls, named, message = REFUSED[case]
    with pytest.raises(fzero.FzeroError, match=message):
        make_trainer(strategy(), tmp_path, **named).fit(cls(), loader())


def test_another_precision_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = make_trainer(strategy(), tmp_path)
    monkeypatch.setattr(type(trainer), "precision", "16-mixed")  # which Lightning refuses on CPUs itself
    with pytest.raises(fzero.FzeroError, match="Trainer: precision: is '16-mixed'; give one of 32-true"):
        trainer.fit(Module(), loader())


def test_two_ranks_train_as_under_ddp(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as an agent of torchrun has one
    run(2, check_rank, store.port, tmp_path, lost=(), timeout=240.0)


def check_rank(mesh: DeviceMesh, port: int, folder: Path) -> None:
    """What each of two ranks does, with what torchrun tells it: train under DDP and here, save, and go on here."""
    rank = str(mesh.get_rank())
    dist.destroy_process_group()  # Lightning makes its own
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
    os.environ |= told | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    modules = Module(), Module(), Module()
    named: Any = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False}
    named |= {"enable_model_summary": False, "gradient_clip_val": 0.3, "default_root_dir": folder}
    checkpoints = L.pytorch.callbacks.ModelCheckpoint(folder / "saved", save_last=True)
    trainers = [
        L.Trainer(strategy="ddp", max_epochs=2, enable_checkpointing=False, **named),
        L.Trainer(strategy=Strategy(), max_epochs=1, callbacks=[checkpoints], **named),
        L.Trainer(strategy=Strategy(stage=2), max_epochs=2, enable_checkpointing=False, **named),
    ]
    for module, trainer, path in zip(modules, trainers, (None, None, folder / "saved" / "last.ckpt")):
        trainer.fit(module, loader(), loader(), ckpt_path=path)
    plain, first, second = modules
    assert (len(first.losses), len(second.losses)) == (3, 3)  # this rank's half of each epoch
    assert [*first.losses, *second.losses] == pytest.approx(plain.losses, abs=1e-6)
    assert [*first.scores[-3:], *second.scores[-3:]] == pytest.approx(plain.scores[-6:], abs=1e-6)
