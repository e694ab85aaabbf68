"""Release: the releases of transformers that `fzero.hf` works with. Others are refused when `fzero.hf` is imported."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from fzero.base.errors import FzeroError

LEAST = (5, 22)
"""Releases before this lack methods of `generate` that `fzero.hf` works through, and 5.0 those of the Trainer. Before
5.10 the Trainer of transformers divides gradients twice where updates have several batches."""
WAY_OUT = "pip install 'transformers>=5.22' accelerate"


def check_release() -> None:
    """Refuse a release of transformers before `LEAST`.

    Raises:
        FzeroError: with the release, and those that work; where transformers or accelerate is not installed.
    """
    for name in ("transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise FzeroError(name, "is not installed, and fzero.hf needs it", WAY_OUT)
    check_version(metadata.version("transformers"))


def check_version(version: str) -> None:
    """Refuse a version before `LEAST`."""
    parts = version.split(".")
    if tuple(int(part) for part in parts[:2]) < LEAST:
        least = ".".join(map(str, LEAST))
        raise FzeroError("transformers", f"is {version}, and fzero.hf works with {least} and later", WAY_OUT)
