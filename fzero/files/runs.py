"""Runs: the folder in which one process keeps its files, and what is left of processes that died.

    PATH/run-4f1c90aa        the files of one process
    PATH/run-4f1c90aa/lock   a file that the process holds locked while it lives

The system drops the lock of a process that ends in any way. Whoever gets the lock of a folder may remove the folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from fzero.base.errors import FzeroError
from fzero.base.placement import check_folder

PREFIX = "run-"
LOCK = "lock"


class Run:
    """A new folder below a path, which this process holds locked. Making one removes the folders of dead runs."""

    def __init__(self, path: Path) -> None:
        check_folder(path)
        remove_dead(path)
        self.folder, self._lock = _make_folder(path)
        self._owner = os.getpid()

    def end(self) -> None:
        """Remove the folder and drop the lock. A child process, which has only a copy of this object, does nothing."""
        if os.getpid() == self._owner:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)


def remove_dead(path: Path) -> None:
    """Remove the folders of runs below a path that nobody holds locked."""
    for folder in path.glob(f"{PREFIX}*"):
        lock = _try_to_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _make_folder(path: Path) -> tuple[Path, int]:
    """A new folder and its lock. Another process may take a folder for a dead one before the folder is locked."""
    while True:
        folder = path / f"{PREFIX}{secrets.token_hex(4)}"
        try:
            folder.mkdir()
        except OSError as error:
            way_out = "give a folder on a disk with room"
            raise FzeroError(f"disk {str(path)!r}", f"cannot be written to: {error.strerror}", way_out) from error
        lock = _try_to_lock(folder)
        if lock is not None:
            if (folder / LOCK).exists():
                return folder, lock
            os.close(lock)


def _try_to_lock(folder: Path) -> int | None:
    """The lock of a run's folder; None where another process has the lock, or the folder is gone.

    Raises:
        FzeroError: for a filesystem without locks.
    """
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # it is gone, or belongs to another user
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except OSError as error:
        os.close(lock)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        problem = f"has a filesystem that cannot lock files: {error.strerror}"
        raise FzeroError(f"disk {str(folder.parent)!r}", problem, "give a folder on a local disk") from error
