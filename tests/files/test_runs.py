"""Folders of runs: a live one is left alone, and a dead one is removed by the next run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fzero.base.errors import FzeroError
from fzero.base.placement import disk
from fzero.files.runs import Run, remove_dead


def list_runs(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_run_removes_its_folder_and_leaves_that_of_a_live_one(tmp_path: Path) -> None:
    first, second = Run(tmp_path), Run(tmp_path)
    (first.folder / "rank-0.bucket").write_bytes(b"state")
    remove_dead(tmp_path)
    assert list_runs(tmp_path) == sorted([first.folder.name, second.folder.name])
    first.end()
    assert list_runs(tmp_path) == [second.folder.name]
    second.end()
    assert list_runs(tmp_path) == []


def test_the_folder_of_a_killed_run_is_removed_by_the_next_one(tmp_path: Path) -> None:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        held = Run(tmp_path)
        (held.folder / "rank-0.bucket").write_bytes(b"state")
        os.write(send, held.folder.name.encode())
        signal.pause()
    try:
        name = os.read(receive, 100).decode()
        remove_dead(tmp_path)
        assert list_runs(tmp_path) == [name]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    run = Run(tmp_path)
    assert list_runs(tmp_path) == [run.folder.name]
    run.end()


def test_a_folder_without_a_lock_is_that_of_a_dead_run(tmp_path: Path) -> None:
    (tmp_path / "run-half").mkdir()
    (tmp_path / "of-the-user").mkdir()
    remove_dead(tmp_path)
    assert list_runs(tmp_path) == ["of-the-user"]


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(FzeroError, match=r"disk '.*/file': is there, and is no folder; give the path of a folder"):
        Run(file)
    with pytest.raises(FzeroError, match=r"disk '.*/none': is no folder; give the path of a folder that is there"):
        Run(tmp_path / "none")


@pytest.mark.parametrize("path", ["", "~no-such-user/x", "x" * 5000, "a\0b"])
def test_a_text_that_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(FzeroError, match="^disk '.*': is (no folder|an empty path); give the path of a folder"):
        disk(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(FzeroError, match=f"cannot be written to by user {os.getuid()}"):
        Run(tmp_path)
    tmp_path.chmod(0o700)
