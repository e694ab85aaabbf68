"""File: one file of extents, which is read and written past the page cache where the filesystem can do so."""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fzero.base.errors import FzeroError
from fzero.files.extents import FreeList, align_down

_log = logging.getLogger("fzero")

DIRECT = getattr(os, "O_DIRECT", 0)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, a quota or a limit that leaves no room."""
GO_ON = "give another disk, and go on from the last checkpoint"


class File:
    """A new file. `take` makes room in it, and `read` and `write` move bytes on borders of `ALIGN`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open(path, os.O_CREAT | os.O_EXCL | DIRECT)
        self._is_direct = bool(DIRECT)
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
        fd = _open(self.path, 0)
        os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)
        self._is_direct = False

    def _refuse(self, leaf: str, what: str, place: range, error: OSError) -> FzeroError:
        problem = f"bytes {place.start} to {place.stop} cannot be {what}: {error.strerror}"
        if error.errno not in FULL:
            return FzeroError(self._name(leaf), f"{problem}, twice", GO_ON)
        free = os.statvfs(self.path.parent)
        problem += f"; the disk has {free.f_bavail * free.f_frsize} bytes free"
        is_limit = error.errno == errno.EFBIG
        way_out = (
            "raise the limit of a file's size (ulimit -f)" if is_limit else "give fzero.disk a folder with more room"
        )
        return FzeroError(self._name(leaf), problem, way_out)

    def _name(self, leaf: str) -> str:
        return f"{leaf} in {self.path}" if leaf else str(self.path)


def _open(path: Path, flags: int) -> int:
    """A new descriptor of a file, without `DIRECT` where the filesystem refuses that flag.

    Raises:
        FzeroError: for a file that cannot be opened, such as one too many.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL and DIRECT and flags & DIRECT:
            path.unlink(missing_ok=True)  # some filesystems make the file first, and then refuse the flag
            return _open(path, flags & ~DIRECT)
        problem, way_out = f"cannot be opened: {error.strerror}", "give another disk"
        if error.errno == errno.EMFILE:
            way_out = "raise the limit of open files (ulimit -n)"
        if not path.parent.exists():
            problem = "cannot be opened: its folder was removed while this process used it"
            way_out = "leave the folder there while a run lasts, and go on from the last checkpoint"
        raise FzeroError(str(path), problem, way_out) from error
