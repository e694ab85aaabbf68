"""The ds_configs of public projects, whole: each trains a tiny model, or is refused by key with the way out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer

import torch
from deepspeed_models import make_engine
from hf_models import make_arguments, make_dataset, make_model, read_logs
from test_docs import ROOT

import fzero.hf
from fzero import FzeroError, VirtualMesh
from fzero.deepspeed.reading import read_config
from fzero.deepspeed.settings import settle

sys.path.insert(0, str(ROOT / "tools"))

import deepspeed_projects

PROJECTS: list[dict[str, Any]] = json.loads((ROOT / "tests" / "deepspeed_projects.json").read_text())
TRAINED = [each for each in PROJECTS if not each["refused"]]
REFUSED = [each for each in PROJECTS if each["refused"]]


def name(each: dict[str, Any]) -> str:
    return f"{each['project']} {Path(each['file']).name}"


def train(each: dict[str, Any], folder: Path) -> list[float]:
    """The losses of a few updates on two virtual ranks."""
    config = each["config"]
    if each["by"] == "engine":
        engine = make_engine(config, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01))
        draws, losses = torch.Generator().manual_seed(0), []
        x, y = torch.randn(2 * engine.train_micro_batch_size_per_gpu(), 8, generator=draws), torch.tensor([1, 2])
        for _ in range(4 * engine.gradient_accumulation_steps()):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses
    named = {"learning_rate": 3e-3, "warmup_steps": 0, "max_steps": 4, **each["arguments"]}
    arguments = make_arguments(folder, **named)
    arguments.deepspeed = config
    rows = [make_dataset()[0]] * 32  # one batch again and again, whose loss falls
    trainer = fzero.hf.Trainer(make_model("bigram"), arguments, train_dataset=rows, mesh=VirtualMesh(fsdp=2))
    trainer.train()
    return [entry["loss"] for entry in read_logs(trainer)]


@pytest.mark.parametrize("each", TRAINED, ids=name)
def test_a_tiny_model_trains(each: dict[str, Any], tmp_path: Path) -> None:
    losses = train(each, tmp_path)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("each", REFUSED, ids=name)
def test_a_key_is_refused_with_the_way_out_and_without_the_key_the_file_is_read(
    each: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(FzeroError) as caught:
        train(each, tmp_path)
    assert each["refused"] in caught.value.where and caught.value.way_out
    block, _, key = each["refused"].rpartition(".")
    config = json.loads(json.dumps(each["config"]).replace("/nvme_data", str(tmp_path)))
    (config[block] if block else config).pop(key)
    if each["by"] == "Trainer":
        losses = train({**each, "config": config}, tmp_path)
        assert losses[-1] < losses[0]
    else:
        sizes = {} if "train_batch_size" in config else {"train_micro_batch_size_per_gpu": 1}  # of Lightning
        assert settle({**sizes, **read_config(config)}, 2).micro_batch_size >= 1


def test_ten_projects_are_named_in_the_documentation() -> None:
    assert len({each["project"] for each in PROJECTS}) >= 10
    assert deepspeed_projects.TABLE.read() == deepspeed_projects.render(), "run: python tools/deepspeed_projects.py"
