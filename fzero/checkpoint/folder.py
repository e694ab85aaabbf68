"""Folder: the names of checkpoints in a folder, how one appears and disappears, and who writes there.

    PATH/step-1200            a checkpoint: committed, complete
    PATH/step-1300.partial    one that is being written or removed, or that a killed process left behind
    PATH/step-1200.replaced   a checkpoint whose name another one is about to get, on a filesystem without an exchange
    PATH/.lock                the name of the process that writes, or wrote last

A checkpoint appears by one rename, and disappears by one. So at any moment a name without `.partial` is whole. Order is
that of the step numbers: no clock is asked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fzero.base.errors import FzeroError
from fzero.checkpoint.manifest import MANIFEST
from fzero.ranks.processes import find_end, name_process
from fzero.state.publishing import REPLACED
from fzero.state.safetensors.transfer import sync_directory

PARTIAL = ".partial"
LOCK = ".lock"
NAME = re.compile(rf"(?P<whole>step-(?P<step>0|[1-9][0-9]*))(?P<ending>|{re.escape(PARTIAL)}|{re.escape(REPLACED)})")
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""Errors of a filesystem without locks."""
HELD_BY_OTHERS = (errno.EACCES, errno.EAGAIN)
PATIENCE = 0.5
"""Seconds after which a save that finds the folder locked tries once more."""

_held: set[tuple[int, Path]] = set()
"""The process and the folders that it holds: a lock of a file keeps out other processes only."""


def list_steps(path: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in order. A folder that is not there has none.

    Raises:
        FzeroError: for a folder that cannot be read.
    """
    try:
        found = {int(name["step"]) for name in _list_names(path) if name["ending"] != PARTIAL}
        return sorted(step for step in found if (find_folder(path, step) / MANIFEST).is_file())
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise FzeroError(str(error.filename or path), problem, "give a folder of checkpoints") from error


def _list_names(path: Path) -> list[re.Match[str]]:
    """The names in a folder that are those of checkpoints, or of parts of one."""
    try:
        return [match for match in map(NAME.fullmatch, os.listdir(path)) if match]
    except FileNotFoundError:
        return []


def find_folder(path: Path, step: int) -> Path:
    """The folder that has a checkpoint, under its other name where a killed save was replacing it."""
    folder, replaced = step_folder(path, step), path / f"step-{step}{REPLACED}"
    return replaced if replaced.exists() and not folder.exists() else folder


def step_folder(path: Path, step: int) -> Path:
    """The folder of one checkpoint."""
    return path / f"step-{step}"


def partial_folder(path: Path, step: int) -> Path:
    """The folder of a checkpoint that is being written or removed."""
    return path / f"step-{step}{PARTIAL}"


@contextmanager
def open_partial(path: Path, step: int) -> Iterator[None]:
    """Make the empty folder of a checkpoint that is about to be written, and keep other processes out of `path` within
    the block. What killed saves left is removed before, and what is still there of this one is removed at the end.

    Raises:
        FzeroError: with the owner's name, where another process writes into `path`.
    """
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True)
        sync_directory(path.parent)
    with _hold(path):
        _remove_leftovers(path)
        partial_folder(path, step).mkdir()
        try:
            yield
        finally:
            with suppress(OSError):  # the next save tries again
                _remove_entry(partial_folder(path, step))


def check_free(path: Path, step: int, overwrite: bool) -> None:
    """Raise where something has the name of a checkpoint, but with `overwrite` not for a checkpoint."""
    target = step_folder(path, step)
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not (target / MANIFEST).is_file():
        raise FzeroError(
            str(target), "is there already, and is no folder of a checkpoint", "move it, or give another step"
        )
    if not overwrite:
        raise FzeroError(str(target), "is there already", "give another step, or overwrite=True")


def remove(path: Path, step: int) -> None:
    """Remove a checkpoint. Where this is interrupted, the rest is a leftover. Warns where it cannot be done."""
    folder, partial = step_folder(path, step), partial_folder(path, step)
    with _warn(folder):
        os.rename(folder, partial)
        sync_directory(path)
        _remove_entry(partial)


def remove_leftovers_of_dead(path: Path) -> None:
    """Remove what a killed save left in a folder, where the process that wrote there last was one of this host, and has
    ended. For readers: raises nothing, and does nothing where a save may be under way."""
    with suppress(OSError, ValueError, FzeroError):
        left = [name for name in _list_names(path) if name["ending"]]
        writer = (path / LOCK).read_text().partition("\n")[2].strip() if left else ""
        if find_end(writer) and os.access(path, os.W_OK):
            with _hold(path):
                _remove_leftovers(path)


def _remove_leftovers(path: Path) -> None:
    """Remove what killed saves left in a folder. A checkpoint that one was replacing gets its name back."""
    for name in _list_names(path):
        entry, whole = path / name[0], path / name["whole"]
        if name["ending"] == REPLACED and not os.path.lexists(whole):
            os.rename(entry, whole)
        elif name["ending"]:
            with _warn(entry):
                _remove_entry(entry)


def _remove_entry(entry: Path) -> None:
    """Remove a folder. Of a link, only the link."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)


@contextmanager
def _warn(entry: Path) -> Iterator[None]:
    """Warn where something cannot be removed. No reason to fail a save: what is in its way is an error of its own."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{entry} could not be removed: {error}; the next save tries again", RuntimeWarning, stacklevel=3)


@contextmanager
def _hold(path: Path) -> Iterator[None]:
    """Keep other saves from writing into a folder within the block. A killed process holds nothing.

    Raises:
        FzeroError: with the owner's name, where another process holds the folder, or another save of this one.
    """
    key = os.getpid(), path.resolve()
    if key in _held:  # and do not open the file: to close it would give up the lock
        raise FzeroError(str(path), "another save of this process is writing there", "wait for that one first")
    # Not flock, and not on the folder: a forked child of a killed process would go on holding a flock.
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _held.add(key)
    try:
        _lock(fd, path)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n{name_process()}\n".encode(), 0)
        yield
    finally:
        _held.discard(key)
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in HELD_BY_OTHERS:
                raise
            time.sleep(PATIENCE)  # a load that removes leftovers holds the lock for a moment
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD_BY_OTHERS:
            owner = os.pread(fd, 256, 0).decode(errors="replace").partition("\n")[0].strip() or "another process"
            way_out = "end that process, or give each job a folder of its own"
            raise FzeroError(str(path), f"{owner} is writing there", way_out) from error
        if error.errno not in NO_LOCKS:
            raise
