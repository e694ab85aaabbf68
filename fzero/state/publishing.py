"""Publishing: what ranks write together appears all at once, or not at all.

    the first rank   takes the place: keeps others out, removes what killed processes left
    all ranks        compare what they are about to write: one all-gather of a hash
    each rank        writes its part, and puts it on the disk
    all ranks        tell each other what they wrote, or their errors: one all-gather
    the first rank   completes it, and gives it its name
    all ranks        hear that it is done: one all-gather, as a barrier

To plan takes no message. No rank writes before the first has the place, so that a job that is turned away leaves the
files of the other alone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fzero.base.errors import FzeroError
from fzero.ranks.agreement import digest
from fzero.ranks.processes import find_end, name_process
from fzero.ranks.ranks import Ranks
from fzero.ranks.together import Gather, do_together
from fzero.ranks.virtual import ALONE
from fzero.values.sharded import Sharded

NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
"""Errors of a filesystem that cannot sync a directory, as some network filesystems."""

T = TypeVar("T")
TEMPORARY = ".fzero-tmp"
"""The end of the name of a file or folder that is being written."""
MAX_NAME = 24
"""Characters of a target's name in its temporary name, which so is no longer than a filesystem takes."""
REPLACED = ".replaced"
"""The end of the name of a folder whose name another one is about to get, on a filesystem without an exchange."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Numbers of Linux for renameat2."""


class Publication(NamedTuple):
    """Something that ranks write together, and that appears at `target`. `caller` is the function's name in errors,
    which say that a rank "could not `does`"."""

    target: Path
    caller: str
    gather: Gather
    is_first: bool
    does: str = "write it"
    way_out: str = "what was there before is as it was; save again"

    def run(
        self,
        plan: Callable[[], Sequence[str]],
        take: Callable[[], AbstractContextManager[str]],
        write: Callable[[str], T],
        commit: Callable[[list[T]], None],
    ) -> None:
        """Write and publish. Collective.

        * `plan()` returns the lines that all ranks must have alike.
        * `take()`, on the first rank, has the place until the end of its block, or of the commit. All ranks hear the
          word that it yields, such as a name.
        * `write(word)` writes this rank's part.
        * `commit(written)`, on the first rank, publishes. `written` are the results of `write` on each rank.

        Raises:
            FzeroError: on all ranks, naming the rank that failed; on all ranks, naming the first line that differs.
        """
        lines: list[str] = []
        with ExitStack() as stack:

            def begin() -> tuple[int, str]:
                lines.extend(plan())
                return digest(lines), stack.enter_context(take()) if self.is_first else ""

            def end() -> None:
                if self.is_first:
                    commit(written)
                    stack.close()

            begun = self._do_together(begin)
            self._compare([number for number, _ in begun], lines)
            word = next(word for _, word in begun if word)
            written = self._do_together(lambda: write(word))
            self._do_together(end)

    def _do_together(self, do: Callable[[], T]) -> list[T]:
        return do_together(self.gather, do, str(self.target), self.does, self.way_out)

    def _compare(self, numbers: list[int], lines: list[str]) -> None:
        """Raise on all ranks, naming the first line that differs, where ranks hold different trees. `numbers` has a
        hash of each rank's lines."""
        different = list(dict.fromkeys(numbers))[:2]
        if len(different) == 1:
            return
        told = list(self.gather(lines if digest(lines) in different else None).items())
        (first, one), (second, other) = (told[numbers.index(number)] for number in different)
        counts = f"{len(one)} lines", f"{len(other)} lines"
        this, that = next((pair for pair in zip(one, other) if len(set(pair)) > 1), counts)
        problem = f"ranks save different trees: rank {first} has {this:.200}, rank {second} has {that:.200}"
        raise FzeroError(str(self.target), problem, f"give {self.caller} the same tree on every rank")


