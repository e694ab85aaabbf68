"""Which functions of Python run in a block, by Python's profiler. Blocks lie in each other."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType
from typing import NamedTuple


class _Block(NamedTuple):
    profiler: cProfile.Profile
    codes: list[CodeType]


_outer: ContextVar[_Block | None] = ContextVar("fzero_executed_code", default=None)


@contextmanager
def record_code() -> Iterator[list[CodeType] | None]:
    """Gives a list that has, behind the block, the code of the functions that ran in it, once or more often. None where
    another profiler runs, such as that of a user. Functions take about twice their time."""
    outer, block = _outer.get(), _Block(cProfile.Profile(builtins=False, subcalls=False), [])
    if outer is not None:
        outer.profiler.disable()
    is_recorded = _enable(block.profiler)
    token = _outer.set(block)
    try:
        yield block.codes if is_recorded else None
    finally:
        _outer.reset(token)
        if is_recorded:
            block.profiler.disable()
            block.codes.extend(x.code for x in block.profiler.getstats() if isinstance(x.code, CodeType))
        if outer is not None:
            outer.codes.extend(block.codes)
            _enable(outer.profiler)


@contextmanager
def leave_out_code() -> Iterator[None]:
    """A block whose code no block around it records."""
    outer = _outer.get()
    if outer is None:
        yield
        return
    outer.profiler.disable()
    try:
        yield
    finally:
        _enable(outer.profiler)


def _enable(profiler: cProfile.Profile) -> bool:
    """Start a profiler. Returns whether it has: not where another one runs."""
    if sys.getprofile() is not None:  # whose place it would take before Python 3.12
        return False
    try:
        profiler.enable()
    except ValueError:  # so since Python 3.12
        return False
    return True
