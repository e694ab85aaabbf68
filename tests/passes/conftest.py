"""Tests of passes run one step under many plans, so the tests of a file trace equal steps once."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def shared_by_all_files(shared_traces: list[int]) -> None:
    """Every file here asks for `shared_traces`."""
