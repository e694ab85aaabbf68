"""The tests that `make test` runs, and those that it leaves to `make test-rest`.

    pytest tests property_tests --tier=quick    what a newcomer runs: five minutes, no process but those of SMOKE
    pytest tests property_tests --tier=rest     what that left out
    pytest tests property_tests                 all

A test is quick if it launches no process, is none of `SLOW`, and is one of the first `CASES` of its function, in the
order of a hash of their names: other cases of one function take other ways through the same code.
"""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
import zlib
from itertools import groupby
from pathlib import Path
from typing import Any

import hosts
import processes
import pytest

CASES = 2
SMOKE = frozenset({"test_smoke.py"})
"""Files that are quick although they launch ranks."""
SLOW = frozenset(
    """
    test_a_compiled_step_is_the_interpreted_one_up_to_rounding test_a_compiled_optimizer_is_the_plain_one
    test_each_pass_preserves_meaning test_ranks_agree_on_what_is_uniform_in_a_step_that_is_accepted
    test_a_step_is_refused_or_all_that_it_leaves_has_data test_derivatives_are_those_of_plain_torch
    test_metrics_are_of_the_tokens_that_transformers_generates test_predicted_memory_bounds_that_of_each_rank
    test_predicted_comm_is_what_each_rank_exchanges test_training_goes_on_from_adapters
    test_peft_reads_what_was_saved_and_generates_the_same_tokens test_arguments_mean_the_same_for_adapters
    test_adapters_over_codes_train_as_over_the_dequantized_weights
    test_logs_and_files_are_those_of_trl test_the_load_of_experts_is_logged_and_counts_as_in_trl
    test_a_model_of_from_pretrained_trains_and_takes_no_peft_config
    test_plain_libraries_read_what_was_saved test_metrics_of_logits_and_a_loss_function_of_the_user_are_those_of_trl
    test_training_of_trl_goes_on_from_a_checkpoint test_a_loss_of_parameters_that_have_changed_is_refused
    test_adapters_of_another_shape_are_refused test_a_random_step_from_a_file_is_the_one_that_was_traced
    test_the_scale_goes_on_from_a_checkpoint test_a_checkpoint_goes_on_with_the_scheduler_of_the_file
    test_an_overflow_skips_the_update_and_halves_the_scale
    test_narrow_compute_has_wide_weights_and_is_near_to_wide_compute
    test_a_collective_is_a_diff_of_three_files_and_sixty_lines
    test_a_second_process_traces_no_length test_a_file_of_lengths_that_is_none_is_as_no_file
    test_sizes_that_no_schedule_of_the_folder_serves_are_traced_and_kept test_a_broken_condition_is_a_trace
    """.split()
)
"""Functions of which a case takes more than five seconds."""
LAUNCHERS = frozenset({subprocess, processes.run, processes.run_cases, hosts.two_hosts})
FOLDERS = (Path(__file__).parent, Path(__file__).parents[1] / "property_tests")


def is_quick(item: pytest.Item) -> bool:
    """Whether a test launches no process and is not slow, or is of a file of `SMOKE`."""
    if item.path.name in SMOKE or getattr(item, "originalname", "") in SLOW:
        return item.path.name in SMOKE
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions = [getattr(item, "obj", None), *(each.func for found in fixtures for each in found)]
    return not any(map(launches, functions))


def split(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item], list[pytest.Item]]:
    """The quick items, those that launch processes or are slow, and further cases of quick functions."""
    quick, launching, further = [], [], []
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        others = list[pytest.Item]()
        for item in group:
            (others if is_quick(item) else launching).append(item)
        others.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        quick += others[:CASES]
        further += others[CASES:]
    return quick, launching, further


@functools.cache  # cases of one function, and fixtures of many tests
def launches(function: Any) -> bool:
    """Whether a function, or a function of the tests that it names, names one of `LAUNCHERS`."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value in LAUNCHERS:
            return True
        waiting += _named_by(value)
    return False


@functools.cache
def _named_by(value: Any) -> list[Any]:
    """Modules, classes and functions that a function, or a class of the tests, names anywhere in its body."""
    if isinstance(value, type):
        return [each for each in vars(value).values() if inspect.isfunction(each)] if _is_ours(value) else []
    function = inspect.unwrap(value) if callable(value) else value
    function = getattr(function, "__func__", function)  # of a bound method
    if not inspect.isfunction(function) or not _is_ours(function):
        return []
    codes, names = [function.__code__], set[str]()
    for code in codes:
        names.update(code.co_names)
        codes += [each for each in code.co_consts if inspect.iscode(each)]
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [each for each in known if inspect.ismodule(each)]
    members = [getattr(module, name) for module in modules if _is_ours(module) for name in names & set(vars(module))]
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell.cell_contents is not function]
    found = [*known, *members, *cells]
    return [each for each in found if inspect.ismodule(each) or inspect.isroutine(each) or inspect.isclass(each)]


@functools.cache
def _is_ours(value: Any) -> bool:
    """Whether a function, class or module is of the tests."""
    module = value if inspect.ismodule(value) else sys.modules.get(value.__module__ or "")
    file = Path(getattr(module, "__file__", None) or "/")
    return any(folder in file.parents for folder in FOLDERS)
