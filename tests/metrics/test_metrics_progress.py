"""Progress of long work, through one callback."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fzero
import fzero.checkpoint
import fzero.metrics
from fzero.base.progress import Progress

OPTIMIZER = fzero.optim.sgd(0.1)


def train_step(params: Any, state: Any, x: Tensor) -> Any:
    grads = fzero.grad(lambda p: (x @ p["weight"].T + p["bias"]).square().mean())(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return fzero.optim.apply_updates(params, updates), state


def test_one_callback_hears_of_all_work(tmp_path: Path) -> None:
    mesh, heard = fzero.VirtualMesh(fsdp=2), list[Any]()
    with fzero.metrics.progress(heard.append, every=0.0):
        fzero.build(lambda: nn.Linear(4, 4), mesh)
        params = fzero.partition(fzero.lower(nn.Linear(4, 4))[0], mesh)
        fzero.simulate(train_step, mesh, memory="1MiB").trace(params, OPTIMIZER.init(params), torch.ones(2, 4))
        fzero.save_safetensors(params, tmp_path / "model.safetensors")
        fzero.checkpoint.save(tmp_path / "run", params, step=1, wait=False).wait()
        fzero.checkpoint.load(tmp_path / "run", params)
    count = len(heard)
    fzero.partition({"w": torch.ones(2)}, mesh)
    assert len(heard) == count, "behind the block nobody hears"
    works = {each.work: each for each in heard}
    assert works.keys() == {"building", "reading", "tracing", "passes", "searching", "writing"}
    last = {work: (each.done, each.total, each.units) for work, each in works.items() if each.total is not None}
    assert last["building"] == last["reading"] == (2, 2, "leaves")
    size = sorted((tmp_path / "run" / "step-1").glob("rank-*"))[-1].stat().st_size
    assert last["writing"] == (size, size, "bytes")
    assert works["tracing"].name == "train_step" and works["tracing"].at.startswith(__file__)
    assert str(works["building"]) == "leaves: 0 s of building, 2 of 2 leaves, now at weight"


def test_a_callback_hears_now_and_then_and_at_last() -> None:
    heard, now = list[Any](), 0.0
    with fzero.metrics.progress(heard.append, every=1.0), fzero.metrics.progress(lambda step: None):
        progress = Progress("planning", "x", "meshes", 4, clock=lambda: now)
        for now in (1.0, 1.2, 3.5, 3.6):  # noqa: B007 the clock reads it
            progress.count()
    assert [each.done for each in heard] == [1, 3, 4]
    with pytest.raises(fzero.FzeroError, match="every: is -1"):
        fzero.metrics.progress(print, every=-1.0)


def test_a_block_is_of_its_thread() -> None:
    heard = list[Any]()
    with fzero.metrics.progress(heard.append, every=0.0):
        thread = threading.Thread(target=lambda: Progress("passes", "x", "passes", 1).count())
        thread.start()
        thread.join()
    assert not heard
