"""Tiers of the tests: `make test` and `make test-rest` together run each test once."""

from __future__ import annotations

import processes
import pytest
import tiers


def test_quick_tests_and_the_rest_are_all_tests(request: pytest.FixtureRequest) -> None:
    """Of this run: of a function one case is quick, and none that launches processes."""
    items = request.session.items
    quick, launching, further = tiers.split(items)
    assert sorted(map(id, [*quick, *launching, *further])) == sorted(map(id, items))
    functions = [item.nodeid.partition("[")[0] for item in quick]
    assert len(set(functions)) == len(functions)
    assert {item.nodeid.partition("[")[0] for item in further} <= set(functions)
    assert all(map(tiers.is_quick, quick)) and not any(map(tiers.is_quick, launching))


def launch() -> list[int]:
    return processes.run(1, len)


def test_functions_that_launch_processes_are_seen() -> None:
    assert tiers.launches(launch) and tiers.launches(lambda: [launch()])
    assert not tiers.launches(test_quick_tests_and_the_rest_are_all_tests)
