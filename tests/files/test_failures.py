"""Disks that fail: full, cut short, an error once and twice. Each is named, and the values that were lost stay lost."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import layers, rows, training

import fzero
from fzero import checkpoint, optim, tree
from fzero.base.errors import FzeroError
from fzero.base.placement import Disk
from fzero.files import allocate, file, write

VALUES = torch.arange(5000.0)
PLACE = r"blocks.0.up in .*/rank-0.blocks.0: bytes 0 to 20480"


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """A tensor on disk."""
    made = allocate(Disk(tmp_path), torch.float32, 5000, 0, "blocks.0", "blocks.0.up")
    made.copy_(VALUES)
    return made


def fail(monkeypatch: pytest.MonkeyPatch, name: str, code: int, times: int = 1) -> list[int]:
    """Let a call of `os` fail so many times. Returns a list of the failures."""
    call: Callable[..., Any] = getattr(os, name)
    failed: list[int] = []

    def strike(*args: Any) -> Any:
        if len(failed) < times:
            failed.append(code)
            raise OSError(code, os.strerror(code))
        return call(*args)

    monkeypatch.setattr(file.os, name, strike)
    return failed


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_an_error_once_is_a_line_in_the_log(
    made: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert fail(monkeypatch, name, errno.EIO) == []
    with caplog.at_level(logging.WARNING, "fzero"):
        made.copy_(VALUES + 1)
        assert torch.equal(made.clone(), VALUES + 1)
    (line,) = caplog.messages
    assert "blocks.0.up in" in line and "bytes 0 to 20480" in line and "Input/output error; trying again" in line


@pytest.mark.parametrize(("name", "what"), [("preadv", "read"), ("pwritev", "written")])
def test_an_error_twice_names_leaf_file_and_bytes(
    made: Any, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, name, errno.EIO, times=2)
    with pytest.raises(FzeroError, match=rf"{PLACE} cannot be {what}: Input/output error, twice; .*last checkpoint"):
        made.add(1) if what == "read" else made.copy_(VALUES)


def test_values_that_were_not_written_cannot_be_read_until_all_are_written(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "pwritev", errno.EIO, times=2)
    started = write([VALUES[:7] + 1], [made[:7]])
    for _ in range(2):  # also where nobody waited for the write
        with pytest.raises(FzeroError, match="bytes 0 to 4096 cannot be written"):
            made.clone()
    made[7:].copy_(VALUES[7:])
    with pytest.raises(FzeroError, match="bytes 0 to 4096 cannot be written"):
        made[:3].clone()
    with pytest.raises(FzeroError, match="bytes 0 to 4096 cannot be written"):
        started.wait()
    made.copy_(VALUES)
    assert torch.equal(made.clone(), VALUES)


def test_a_disk_that_is_full_while_it_is_written_is_not_tried_again(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = fail(monkeypatch, "pwritev", errno.ENOSPC, times=9)
    with pytest.raises(FzeroError, match=rf"{PLACE} .*No space left on device; the disk has \d+ bytes free; .*room"):
        made.copy_(VALUES)
    assert len(failed) == 1


def test_state_that_finds_no_room_is_refused_when_it_is_made(made: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(
            FzeroError, match=r"x in .*: bytes 20480 to 4022272 cannot be written: File too large.*ulimit -f"
        ):
            allocate(made.place, torch.float32, 1_000_000, 0, "blocks.0", "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = allocate(made.place, torch.float32, 1_000_000, 0, "blocks.0", "x")
    assert again.extent.start == 20480  # what was refused holds no room
    again[-5000:].copy_(VALUES)
    assert torch.equal(made.clone(), VALUES) and torch.equal(again[-5000:].clone(), VALUES)


def test_a_folder_that_was_removed_is_named_where_a_new_file_is_made(made: Any) -> None:
    shutil.rmtree(made.place.path)
    assert torch.equal(made.clone(), VALUES)  # the file is open, and goes with the process
    with pytest.raises(FzeroError, match=r"rank-0.other: cannot be opened: its folder was removed .* last checkpoint"):
        allocate(made.place, torch.float32, 5000, 0, "other", "x")


@pytest.mark.parametrize("size", [0, 4096, 5000, 20479])
def test_a_file_that_was_cut_short_is_named(made: Any, size: int) -> None:
    os.ftruncate(made.extent.file._fd, size)
    with pytest.raises(FzeroError, match=rf"blocks.0.up in .* to 20480 cannot be read: the file was cut to {size} byt"):
        made.clone()
    for make_it_longer in (lambda: made.copy_(VALUES), lambda: torch.empty_like(made)):  # zeros would stand for values
        with pytest.raises(FzeroError, match=rf"blocks.0.up in .* cannot be written: the file was cut to {size} bytes"):
            make_it_longer()


@pytest.mark.parametrize("move", ["read", "written"])
def test_a_file_that_grows_while_its_size_is_asked_for_was_not_cut(
    made: Any, move: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, grown = os.fstat, list[Any]()

    def ask_and_grow(fd: int) -> os.stat_result:
        found = ask(fd)
        if not grown:
            grown.append("once")
            grown.append(torch.empty_like(made))
        return found

    monkeypatch.setattr(file.os, "fstat", ask_and_grow)
    assert torch.equal(made.clone() if move == "read" else made.copy_(VALUES).clone(), VALUES)
    assert grown[1].extent.start == 20480


def test_a_limit_that_is_met_in_a_write_is_named_by_its_own_error(made: Any) -> None:
    """The system writes the bytes below the limit, and refuses the others at the next call."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(FzeroError, match=r"blocks.0.up .* cannot be written: File too large; .*ulimit -f"):
            made.copy_(VALUES + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    made.copy_(VALUES + 2)
    assert torch.equal(made.clone(), VALUES + 2)


def test_a_filesystem_that_refuses_direct_access_is_read_through_its_cache(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = fail(monkeypatch, "pwritev", errno.EINVAL)
    made[3:-3].fill_(4)
    assert torch.equal(made.clone()[2:5], torch.tensor([2.0, 4.0, 4.0]))
    assert len(failed) == 1 and not made.extent.file._is_direct


def test_a_child_process_is_told_whose_values_these_are(made: Any) -> None:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            made.clone()
        except FzeroError as error:
            os.write(send, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    expected = f"blocks.0.up: lies in a file of process {os.getpid()}, and this is its child {child}; use the value in"
    assert os.read(receive, 1000).decode().startswith(expected)
    assert torch.equal(made.clone(), VALUES)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_the_last_checkpoint_goes_on_when_the_disk_failed_in_a_step(
    tmp_path: Path, donate: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, place, adamw = fzero.VirtualMesh(fsdp=2), fzero.disk(tmp_path), optim.adamw(0.1)
    step, batch = fzero.simulate(training(adamw), mesh, donate=donate), rows(mesh)

    def start(to: Any) -> Any:
        params = fzero.partition(layers(), mesh, to=to)
        return params, adamw.init(params, to=to)

    resident = start(None)
    for _ in range(3):
        *resident, _ = step(*resident, batch)
    params, state, _ = step(*start(place), batch)
    checkpoint.save(tmp_path / "run", (params, state), step=1)
    with monkeypatch.context() as patch:
        fail(patch, name, errno.EIO, times=1000)
        with pytest.raises(FzeroError, match=r"^layers\.\d.* in .*-\w+\.layers\.\d: bytes .*Input/output error, twice"):
            step(params, state, batch)
    state = checkpoint.load(tmp_path / "run", (params, state))
    for _ in range(2):
        *state, _ = step(*state, batch)
    pairs = zip(tree.leaves(fzero.unpartition(state)), tree.leaves(fzero.unpartition(resident)), strict=True)
    assert all(torch.equal(got, expected) for got, expected in pairs)


def test_three_kills() -> None:
    script = Path(__file__).with_name("kills.py")
    done = subprocess.run([sys.executable, str(script), "--kills=3"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 kills: ")


def test_nobody_else_finds_the_file_to_cut_it_and_make_it_longer(made: Any) -> None:
    """A file that is as long as before would have zeros in the place of values."""
    assert list(made.place.path.rglob("*")) == []
    with pytest.raises(FileNotFoundError):
        os.truncate(made.extent.file.path, 0)
    assert torch.equal(made.clone(), VALUES)


@pytest.mark.parametrize("codes", [[errno.EOPNOTSUPP], [errno.EISDIR, errno.EINVAL, errno.EISDIR], [errno.EINVAL]])
def test_filesystems_without_unnamed_files_or_direct_access(
    tmp_path: Path, codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, rest = os.open, list(codes)

    def strike(path: Any, flags: int, *mode: Any) -> int:
        fd = call(path, flags, *mode)
        if rest:
            os.close(fd)
            raise OSError(rest[0], os.strerror(rest.pop(0)))
        return fd

    monkeypatch.setattr(file.os, "open", strike)
    made = allocate(Disk(tmp_path), torch.float32, 5000, 0, "blocks.0", "x")
    made.copy_(VALUES)
    assert torch.equal(made.clone(), VALUES) and list(tmp_path.iterdir()) == [] and not rest


def test_a_killed_process_leaves_nothing_though_its_child_lives(tmp_path: Path) -> None:
    """A worker of a DataLoader, which was forked, outlives its rank for a while."""
    receive, send = os.pipe()
    parent = os.fork()
    if parent == 0:
        held = allocate(Disk(tmp_path), torch.float32, 5000, 0, "blocks.0", "x")
        child = os.fork()
        if child == 0:
            signal.pause()
        os.write(send, str(child if held.numel() else 0).encode())
        signal.pause()
    child = int(os.read(receive, 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        again = allocate(Disk(tmp_path), torch.float32, 5000, 0, "blocks.0", "x")
        assert list(tmp_path.iterdir()) == []
        again.copy_(VALUES)
        assert torch.equal(again.clone(), VALUES)
    finally:
        os.kill(child, signal.SIGKILL)


def test_folders_that_cannot_take_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, problem in {"file": "is there, and is no folder", "none": "is no folder"}.items():
        with pytest.raises(FzeroError, match=rf"disk '.*/{path}': {problem}; give the path of a folder"):
            allocate(Disk(tmp_path / path), torch.float32, 5, 0, "b", "x")
    with pytest.raises(FzeroError, match=r"path: is .a.x00b.; give a text or a path"):
        fzero.disk("a\0b")
    for text in "", "~no-such-user/x", "x" * 5000:
        with pytest.raises(FzeroError, match="^disk '.*': is (no folder|an empty path); give the path of a folder"):
            fzero.disk(text)
    if os.geteuid() != 0:  # root may write everywhere
        tmp_path.chmod(0o500)
        with pytest.raises(FzeroError, match=f"cannot be written to by user {os.getuid()}"):
            allocate(Disk(tmp_path), torch.float32, 5, 0, "b", "x")
        tmp_path.chmod(0o700)
