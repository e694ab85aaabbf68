"""Saves of one mesh, one after the other: a thread that cannot start, and ranks that wait differently."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Refusal, refusal, run_cases, values
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero.checkpoint import load, save

SOON = 20.0


@contextmanager
def without_threads() -> Iterator[None]:
    """The process may have no further thread."""
    known = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = known  # type: ignore[method-assign]


def make(mesh: Any) -> Any:
    return fzero.partition({"a": torch.arange(12.0)}, mesh)


def save_without_a_thread(mesh: Any, path: Path, here: bool = True) -> list[list[float]]:
    """What two saves wrote, the first one on a process that may have no thread where `here`."""
    with without_threads() if here else nullcontext():
        save(path, make(mesh), step=1, wait=False)
    save(path, make(mesh), step=2, wait=False).wait()
    return [load(path, make(mesh), step=step)["a"].full_tensor().tolist() for step in (1, 2)]


def on_one_rank(mesh: DeviceMesh) -> list[list[float]]:
    return save_without_a_thread(mesh, make_folder(), dist.get_rank() == 1)


def waiting_on_one_rank(mesh: DeviceMesh) -> tuple[Refusal, list[list[float]]]:
    """The error of ranks that wait differently, and what they save afterwards."""
    path = make_folder()
    found = refusal(lambda: save(path, make(mesh), step=1, wait=dist.get_rank() == 1))
    return found, save_without_a_thread(mesh, path, here=False)


def make_folder() -> Path:
    """A folder that rank 0 makes."""
    made = [tempfile.mkdtemp()]
    dist.broadcast_object_list(made)
    return Path(made[0])


def test_a_save_whose_thread_cannot_start_writes_at_once(tmp_path: Path) -> None:
    assert save_without_a_thread(fzero.VirtualMesh(fsdp=2), tmp_path) == [list(range(12))] * 2


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    return run_cases(2, {case.__name__: case for case in (on_one_rank, waiting_on_one_rank)})


def test_the_others_write_with_a_rank_whose_thread_cannot_start(outcomes: dict[str, Any]) -> None:
    assert values(outcomes["on_one_rank"]) == [[list(range(12))] * 2] * 2


def test_ranks_that_wait_differently_are_told_and_save_again(outcomes: dict[str, Any]) -> None:
    for found, saved in values(outcomes["waiting_on_one_rank"]):
        assert found.kind == "FzeroError" and found.seconds < SOON, found
        assert "ranks call different functions" in found.message and "with wait=False" in found.message
        assert saved == [list(range(12))] * 2
