"""Text files that users name."""

from __future__ import annotations

import os
from pathlib import Path

from fzero.base.arguments import check_arguments
from fzero.base.errors import FzeroError


@check_arguments
def write_text(what: str, path: str | os.PathLike[str], text: str, *, parents: bool = False) -> None:
    r"""Write a text to a file. With `parents`, folders that are missing are made. A lone surrogate, which UTF-8 has no
    bytes for, becomes its escape, such as "\ud800".

    Raises:
        FzeroError: for what is no path, where the file cannot be written.
    """
    try:
        if parents:
            Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except (OSError, UnicodeEncodeError) as error:  # the latter for a path
        raise FzeroError(
            f"{what} {os.fspath(path)!r}", f"is not written: {error}", "give a file that can be"
        ) from error
