"""Placements: memory other than the device's in which state lies between and within steps.

`None` stands for the device, which holds everything that has no placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

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
        raise FzeroError("to", f"is {to!r}", "give a placement, such as fzero.host(), or None for the device")


def host(*, pin: bool = True) -> Host:
    """The placement of state in the memory of the host.

    Give it to `partition(..., to=)` and to an optimizer's `init(params, to=)`. With `pin` the memory is pinned where
    there is an accelerator, so that copies run beside compute.
    """
    return Host(pin)
