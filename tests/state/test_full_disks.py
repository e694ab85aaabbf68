"""Disks that fail on one rank: all ranks raise the same error, which names the rank and the leaf, and all go on."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Outcome, Refusal, refusal, run_cases, values
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fzero
from fzero import checkpoint, initializers, optim, tree
from fzero.base.placement import Disk
from fzero.files import file

FULL = {"w": torch.arange(96.0).view(8, 12), "b": torch.arange(8.0)}
FAULTY = 1
"""The rank whose disk fails."""


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_luck(*_: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


FAULTS = {
    "no room": ("posix_fallocate", no_room, "No space left on device; the disk has "),
    "failed writes": ("pwritev", no_luck, "Input/output error, twice"),
}
"""How a disk fails: the call of the system, what it does, and what the error says."""


@contextmanager
def failing(fault: str) -> Iterator[None]:
    """Let the disk of one rank fail."""
    name, fail, _ = FAULTS[fault]
    call = getattr(os, name)
    if dist.get_rank() == FAULTY:
        setattr(file.os, name, fail)
    try:
        yield
    finally:
        setattr(file.os, name, call)


def partition(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    return fzero.partition(FULL, mesh, to=to)


def partition_a_state(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    return fzero.partition(fzero.State(params=FULL, opt_state={"mu": FULL}), mesh, to=to)


def partition_from_one_rank(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    return fzero.partition(FULL, mesh, to=to, source_rank=0, chunk=64)


def init(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    return fzero.init(FULL, mesh, lambda path, leaf: initializers.normal(), to=to)


def init_optimizer(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    return optim.adamw(0.1).init(fzero.partition(FULL, mesh), to=to)


def init_optimizer_beside_parameters(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    groups = {True: optim.adamw(0.1), False: optim.sgd(0.1, momentum=0.9)}
    return optim.multi_transform(groups, lambda path, leaf: leaf.ndim > 1).init(_lie_there(mesh, to))


def load_safetensors(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    return fzero.load_safetensors(path / "values.safetensors", FULL, mesh, to=to)


def load_checkpoint(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    return checkpoint.load(path / "saved", FULL, mesh, to=to)


def load_checkpoint_there(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    return checkpoint.load(path / "saved", _lie_there(mesh, to))


def quantize(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    return fzero.quantize(_lie_there(mesh, to), block=8, where="w")


def update_leaf(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    return fzero.update_leaf(_lie_there(mesh, to), "w", lambda w: torch.cat([w, w]))


def build(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    return fzero.build(lambda: nn.Linear(64, 64), mesh, to=to)


def build_small(mesh: DeviceMesh, to: Disk, path: Path) -> Any:
    """No tensor is cut over the ranks while it is made."""
    return fzero.build(lambda: nn.Linear(8, 8), mesh, to=to)


def _lie_there(mesh: DeviceMesh, to: Disk) -> Any:
    """Leaves in files, made while the disk works."""
    return _KNOWN[to]


_KNOWN: dict[Disk, Any] = {}
TOGETHER = (
    partition,
    partition_a_state,
    partition_from_one_rank,
    init,
    init_optimizer,
    init_optimizer_beside_parameters,
    load_safetensors,
    load_checkpoint,
    load_checkpoint_there,
    quantize,
    update_leaf,
)
"""Functions that put slices on a disk: all ranks raise one error."""
BUILDS = (build, build_small)
"""Others hear of the error of a rank, which raises it, as before a step."""


def attempt(use: Callable[..., Any], fault: str, path: Path, mesh: DeviceMesh) -> tuple[Refusal, bool]:
    """The error of a function where a disk fails, and whether all ranks go on."""
    folder = path / f"{use.__name__}, {fault}"  # of which no file has free room
    folder.mkdir(exist_ok=True)
    to = fzero.disk(folder)
    _KNOWN[to] = fzero.partition(FULL, mesh, to=to)
    with failing(fault):
        found = refusal(lambda: use(mesh, to, path))
    again = fzero.unpartition(fzero.partition(FULL, mesh, to=to))
    return found, all(map(torch.equal, tree.leaves(again), tree.leaves(FULL)))


def is_tried(use: Callable[..., Any], fault: str) -> bool:
    """`update_leaf` gathers while it writes, and agrees on room only."""
    return use is not update_leaf or fault == "no room"


CASES = [(use, fault) for use in (*TOGETHER, *BUILDS) for fault in FAULTS if is_tried(use, fault)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    path = tmp_path_factory.mktemp("disk")
    fzero.save_safetensors(FULL, path / "values.safetensors")
    checkpoint.save(path / "saved", FULL, step=1)
    return run_cases(2, {f"{use.__name__} {fault}": partial(attempt, use, fault, path) for use, fault in CASES})


@pytest.mark.parametrize(("use", "fault"), CASES)
def test_all_ranks_hear_of_a_disk_that_fails_on_one(
    use: Callable[..., Any], fault: str, outcomes: dict[str, list[Outcome]]
) -> None:
    found = values(outcomes[f"{use.__name__} {fault}"])
    assert all(goes_on for _, goes_on in found)
    messages = [told.message for told, _ in found]
    assert {told.kind for told, _ in found} == {"FzeroError"}, messages
    assert all(re.search(rf"bytes \d+ to \d+ cannot be written: {FAULTS[fault][2]}", x) for x in messages), messages
    told = messages[0]
    assert f"rank {FAULTY}" in told and "rank 0" not in told
    if use in TOGETHER:
        assert messages[0] == messages[1]
        assert f"rank {FAULTY} could not " in told and f"/rank-{FAULTY}." in told
    else:
        assert told.startswith(f"rank {FAULTY}: could not go on: FzeroError: ")


def test_a_rank_alone_raises_the_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual ranks have nobody to tell."""
    monkeypatch.setattr(file.os, "posix_fallocate", no_room)
    for make in (
        lambda mesh: fzero.partition(FULL, mesh, to=fzero.disk(tmp_path)),
        lambda mesh: optim.adamw(0.1).init(fzero.partition(FULL, mesh), to=fzero.disk(tmp_path)),
    ):
        with pytest.raises(
            fzero.FzeroError, match=r"^b in .*/all-ranks.b: bytes 0 to 4096 cannot be written: No space"
        ):
            make(fzero.VirtualMesh(fsdp=2))
