"""Files of modules: stamps of all that is imported, which say that code is the same.

A file of the user is known by its contents. A file of an installed package is known by its size and the time of its
last change: packages are large, and are installed as a whole.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Mapping

from fzero.base.installed import is_installed
from fzero.cache.rules import Undescribed


def list_files() -> dict[str, str]:
    """Module -> file of each imported module that has a file. Kernels that inductor has made are no code of a step."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and (not name.startswith("torch._inductor.") or is_installed(file)):
            found[name] = file
    return found


def stamp(file: str) -> str:
    """What is equal for equal contents of a file; "" for a file that is not there.

    Raises:
        Undescribed: for a file that was changed after this process began: what was imported may be older.
    """
    try:
        found = os.stat(file)
    except OSError:
        return ""  # a module that was made in memory, or in an archive
    if max(found.st_mtime, found.st_ctime) > find_start():
        raise Undescribed(file, "was changed after this process began")
    if is_installed(file):
        return f"{found.st_size} {found.st_mtime_ns}"
    return _hash(file, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


@functools.lru_cache(1 << 12)
def _hash(file: str, *of_its_state: int) -> str:
    """A hash of a file that has not changed since this process began: of one state, read once."""
    with open(file, "rb") as opened:
        return hashlib.sha256(opened.read()).hexdigest()


def stamp_files(files: Mapping[str, str]) -> list[str]:
    """A line for each module: its name, its file, and the stamp of that. Raises as `stamp`."""
    return [f"{name} {file} {stamp(file)}" for name, file in sorted(files.items())]


def find_start() -> float:
    """The time at which this process, or the one that it was forked from, began, or earlier."""
    return _START


def _read_start() -> float:
    try:
        with open("/proc/self/stat") as opened:
            ticks = int(opened.read().rpartition(")")[2].split()[19]) + 1  # of 10 ms: Python takes longer to begin
        since = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - since
    except (OSError, ValueError, AttributeError):
        return time.time()


_START = _read_start()  # here, and not at the first question: a fork has the modules of its parent
