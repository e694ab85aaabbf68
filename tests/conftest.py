"""Python's garbage collector in a run of the tests: it does not walk what all test files together leave.

Seven hundred thousand objects live as long as the run: modules, the source of asserts, fourteen thousand items.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

from fzero.base.garbage import pause_garbage_collection


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with pause_garbage_collection():
        result = yield
    gc.freeze()
    return result
