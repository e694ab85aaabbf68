"""Folder: the names of checkpoints in a folder, how one appears and disappears, and who writes there.

    PATH/step-1200            a checkpoint: committed, complete
    PATH/step-1300.partial    one that is being written or removed, or that a killed process left behind
    PATH/.lock                the name of the process that writes

A checkpoint appears by one rename, and disappears by one. So at any moment a name without `.partial` is whole. Order is
that of the step numbers: no clock is asked.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fzero.base.errors import FzeroError
from fzero.checkpoint.manifest import MANIFEST
from fzero.state.safetensors.transfer import sync_directory

PARTIAL = ".partial"
LOCK = ".lock"
NAME = re.compile(r"step-(0|[1-9][0-9]*)")
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Numbers of Linux for renameat2."""
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""Errors of a filesystem without locks."""


def list_steps(path: Path) -> list[int]:
    """The steps of the checkpoints in a folder, in order. A folder that is not there has none.

    Raises:
        FzeroError: for a folder that cannot be read.
    """
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FzeroError(str(path), f"cannot be read: {error.strerror}", "give a folder of checkpoints") from error
    found = [int(match[1]) for match in map(NAME.fullmatch, names) if match]
    return sorted(step for step in found if (step_folder(path, step) / MANIFEST).exists())


def step_folder(path: Path, step: int) -> Path:
    """The folder of one checkpoint."""
    return path / f"step-{step}"


def partial_folder(path: Path, step: int) -> Path:
    """The folder of a checkpoint that is being written or removed."""
    return path / f"step-{step}{PARTIAL}"


def publish(path: Path, step: int) -> None:
    """Give a complete checkpoint its name, on the disk too. A checkpoint of the same step is replaced."""
    target, partial = step_folder(path, step), partial_folder(path, step)
    sync_directory(partial)
    if target.exists():
        _exchange(partial, target)
        sync_directory(path)
        _remove_tree(partial)
    else:
        os.rename(partial, target)
    sync_directory(path)


def _exchange(a: Path, b: Path) -> None:
    """Let two folders change names, both at once. On a filesystem that cannot, `b` is without a folder for a moment."""
    if not _rename_exchange(a, b):
        aside = a.with_name(f"{b.name}.old{PARTIAL}")
        os.rename(b, aside)
        os.rename(a, b)
        os.rename(aside, a)


def _rename_exchange(a: Path, b: Path) -> bool:
    """Call renameat2 of Linux, which Python's os lacks. False where kernel or filesystem do not know it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(a), None, str(b))


def remove(path: Path, step: int) -> None:
    """Remove a checkpoint. Where this is interrupted, the rest is a leftover."""
    partial = partial_folder(path, step)
    _remove_tree(partial)
    os.rename(step_folder(path, step), partial)
    sync_directory(path)
    _remove_tree(partial)


def remove_leftovers(path: Path, step: int, names: Collection[str]) -> None:
    """Remove what killed saves left in a folder. Of the checkpoint `step`, which ranks are writing, files of these
    names stay."""
    for entry in path.glob(f"step-*{PARTIAL}"):
        if entry != partial_folder(path, step):
            _remove_tree(entry)
        else:
            for file in entry.iterdir():
                if file.name not in names:
                    file.unlink(missing_ok=True)


def _remove_tree(folder: Path) -> None:
    """Remove a folder, whose files other ranks may be removing too."""

    def check(function: object, name: str, error: Any) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(folder, onerror=check)


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Keep other processes from writing into a folder within the block. A killed process holds nothing.

    Raises:
        FzeroError: with the owner's name, where another process holds the folder.
    """
    # Not flock, and not on the folder: a forked child of a killed process would go on holding a flock.
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                owner = os.pread(fd, 256, 0).decode(errors="replace").strip() or "another process"
                way_out = "end that process, or give each job a folder of its own"
                raise FzeroError(str(path), f"{owner} is writing there", way_out) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        with suppress(OSError):
            os.ftruncate(fd, 0)
        os.close(fd)
