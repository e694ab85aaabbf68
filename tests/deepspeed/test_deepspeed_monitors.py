"""Monitors and the profile: DeepSpeed's files and names, the program's own flops, and one rank that writes."""

from __future__ import annotations

import csv
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed_models import make_batches, make_engine, run_loop

from fzero import FzeroError, VirtualMesh, simulate
from fzero.deepspeed.monitors import Event, Monitors
from fzero.deepspeed.profiling import render_profile
from fzero.deepspeed.reading import read_config
from fzero.deepspeed.settings import settle

BATCH = {"train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
CONFIG = BATCH | {
    "fp16": {"enabled": True, "initial_scale_power": 20},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}


def read_rows(path: Path) -> list[list[str]]:
    return list(csv.reader(path.read_text().splitlines()))


def find_options(block: str, **options: Any) -> dict[str, dict[str, Any]]:
    """The options of one monitor, as a configuration that gives some of them says."""
    return settle(read_config(BATCH | {block: {"enabled": True, **options}}), 2).monitors


def test_an_engine_writes_the_files_of_deepspeed_and_profiles_one_update(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fzero")
    profile = {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "new" / "profile.txt")}
    place = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = make_engine(CONFIG | {"csv_monitor": place, "flops_profiler": profile, "wall_clock_breakdown": True})
    losses = run_loop(engine, make_batches(4))
    engine.train_batch(iter(make_batches(2)))
    # DeepSpeed 0.19.8 writes lr and loss_scale by these names, at the examples behind the update
    rows = {path.name: read_rows(path) for path in (tmp_path / "job").iterdir()}
    assert rows.keys() == {f"Train_Samples_{name}.csv" for name in ("train_loss", "lr", "loss_scale")}
    assert rows["Train_Samples_lr.csv"] == [["step", "lr"], ["16", "0.01"], ["32", "0.01"], ["48", "0.01"]]
    scales = rows["Train_Samples_loss_scale.csv"]
    assert scales[0] == ["step", "loss_scale"] and float(scales[-1][1]) == engine.loss_scale < float(scales[1][1])
    found = [float(value) for _, value in rows["Train_Samples_train_loss.csv"][1:3]]
    assert found == [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2]
    text = (tmp_path / "new" / "profile.txt").read_text()
    assert text.startswith("profile of update 2:") and f"{180:,}" in text and "head" in text
    assert caplog.text.count("forward and backward") == 3 and "step 3: forward and backward" in caplog.text


def test_other_ranks_than_0_write_nothing(tmp_path: Path) -> None:
    blocks = find_options("csv_monitor", output_path=str(tmp_path))
    Monitors(blocks, 1).write(None, [])
    assert not list(tmp_path.iterdir())


def test_monitors_that_are_off_are_none() -> None:
    assert settle(read_config(BATCH | {"wandb": {"enabled": False, "project": "x"}}), 2).monitors == {}


@pytest.mark.parametrize(("block", "package"), [("wandb", "wandb"), ("comet", "comet_ml"), ("tensorboard",) * 2])
def test_a_package_that_is_missing_is_named_on_each_rank(
    block: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for rank in (0, 1):
        with pytest.raises(FzeroError, match=rf"{block}\.enabled: needs the package {package}, which is not installed"):
            Monitors(find_options(block), rank)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FzeroError, match=r"csv_monitor\.output_path: the folder .* cannot be made: .*; give a folder"):
        Monitors(find_options("csv_monitor", output_path=str(tmp_path / "file")), 0)


class Recorder:
    """A stand-in for a package: it writes down what is called with what."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, *args, kwargs))
            return self

        return call


ENGINE = SimpleNamespace(get_lr=lambda: [0.5, 0.25], fp16_enabled=lambda: False, global_samples=16)
"""As much of an engine as a monitor asks."""


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, recorder: Any) -> None:
    monkeypatch.setitem(sys.modules, name, recorder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_services_get_deepspeeds_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Recorder()
    stand_in(monkeypatch, "wandb", wandb)
    Monitors(find_options("wandb", group="g", team="t"), 0).write(ENGINE, [torch.tensor(2.0), torch.tensor(4.0)])
    assert wandb.calls == [
        ("init", {"project": "deepspeed", "group": "g", "entity": "t"}),
        ("log", {"Train/Samples/train_loss": 3.0}, {"step": 16}),
        ("log", {"Train/Samples/lr": 0.5}, {"step": 16}),
    ]
    comet = Recorder()
    stand_in(monkeypatch, "comet_ml", comet)
    monitors = Monitors(find_options("comet", experiment_name="e", samples_log_interval=17), 0)
    for _ in range(2):  # the second update lies within the interval
        monitors.write(ENGINE, [torch.tensor(2.0)])
    assert [call[:2] for call in comet.calls[1:]] == [
        ("set_name", "e"), ("log_metric", "Train/Samples/train_loss"), ("log_metric", "Train/Samples/lr"),
    ]  # fmt: skip


def test_tensorboard_gets_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, module = Recorder(), ModuleType("torch.utils.tensorboard")
    folders: list[str] = []
    module.SummaryWriter = lambda log_dir: folders.append(log_dir) or writer  # type: ignore[attr-defined, func-returns-value]
    stand_in(monkeypatch, "torch.utils.tensorboard", module)
    Monitors(find_options("tensorboard", output_path=str(tmp_path), job_name="j"), 0).write(ENGINE, [torch.tensor(2.0)])
    assert folders == [str(tmp_path / "j")] and (tmp_path / "j").is_dir()
    expected = [Event("Train/Samples/train_loss", 2.0, 16), Event("Train/Samples/lr", 0.5, 16)]
    assert writer.calls == [*(("add_scalar", *each, {}) for each in expected), ("flush", {})]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_flops_are_counted_by_layer(stage: int) -> None:
    engine = make_engine(BATCH | {"zero_optimization": {"stage": stage}})
    rows, width = 4, 8  # of a rank; a product has 2 flops for each multiplication, forward and for both gradients
    layer = 2 * rows * width * width
    expected = {"blocks.0": 2 * layer, "blocks.1": 3 * layer, "head": 3 * layer // 2}  # the batch has no gradient
    flops = engine.report(*make_batches(1)[0]).flops
    assert flops == expected
    text = render_profile(
        engine, flops, {"forward and backward": 0.5}, {"profile_step": 1, "detailed": False, "top_modules": 1}
    )
    assert f"{sum(expected.values()) * 2 / 0.5:.3e}" in text and "blocks.1" in text and "blocks.0" not in text


def test_an_operation_without_a_leaf_counts_under_its_name() -> None:
    step = simulate(lambda x: x @ x.T, VirtualMesh(fsdp=2))
    assert step.report(torch.ones(4, 3)).flops == {"mm": 2 * 2 * 3 * 2}
