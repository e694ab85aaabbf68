"""Installed packages: which files are theirs."""

from __future__ import annotations

import functools
import os
import site
import sysconfig


@functools.cache
def list_roots() -> tuple[str, ...]:
    """The folders of installed packages and of Python's library, each with a slash behind it."""
    paths = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")]
    found = {*paths, *site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.__file__)}
    return tuple(sorted(os.path.join(path, "") for path in found))


def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package or to Python."""
    return file.startswith(list_roots())


def find_package(file: str) -> str:
    """The package, or the module, of an installed file; "" for another file."""
    root = max((x for x in list_roots() if file.startswith(x)), key=len, default=None)
    return "" if root is None else file[len(root) :].partition(os.sep)[0].partition(".")[0]
