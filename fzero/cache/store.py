"""Store: a folder of files, named by keys. A file appears at once, whole, and says by a hash that it is.

Jobs may share a folder, and any file may be deleted at any time. A file that cannot be read is as no file, and a folder
that cannot be written to is as none: neither fails a step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import zlib
from pathlib import Path
from typing import Any

from fzero.base.errors import FzeroError
from fzero.state.publishing import give_name

MARK = b"fzero program 1\n"
_log = logging.getLogger("fzero")


class ProgramStore:
    """The files of a folder.

    Raises:
        FzeroError: for what is no path.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
            raise FzeroError("cache", f"is {folder!r}", "give the path of a folder, which need not be there")
        self.folder = Path(os.path.expanduser(folder)).absolute()

    def path(self, key: str) -> Path:
        """The file of a key."""
        return self.folder / f"{key}.fzero"

    def read(self, key: str) -> Any:
        """The data of a key; None where there is none that can be read."""
        path = self.path(key)
        try:
            with open(path, "rb") as file:
                found = file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("cache: %s cannot be read: %s", path, error)
            return None
        head, body = found[: len(MARK) + 32], found[len(MARK) + 32 :]
        if not head.startswith(MARK) or hashlib.sha256(body).digest() != head[len(MARK) :]:
            _log.warning("cache: %s is damaged, or of another version: the step is traced", path)
            return None
        try:
            return json.loads(zlib.decompress(body))
        except (ValueError, zlib.error) as error:
            _log.warning("cache: %s is damaged: %s", path, error)
            return None

    def write(self, key: str, data: Any) -> bool:
        """Write the data of a key, in the place of what is there. Returns whether that was possible."""
        body = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 1)
        path = self.path(key)
        partial = path.with_name(f".{key}.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with open(partial, "wb") as file:
                    file.write(MARK + hashlib.sha256(body).digest() + body)
                give_name(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        except OSError as error:
            _log.warning("cache: %s cannot be written: %s", path, error)
            return False
        return True
