"""Sizes in bytes: as users give them, a whole number or a text such as "40GiB", and as texts for users."""

from __future__ import annotations

import operator
import re

from fzero.base.arguments import is_whole
from fzero.base.errors import FzeroError

_UNITS = {"B": 1} | {
    name: base**power
    for power, prefix in enumerate("KMGT", 1)
    for name, base in ((f"{prefix}B", 1000), (f"{prefix}IB", 1024))
}
_LARGEST = 2**63 - 1
"""Bytes that a 64-bit machine can name."""
_WAY_OUT = 'give a number of bytes above 0, or a text such as "40GiB", "1.5 GB" or "64MiB"'


def parse_size(where: str, given: int | str) -> int:
    """The number of bytes that `given` says: `parse_size("memory", "1.5KiB")` is 1536.

    Units are B, KB, MB, GB and TB, powers of 1000, and KiB, MiB, GiB and TiB, powers of 1024, in any case. A fraction
    of a byte is dropped.

    Raises:
        FzeroError: at `where`, for another type, for a text that is no size, for a size below 1 byte or from 2**63 on.
    """
    nbytes = 0
    if isinstance(given, str):
        found = re.fullmatch(r"(\d{1,40}(?:\.\d{1,40})?|\.\d{1,40})\s*([KMGT]?I?B)", given.strip().upper())
        if found and found[2] in _UNITS:
            whole, _, fraction = found[1].partition(".")
            digits = int((whole + fraction) or 0)  # exact: a float has 53 bits
            nbytes = digits * _UNITS[found[2]] // 10 ** len(fraction)
    elif is_whole(given):
        nbytes = operator.index(given)
    if nbytes > _LARGEST:
        raise FzeroError(where, f"is more than {_LARGEST} bytes", _WAY_OUT)
    if nbytes > 0:
        return nbytes
    raise FzeroError(where, f"is {given!r}", _WAY_OUT)


def format_size(nbytes: int) -> str:
    """`1536 -> "1.5 KiB"`."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
