"""Profiles of the property tests, and a count of their cases.

pytest property_tests                                                    quick, the same cases each time
pytest property_tests --hypothesis-profile=deep --examples=2000          that many random ones a law
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.errors import UnsatisfiedAssumption

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # else MKL's last bit depends on where its operands lie in memory

_CASES: Counter[str] = Counter()
"""Law -> how often its body has run to its end, or to a failure; explicit examples and shrinking included."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--examples", type=int, default=1000, help="cases a law in the deep profile")


def pytest_configure(config: pytest.Config) -> None:
    common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    settings.register_profile("quick", common, max_examples=30, derandomize=True)  # no law fails now and then
    settings.register_profile("deep", common, max_examples=config.getoption("--examples"), print_blob=True)
    settings.load_profile("quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        handle = getattr(getattr(item, "obj", None), "hypothesis", None)
        if handle is None:
            continue
        item.add_marker(pytest.mark.timeout(0))  # a failure takes minutes to shrink, the deep profile hours
        if not hasattr(handle.inner_test, "counted"):
            handle.inner_test = _counted(handle.inner_test, item.nodeid)


def _counted(law: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(law)
    def body(*args: Any, **kwargs: Any) -> Any:
        try:
            result = law(*args, **kwargs)
        except UnsatisfiedAssumption:
            raise
        except Exception:
            _CASES[name] += 1
            raise
        _CASES[name] += 1
        return result

    body.counted = True  # type: ignore[attr-defined]
    return body


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _CASES:
        terminalreporter.write_line(f"property tests ran {sum(_CASES.values()):,} cases of {len(_CASES)} laws")
