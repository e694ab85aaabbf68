"""docs/metrics.md: its loop runs, and its table has the names that a meter has."""

from __future__ import annotations

import json
import re
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero
from fzero.metrics import values
from fzero.metrics.values import Measured, StepCosts, join_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_the_loop_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mesh = fzero.VirtualMesh(fsdp=2)

    def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = fzero.value_and_grad(lambda params, batch: (batch @ params["w"]).square().mean())(params, batch)
        return fzero.tree.map(lambda p, g: p - 0.1 * g, params, grads), opt_state, loss

    batch = torch.ones(4, 3)
    names: dict[str, Any] = {"fzero": fzero, "mesh": mesh, "step": fzero.simulate(train_step, mesh), "batch": batch}
    names |= {"params": fzero.partition({"w": torch.ones(3, 3)}, mesh), "opt_state": (), "batches": repeat(batch)}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], names)
    rows = [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 10, 20] and rows[2]["lr"] == 3e-3 and rows[2]["tflops"] > 0


def test_the_table_has_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"total_memory": 1 << 30}))
    memory = values.find_memory(torch.device("cuda", 0))
    costs: Any = StepCosts(None, 1, 0, 1, 1.0)  # type: ignore[arg-type]
    largest = memory | costs.predicted()
    found = join_ranks([Measured(0.5, {"grad_norm": 1.0}, largest, 1, 1.0, 0.5, 1, 1, 0, 1.0)], 1, "here")
    table = PAGE.partition("| name | what it is |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert sorted(named) == sorted(found) and len(memory) == 6