def find_common_ranks(leaves: Iterable[tuple[str, Any]]) -> Ranks:
    """The ranks that the `Sharded` leaves lie on, of leaves with their paths; `ALONE` where there are none.

    Raises:
        FzeroError: for leaves on several meshes, and for leaves inside of a step.
    """
    found: dict[Ranks, str] = {}
    for path, leaf in leaves:
        if not isinstance(leaf, Sharded):
            continue
        if leaf.on.is_tracing:
            raise FzeroError(path, "is saved inside of a step, where it has no values", "save what the step returns")
        found.setdefault(leaf.ranks, path)
        if len(found) > 1:
            (on, first), _ = found.items()
            problem = f"lies on {leaf.on.mesh}, {first} on {on.mesh}: other process groups"
            raise FzeroError(path, problem, "save the leaves of one mesh together")
    return next(iter(found), ALONE)


@contextmanager
def open_temporary(target: Path, *, is_folder: bool) -> Iterator[str]:
    """The name of a new empty file or folder beside `target`, locked within the block. It is removed at the end, unless
    `give_name` was called. What killed processes left in the directory is removed before."""
    remove_leftovers(target.parent)
    path = target.parent / f".{target.name[:MAX_NAME]}.{name_process()}.{secrets.token_hex(4)}{TEMPORARY}"
    lock = None
    try:
        path.mkdir() if is_folder else path.touch(exist_ok=False)
        lock = _open_and_lock(path)
        yield path.name
    finally:
        if lock is not None:
            os.close(lock)
        with suppress(OSError):  # the next save tries again, and an error that is on its way says more
            _remove(path)


def sync_directory(directory: Path) -> None:
    """Put the names of a directory's files on the disk, where the filesystem can.

    Raises:
        OSError: when the disk fails.
    """
    try:
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def give_name(path: Path, target: Path, *, replaces: bool = False) -> None:
    """Give a complete file or folder its name, on the disk too. With `replaces`, what has the name gets that of `path`.
    Where this fails, names are as they were."""
    if path.is_dir():
        sync_directory(path)
    if replaces:
        _exchange(path, target)
    else:
        os.rename(path, target)  # fails where a folder with files appeared meanwhile
    try:
        sync_directory(target.parent)
    except BaseException:
        with suppress(OSError):
            if replaces:
                _exchange(path, target)
            else:
                os.rename(target, path)
        raise


def _exchange(path: Path, target: Path) -> None:
    """Let two files or folders change names, both at once where the filesystem can. Where it cannot, an old file is
    gone, and an old folder has another name for a moment: `find_folder` of checkpoints knows it, and the next save
    gives the right one back."""
    if _rename_exchange(path, target):
        return
    if not target.is_dir():
        os.replace(path, target)
        return
    aside = target.with_name(f"{target.name}{REPLACED}")
    os.rename(target, aside)
    try:
        os.rename(path, target)
    except BaseException:
        os.rename(aside, target)
        raise
    with suppress(OSError):  # else the next save finds it
        os.rename(aside, path)


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


def _open_and_lock(path: Path) -> int | None:
    """A descriptor of a file or folder that this process has locked until the descriptor is closed. None where another
    process has locked it, or where the filesystem has no locks."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def remove_leftovers(directory: Path, *, is_reader: bool = False) -> None:
    """Remove what killed writers left in a directory. A writer that goes on holds a lock. A reader removes only what a
    process of this host left: the locks of another host may be unknown here."""
    with suppress(OSError):
        for path in directory.glob(f".*{TEMPORARY}"):
            _remove_leftover(path, is_reader)


def _remove_leftover(path: Path, is_reader: bool) -> None:
    has_ended = find_end(path.name.removesuffix(TEMPORARY).rpartition(".")[0].rpartition(".")[2])
    if has_ended is False or (is_reader and not has_ended):
        return
    with suppress(OSError):
        fd = None if has_ended else _open_and_lock(path)
        if has_ended or fd is not None:
            _remove(path)
        if fd is not None:
            os.close(fd)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
