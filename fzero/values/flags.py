"""Flags of a step that has no state to note them in: the step returns them beside its results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from fzero.base import torch_private
from fzero.base.flags import Flag
from fzero.values.regions import current_mark

_noted: ContextVar[list[Flag] | None] = ContextVar("fzero_noted_flags", default=None)


@contextmanager
def collect_flags(flags: list[Flag]) -> Iterator[None]:
    """Inside this context, a trace, `note_flag` appends to `flags`."""
    token = _noted.set(flags)
    try:
        yield
    finally:
        _noted.reset(token)


def note_flag(flag: Flag) -> None:
    """Let the next call of the step raise the error of a flag that is set. Outside of a step, raise the error now.

    Nothing is noted where the value is not one of the whole step: in a function that is differentiated or mapped, and
    in a turn of a loop.
    """
    flags = _noted.get()
    if torch_private.depth() or torch_private.in_vmap() or torch_private.in_forward_mode() or current_mark().turns:
        return
    if flags is not None:
        flags.append(flag)
    elif not (torch_private.dispatch_modes() or torch.compiler.is_compiling()):
        flag.raise_if_set()
