"""File: one file of extents, which is read and written past the page cache where the filesystem can do so."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fzero.base.errors import FzeroError
from fzero.files.extents import FreeList, align_down

_log = logging.getLogger("fzero")

DIRECT, UNNAMED = getattr(os, "O_DIRECT", 0), getattr(os, "O_TMPFILE", 0)
NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
"""Errors of a filesystem, or of a kernel, that knows no files without names."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, a quota or a limit that leaves no room."""
GO_ON = "give another disk, and go on from the last checkpoint"


class File:
    """A new file in a folder, without a name there. `take` makes room in it, and `read` and `write` move bytes on
    borders of `ALIGN`.

    A file without a name goes with the last descriptor of it, also where the process is killed, and no other program
    can open it, to cut it or to write into it. `path` is what errors call the file.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self._fd, self._is_direct = _open(self.path)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._free, self._size = FreeList(), 0
        self.unused: deque[range] = deque()
        """Extents that nothing uses any more. The garbage collector adds them at any time, within `take` too."""

    def take(self, nbytes: int, leaf: str) -> range:
        """Room for `nbytes` bytes. The disk keeps the room free from now on.

        Raises:
            FzeroError: naming the leaf, where the disk has no room.
        """
        while self.unused:
            self._free.give_back(self.unused.popleft())
        taken = self._free.take(nbytes)
        if taken.stop > self._size:
            self._check_size("written", taken, leaf)
            try:
                os.posix_fallocate(self._fd, self._size, taken.stop - self._size)
            except OSError as error:
                self._free.give_back(taken)
                raise self._refuse(leaf, "written", taken, error) from error
            self._size = taken.stop
        return taken

    def read(self, memory: memoryview, start: int, leaf: str) -> None:
        """Fill `memory` from byte `start` of the file on."""
        self._move("read", memory, start, leaf)

    def write(self, memory: memoryview, start: int, leaf: str) -> None:
        """Write `memory` at byte `start` of the file."""
        self._move("written", memory, start, leaf)

    def _move(self, what: str, memory: memoryview, start: int, leaf: str) -> None:
        done, is_read = 0, what == "read"
        while done < len(memory):
            rest = range(start + done, start + len(memory))
            self._check_size(what, rest, leaf)
            count = self._try_twice(what, memory[done:], rest, leaf)
            # The system reads up to a border, or up to the end of a file that is cut meanwhile.
            count = align_down(count) if is_read else count
            if not count:
                self._check_size(what, rest, leaf)
                problem = f"bytes {rest.start} to {rest.stop} cannot be {what}: the system moves none of them"
                raise FzeroError(self._name(leaf), problem, GO_ON)
            done += count

    def _check_size(self, what: str, place: range, leaf: str) -> None:
        """Refuse a file that is shorter than the room that was taken in it. A write behind its end would leave zeros in
        the place of values."""
        taken = self._size  # before the file is asked: another thread may make it longer meanwhile
        size = os.fstat(self._fd).st_size
        if size < taken:
            problem = f"bytes {place.start} to {place.stop} cannot be {what}: the file was cut to {size} bytes"
            raise FzeroError(self._name(leaf), problem, GO_ON)

    def _try_twice(self, what: str, memory: memoryview, place: range, leaf: str) -> int:
        """The number of bytes that the system moved. What fails once is tried once more, with a line in the log."""
        is_first = True
        while True:
            call: Callable[..., int] = os.preadv if what == "read" else os.pwritev
            try:
                return call(self._fd, [memory], place.start)
            except OSError as error:
                if error.errno == errno.EINVAL and self._is_direct:
                    self._become_buffered()
                elif error.errno in FULL or not is_first:
                    raise self._refuse(leaf, what, place, error) from error
                else:
                    is_first = False
                    name, problem = self._name(leaf), error.strerror
                    _log.warning("%s: bytes %d to %d were not %s: %s; trying again", name, place.start, place.stop,
                                 what, problem)  # fmt: skip

    def _become_buffered(self) -> None:
        """Go through the page cache from now on: some filesystems open a file for direct access, and then refuse it."""
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~DIRECT)
        self._is_direct = False

    def _refuse(self, leaf: str, what: str, place: range, error: OSError) -> FzeroError:
        problem = f"bytes {place.start} to {place.stop} cannot be {what}: {error.strerror}"
        if error.errno not in FULL:
            return FzeroError(self._name(leaf), f"{problem}, twice", GO_ON)
        free = os.fstatvfs(self._fd)
        problem += f"; the disk has {free.f_bavail * free.f_frsize} bytes free"
        is_limit = error.errno == errno.EFBIG
        way_out = (
            "raise the limit of a file's size (ulimit -f)" if is_limit else "give fzero.disk a folder with more room"
        )
        return FzeroError(self._name(leaf), problem, way_out)

    def _name(self, leaf: str) -> str:
        return f"{leaf} in {self.path}" if leaf else str(self.path)


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor of a new file that has no name, and whether it goes past the page cache: not where the filesystem
    refuses that. `path` is for errors.

    Raises:
        FzeroError: for a file that cannot be opened, such as one too many.
    """
    try:
        try:
            return _create(path.parent, DIRECT), bool(DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL or not DIRECT:
                raise
            return _create(path.parent, 0), False
    except OSError as error:
        problem, way_out = f"cannot be opened: {error.strerror}", "give a folder on a disk with room"
        if error.errno == errno.EMFILE:
            way_out = "raise the limit of open files (ulimit -n)"
        if not path.parent.exists():
            problem = "cannot be opened: its folder was removed while this process used it"
            way_out = "leave the folder there while a run lasts, and go on from the last checkpoint"
        raise FzeroError(str(path), problem, way_out) from error


def _create(folder: Path, flags: int) -> int:
    """A descriptor of a new file of a folder. Where the filesystem knows no files without names, the file has one for
    a moment."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    if UNNAMED:
        try:
            return os.open(folder, flags | UNNAMED, 0o600)
        except OSError as error:
            if error.errno not in NO_UNNAMED:
                raise
    name = folder / f".fzero-{secrets.token_hex(8)}"
    try:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        name.unlink(missing_ok=True)  # some filesystems make the file first, and then refuse the flags
