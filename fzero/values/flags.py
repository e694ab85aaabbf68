"""Flags of a step that has no state to note them in: the step returns them beside its results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.base import torch_private
from fzero.base.flags import Flag, FlagForm, MakeFlag
from fzero.ranks.performer import MovePerformer
from fzero.values.moves import reduce
from fzero.values.regions import current_mark


class Noted(NamedTuple):
    """A flag that a step returns. With `is_local` each rank has a value of its own, and the largest one counts."""

    make: MakeFlag
    value: Tensor
    is_local: bool = False


_noted: ContextVar[list[Noted] | None] = ContextVar("fzero_noted_flags", default=None)


@contextmanager
def collect_flags(flags: list[Noted]) -> Iterator[None]:
    """Inside this context, a trace, `note_flag` and `note_local` append to `flags`."""
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
        flags.append(Noted(type(flag), flag.value))
    elif not (torch_private.dispatch_modes() or torch.compiler.is_compiling()):
        flag.raise_if_set()


def note_local(form: FlagForm, value: Tensor, limit: int) -> None:
    """Let the next call of the step raise the error of a flag, on all ranks, where `value` is not 0 on some rank.
    Outside of a step, raise the error now. The `limit` is the same on all ranks.

    The value, 0 or more, has no derivative and is no batch of vmap. So it is one of the whole step also in a function
    that is differentiated. In the turns of a loop the largest counts.
    """
    flags, value = _noted.get(), torch_private.unwrap(value.to(torch.float32))
    pair = torch.stack([value, torch.full_like(value, limit)])
    if flags is not None:
        flags.append(Noted(form, pair, is_local=True))
    elif not (torch_private.dispatch_modes() or torch.compiler.is_compiling()):
        form(pair).raise_if_set()


class TurnFlags:
    """The flags that a turn of a loop notes: `collect` them, return their `values`, and `note` those of all turns."""

    def __init__(self) -> None:
        self._found: list[Noted] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Inside this context, a turn, flags are collected where the step collects some."""
        self._found = []
        if _noted.get() is None:
            yield
        else:
            with collect_flags(self._found):
                yield

    def values(self) -> list[Tensor]:
        """The value of each flag of the last turn."""
        return [each.value for each in self._found]

    def note(self, stacked: list[Tensor]) -> None:
        """Note the largest value of each flag, given those of all turns."""
        flags = _noted.get()
        for each, values in zip(self._found, stacked):
            if flags is not None and len(values):
                flags.append(each._replace(value=torch_private.unwrap(values.amax(0))))


def join_ranks(noted: list[Noted], on: MovePerformer) -> list[Tensor]:
    """The values of flags, the same on all ranks: one all-reduce for those of which each rank has its own."""
    local = [each.value for each in noted if each.is_local]
    largest = iter(reduce(torch.stack(local), on, "max", on.mesh.join(on.mesh.names)).unbind() if local else ())
    return [next(largest) if each.is_local else each.value for each in noted]
