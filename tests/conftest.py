"""A run of the tests: Python's garbage collector, and the order of the files.

The collector does not walk what all test files together leave, and walks seldom. Seven hundred thousand objects live as
long as the run: modules, the source of asserts, fourteen thousand items.

The longest files begin first. A worker takes whole files: with a long one last, the other workers would be idle.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest
import tiers
import torch
import traces
from processes import collect_seldom

LONGEST = [
    "test_elastic.py",  # waits for a host, and leaves its core to others
    "test_together.py",
    "test_general.py",
    "test_conformance.py",
    "test_families.py",
    "test_cache_lengths.py",
    "test_fit.py",
    "test_hf_adapters.py",
    "test_changes.py",
    "test_planner.py",
    "test_everywhere.py",
    "test_sharded.py",
    "test_hf_arguments.py",
    "test_leaving.py",
    "test_readings.py",
    "test_docs.py",
    "test_hf_both_axes.py",
    "test_hf_ds_config.py",
    "test_gpu_session.py",
    "test_layers.py",
    "test_hf_generation.py",
    "test_parity.py",
    "test_cache_programs.py",
    "test_inductor.py",
    "test_hf_sharers.py",
    "test_examples.py",
    "test_microbatches.py",
    "test_hf_ranks.py",
    "test_functional.py",
    "test_variants.py",
    "test_cuda.py",
    "test_flex_attention.py",
    "test_hf_sequence.py",
    "test_strides_of_traces.py",
    "test_modules.py",
    "test_offload.py",
    "test_fused.py",
    "test_hf_optimizers.py",
    "test_hf_fsdp.py",
    "test_stream.py",
    "test_hosts.py",
    "test_deepspeed_buffers.py",
    "test_checkpoints.py",
    "test_random_steps.py",
    "test_failure.py",
    "test_layer_copies.py",
    "test_rematerialize.py",
    "test_rows_of_batches.py",
    "test_hf_misuse.py",
    "test_programs_in_a_folder.py",
    "test_hf_trainer.py",
]
"""The files that take more than 20 seconds each, the longest first. Any other order is right too, and slower."""


os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each rank that compiles starts processes of its own

for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():  # `torch.manual_seed` would keep its stack for the device, which takes a millisecond
        device.manual_seed_all = lambda seed: None

LEFT: dict[str, list[int]] = {}
"""How many tests are quick, launch processes or are slow, and are further cases of quick functions."""


LOOKED_AT: dict[str, Any] = {}
"""The imported modules that are known to be of no test's folder."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: Any) -> Generator[None, None, None]:
    """Forget modules that a test imported from its folder. With one of them no later step of the process has its
    program in a file, because a module whose file is younger than the process may be older than its file."""
    folder = item.funcargs.get("tmp_path") if hasattr(item, "funcargs") else None
    yield
    if folder is not None:
        forget_modules(f"{folder}{os.sep}")


def forget_modules(folder: str) -> None:
    """Forget modules of a folder. Each is asked for its file once: four thousand of them take a tenth of a second, and
    a thousand tests have a folder."""
    for name, module in list(sys.modules.items()):
        if LOOKED_AT.get(name) is not module:
            if str(getattr(module, "__file__", "")).startswith(folder):
                del sys.modules[name]
            else:
                LOOKED_AT[name] = module


@pytest.fixture(scope="module")
def shared_traces() -> Generator[list[int], None, None]:
    """The tests of a file that asks for this trace equal steps once."""
    with traces.share_traces() as counts:
        yield counts


@pytest.fixture(scope="module", autouse=True)
def _share_traces_of_passes(request: pytest.FixtureRequest) -> None:
    """All files of `tests/passes` ask for `shared_traces`: they run one step under many plans."""
    if request.path.parent.name == "passes":
        request.getfixturevalue("shared_traces")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        result = yield
    finally:
        gc.enable()
    collect_seldom()
    return result


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=("all", "quick", "rest"), default="all", help="which tests (tests/tiers.py)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (tier := config.getoption("--tier")) != "all":
        quick, launching, further = tiers.split(items)
        if tier == "quick":
            getattr(config, "workeroutput", LEFT)["left"] = [len(quick), len(launching), len(further)]
        chosen = set(quick)
        config.hook.pytest_deselected(items=[item for item in items if (item in chosen) != (tier == "quick")])
        items[:] = [item for item in items if (item in chosen) == (tier == "quick")]
    position = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: position.get(item.path.name, len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes the counts from a worker, which has collected the tests."""
    LEFT.update({name: count for name, count in getattr(node, "workeroutput", {}).items() if name == "left"})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if "left" in LEFT:
        quick, launching, further = LEFT["left"]
        total = quick + launching + further
        terminalreporter.write_line(
            f"{quick:,} of {total:,} tests are quick. Left out: {launching:,} that launch processes or are slow, and"
            f" {further:,} further cases of functions; `make test-rest` runs them"
        )
