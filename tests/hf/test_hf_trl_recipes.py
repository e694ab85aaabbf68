"""The recipes of docs/finetune.md on two virtual ranks. `make trl` runs them, because most of them need TRL."""

from __future__ import annotations

import importlib
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")  # without which transformers has no Trainer
pytest.importorskip("peft")
pytest.importorskip("trl", reason="TRL is not installed: pip install fzero[trl]")

from safetensors.torch import load_file
from test_docs import ROOT

from fzero import VirtualMesh

sys.path.insert(0, str(ROOT / "examples"))

RECIPES = {
    "finetune_lora": "grad_norm",
    "finetune_qlora": "grad_norm",
    "finetune_dpo": "rewards/margins",
    "finetune_grpo": "reward",
}
"""Recipe -> what its logs have beside the loss."""
PAGE = (ROOT / "docs" / "finetune.md").read_text()


@pytest.mark.parametrize(("name", "logged"), RECIPES.items())
def test_a_recipe_trains_and_saves(name: str, logged: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    trainer = importlib.import_module(name).main(
        VirtualMesh(fsdp=2), 10 if name != "finetune_grpo" else 2, str(tmp_path)
    )
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2 and all(math.isfinite(entry[logged]) for entry in logs)
    (file,) = tmp_path.glob("*.safetensors")
    assert (file.name == "adapter_model.safetensors") is (name != "finetune_grpo") and load_file(file)
    if "lora" in name:  # ten updates of a new model learn no preferences
        assert logs[1]["loss"] < logs[0]["loss"]
    if name == "finetune_dpo":
        assert logs[1][logged] != 0


def test_long_sequences_need_less_memory(capsys: pytest.CaptureFixture[str]) -> None:
    losses = importlib.import_module("long_context").main(VirtualMesh(fsdp=2), 4, 256)
    assert losses[-1] < losses[0] - 0.3 and losses[0] == pytest.approx(math.log(259), abs=0.3)
    plain, parts, host = map(int, re.findall(r"\d+", capsys.readouterr().out.splitlines()[0]))
    assert 2 * parts < plain and host > 0


def test_each_recipe_is_short_and_on_the_page() -> None:
    for name in (*RECIPES, "long_context"):
        assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 60 and f"{name}.py" in PAGE
