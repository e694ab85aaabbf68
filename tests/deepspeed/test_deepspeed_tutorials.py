"""The calls of DeepSpeed's tutorials, in one process of their own: DeepSpeed's numbers, or the error that is said."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import deepspeed_tutorials as tutorials
import pytest
import torch
from processes import run_script
from test_docs import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import deepspeed_table


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `fzero.deepspeed` makes of each case."""
    out = tmp_path_factory.mktemp("tutorials") / "found.json"
    run_script(Path(tutorials.__file__), "fzero.deepspeed", str(out))
    return dict(json.loads(out.read_text()))


@pytest.mark.parametrize("name", tutorials.CASES)
def test_a_tutorial_runs_or_says_what_is_missing(name: str, found: dict[str, Any]) -> None:
    each, result = tutorials.CASES[name], found[name]
    if each.refused:
        assert result.startswith("FzeroError: ") and each.refused in result
        return
    assert isinstance(result, list), result
    assert result and all(map(math.isfinite, result))
    if each.compare:
        expected = json.loads(deepspeed_table.RESULTS.read_text())[name]
        assert result == pytest.approx(expected, rel=2e-5)  # sums of float32 in another order, and Adam's roots


def test_cases_without_deepspeeds_numbers_are_equal_to_torch(found: dict[str, Any]) -> None:
    """Those that DeepSpeed does not run on a CPU. The GAN is compared in test_deepspeed_outputs."""
    model, losses = tutorials.Loss(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for x, y in tutorials.batches():
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert found["client_adam"] == pytest.approx(losses * 2, rel=1e-5)
    assert found["activations"] == pytest.approx(found["getting_started"], rel=1e-6)


def test_the_table_of_tutorials_is_current() -> None:
    assert deepspeed_table.TABLE.read() == deepspeed_table.render(), "run: python tools/deepspeed_table.py"
