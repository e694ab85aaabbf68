"""A run of the tests: Python's garbage collector, and the order of the files.

The collector does not walk what all test files together leave. Seven hundred thousand objects live as long as the run:
modules, the source of asserts, fourteen thousand items.

The longest files begin first. A worker takes whole files: with a long one last, the other workers would be idle.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

LONGEST = [
    "test_elastic.py",  # waits for a host, and leaves its core to others
    "test_examples.py",
    "test_conformance.py",
    "test_sharded.py",
    "test_parity.py",
    "test_gpu_session.py",
    "test_leaving.py",
    "test_inductor.py",
    "test_failure.py",
    "test_microbatches.py",
    "test_cuda.py",
    "test_hf_ranks.py",
    "test_faults.py",
    "test_remat.py",
    "test_passes.py",
    "test_disk_ranks.py",
    "test_hosts.py",
]
"""The files that take more than 10 seconds each, the longest first. Any other order is right too, and slower."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        result = yield
    finally:
        gc.enable()
    gc.freeze()
    return result


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    position = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: position.get(item.path.name, len(LONGEST)))
