"""docs/variants.md: its code runs, its three passes are what they say, and its tables are true."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fzero
from fzero import tree

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "variants.md").read_text()
RANKS = 4

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the names of the page stand for once its code has run. Operations are defined once a process."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng():
        for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
            exec(compile(block, "docs/variants.md", "exec"), names)
    return names


def plain_losses(page: dict[str, Any], change: Callable[[list[Tensor], int], Tensor], steps: int = 3) -> list[float]:
    """The losses of a plain loop that updates by what `change` makes of a leaf's gradients, one of each rank."""
    params, optimizer, losses = page["whole_params"], page["optimizer"], []
    opt_state = optimizer.init(params)
    rows = [{key: x.chunk(RANKS)[rank] for key, x in page["batch"].items()} for rank in range(RANKS)]

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return (page["apply"](params, batch["x"]) - batch["y"]).square().mean()

    for number in range(steps):
        losses.append(torch.stack([loss_fn(params, row) for row in rows]).mean().item())
        grads = [fzero.grad(loss_fn)(params, row) for row in rows]
        updates, opt_state = optimizer.update(
            tree.map(lambda *each, number=number: change(list(each), number), *grads), opt_state, params
        )
        params = fzero.optim.apply_updates(params, updates)
    return losses


def test_each_rank_clips(page: dict[str, Any]) -> None:
    expected = plain_losses(page, lambda grads, _: torch.stack([x / x.norm().clamp(min=1) for x in grads]).mean(0))
    losses, _ = page["train"](page["clip_by_rank"], before="bucket", steps=3)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses != pytest.approx(plain_losses(page, lambda grads, _: torch.stack(grads).mean(0)), rel=1e-4)


def test_an_overflow_of_one_rank_is_left_out(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def mean(grads: list[Tensor], _: int) -> Tensor:
        return torch.stack(grads).nan_to_num(torch.nan, torch.nan, torch.nan).nanmean(0)

    assert page["train"](page["skip_overflows"], before="prefetch", steps=3)[0] == pytest.approx(
        plain_losses(page, mean)
    )
    x = page["batch"]["x"].clone()
    x[-1, 0] = torch.inf
    y = x[:-1].sum(1, keepdim=True)
    monkeypatch.setitem(page, "batch", {"x": x, "y": torch.cat([y, torch.zeros(1, 1)])})
    losses, program = page["train"](page["skip_overflows"], before="prefetch", steps=3)
    assert losses == pytest.approx(plain_losses(page, mean), nan_ok=True)
    assert {entry.op for entry in program.comm()} == {"all_gather", "all_to_all", "all_reduce"}


def test_gradients_are_smoothed(page: dict[str, Any]) -> None:
    averages: dict[Any, Tensor] = {}

    def smooth(grads: list[Tensor], number: int) -> Tensor:
        mean, key = torch.stack(grads).mean(0), grads[0].shape
        averages[key] = torch.lerp(averages.get(key, torch.zeros_like(mean)), mean, 0.5)
        return averages[key] / (1 - 0.5 ** (number + 1))

    losses, program = page["train"](page["smooth_gradients"], before="bucket", steps=3)
    assert losses == pytest.approx(plain_losses(page, smooth), rel=1e-5)
    assert next(state.path for state in program.pass_state) == "passes.step_count"


def test_the_gallery_trains(page: dict[str, Any]) -> None:
    """Workers that meet after two steps of four, by a pass and by hand."""
    assert len(page["by_pass"]) == 4 and page["by_pass"][-1] < page["by_pass"][0] and len(page["by_hand"]) == 4
    assert "replica" in {entry.axis for entry in page["program"].comm()}
