"""Which functions of Python run in a block, in blocks that lie in each other, and beside a profiler of the user."""

from __future__ import annotations

import cProfile
import sys

import pytest

from fzero.base.executed_code import leave_out_code, record_code


def before() -> None: ...


def inside() -> None: ...


def behind() -> None: ...


def left_out() -> None: ...


def names(codes: list[object] | None) -> set[str]:
    assert codes is not None
    known = {x.__code__: x.__name__ for x in (before, inside, behind, left_out)}
    return {known[x] for x in codes if x in known}  # type: ignore[index]


def test_a_block_in_a_block() -> None:
    with record_code() as outer:
        before()
        with record_code() as inner:
            inside()
        behind()
    left_out()
    assert names(inner) == {"inside"}
    assert names(outer) == {"before", "inside", "behind"}


def test_a_function_that_runs_while_a_block_begins_and_ends() -> None:
    def around() -> list[object] | None:
        with record_code() as inner:
            inside()
        return inner

    with record_code() as outer:
        inner = around()
    assert outer is not None and around.__code__ in outer
    assert names(inner) == {"inside"}


def test_code_that_is_left_out() -> None:
    with record_code() as outer:
        before()
        with leave_out_code():
            left_out()
        behind()
    with leave_out_code():  # nothing records
        left_out()
    assert names(outer) == {"before", "behind"}


def test_errors_end_blocks() -> None:
    with record_code() as outer:
        with pytest.raises(KeyError), record_code() as inner:
            inside()
            raise KeyError
        behind()
    assert names(inner) == {"inside"} and names(outer) == {"inside", "behind"}
    assert sys.getprofile() is None


def test_beside_a_profiler_nothing_is_known() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        with record_code() as codes:
            inside()
        running = sys.getprofile()
        behind()
    finally:
        profiler.disable()
    assert codes is None
    assert sys.version_info >= (3, 12) or running is profiler
    assert {"inside", "behind"} <= {x.code.co_name for x in profiler.getstats() if not isinstance(x.code, str)}
