"""Placements: memory other than the device's in which state lies between and within steps.

`None` stands for the device, which holds everything that has no placement.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError


@dataclass(frozen=True)
class Host:
    """The memory of the host, pinned with `pin` where there is an accelerator: `fzero.host()` makes one."""

    pin: bool = True
    where: ClassVar[Literal["host"]] = "host"

    def __repr__(self) -> str:
        return f"fzero.host(pin={self.pin})"


@dataclass(frozen=True)
class Disk:
    """Files in a folder: `fzero.disk(path)` makes one."""

    path: Path
    where: ClassVar[Literal["disk"]] = "disk"

    def __repr__(self) -> str:
        return f"fzero.disk({str(self.path)!r})"


Placement = Host | Disk


def check_placement(to: Any) -> None:
    """Refuse what is neither a placement nor None."""
    if to is not None and not isinstance(to, Placement):
        way_out = "give a placement, fzero.host() or fzero.disk(path), or None for the device"
        raise FzeroError("to", f"is {to!r}", way_out)


@check_arguments
def host(*, pin: bool = True) -> Host:
    """The placement of state in the memory of the host.

    Give it to `partition(..., to=)` and to an optimizer's `init(params, to=)`. With `pin` the memory is pinned where
    there is an accelerator, so that copies run beside compute.
    """
    return Host(pin)


@check_arguments
def disk(path: str | os.PathLike[str]) -> Disk:
    """The placement of state in files, in a folder that is there.

    Each process keeps its files in a folder of its own below `path`, and removes them when it ends. What a killed
    process left is removed by the next one. Give a path of a local disk: state is read and written in each step.

    Raises:
        FzeroError: for a path that is no folder, or that cannot be written to.
    """
    if not os.fspath(path):
        raise FzeroError("disk ''", "is an empty path", "give the path of a folder that is there, such as '.'")
    place = Disk(Path(os.path.expanduser(path)).absolute())  # `Path.expanduser` raises where there is no such user
    check_folder(place.path)
    return place


def check_folder(path: Path) -> None:
    """Refuse a path that is no folder, or that this process cannot write to."""
    if not os.path.isdir(path):  # `Path.is_dir` raises for a path that is too long
        problem = "is there, and is no folder" if os.path.exists(path) else "is no folder"
        raise FzeroError(f"disk {str(path)!r}", problem, "give the path of a folder that is there")
    if not os.access(path, os.W_OK | os.X_OK):
        problem = f"cannot be written to by user {os.getuid()}"
        raise FzeroError(f"disk {str(path)!r}", problem, "give a folder of your own, or change its mode")
