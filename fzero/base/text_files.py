"""Text files that users name."""

from __future__ import annotations

import os
from pathlib import Path

from fzero.base.errors import FzeroError


def write_text(what: str, path: str | os.PathLike[str], text: str) -> None:
    """Write a text to a file.

    Raises:
        FzeroError: where the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise FzeroError(
            f"{what} {os.fspath(path)!r}", f"is not written: {error}", "give a file that can be"
        ) from error
