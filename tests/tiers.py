"""The tests that `make test` runs, and those that it leaves to `make test-rest`.

    pytest tests property_tests --tier=quick    what a newcomer runs: no process but those of SMOKE
    pytest tests property_tests --tier=rest     what that left out
    pytest tests property_tests                 all

A test is quick if it launches no process, is none of `SLOW`, and is the first case of its function, in the order of a
hash of their names: other cases of one function take other ways through the same code.
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

SMOKE = frozenset({"test_smoke.py"})
"""Files that are quick although they launch ranks."""
SLOW = frozenset(
    """
    test_operations_of_other_strides_than_traced_are_known
    test_the_kit_finds_no_broken_law_and_the_bytes_of_the_formula
    test_a_plan_holds_at_all_lengths test_stages_beside_parts_of_layers_are_the_step_of_a_user
    test_the_cheapest_changes_that_fit_are_planned
    test_a_compiled_step_is_the_interpreted_one_up_to_rounding test_a_compiled_optimizer_is_the_plain_one
    test_each_pass_preserves_meaning test_ranks_agree_on_what_is_uniform_in_a_step_that_is_accepted
    test_a_step_is_refused_or_all_that_it_leaves_has_data test_derivatives_are_those_of_plain_torch
    test_metrics_are_of_the_tokens_that_transformers_generates
    test_predicted_memory_bounds_that_of_each_rank_and_is_near_that_of_some
    test_predicted_comm_is_what_each_rank_exchanges test_training_goes_on_from_adapters
    test_peft_reads_what_was_saved_and_generates_the_same_tokens test_arguments_mean_the_same_for_adapters
    test_adapters_over_codes_train_as_over_the_dequantized_weights test_logs_and_files_are_those_of_trl
    test_the_load_of_experts_is_logged_and_counts_as_in_trl
    test_a_model_of_from_pretrained_trains_and_takes_no_peft_config test_plain_libraries_read_what_was_saved
    test_metrics_of_logits_and_a_loss_function_of_the_user_are_those_of_trl
    test_training_of_trl_goes_on_from_a_checkpoint test_a_loss_of_parameters_that_have_changed_is_refused
    test_adapters_of_another_shape_are_refused test_a_random_step_from_a_file_is_the_one_that_was_traced
    test_the_scale_goes_on_from_a_checkpoint test_a_checkpoint_goes_on_with_the_scheduler_of_the_file
    test_an_overflow_skips_the_update_and_halves_the_scale
    test_narrow_compute_has_wide_weights_and_is_near_to_wide_compute
    test_a_collective_is_a_diff_of_three_files_and_sixty_lines test_a_second_process_traces_no_length
    test_a_file_of_lengths_that_is_none_is_as_no_file
    test_sizes_that_no_schedule_of_the_folder_serves_are_traced_and_kept test_a_broken_condition_is_a_trace
    test_a_budget_holds_at_each_length_and_few_lengths_are_searched
    test_a_given_adafactor_of_transformers_is_converted test_a_given_optimizer_and_its_schedule_mean_the_same
    test_a_model_of_files_has_state_of_8_bits_where_its_blocks_are_whole test_a_model_of_files_moves_to_the_host
    test_a_model_of_model_init_goes_on_from_a_checkpoint_and_trains_twice
    test_a_pass_that_swaps_two_dependent_nodes_is_refused
    test_a_program_in_any_order_that_reorder_allows_gives_the_same
    test_a_record_names_every_operand_that_an_operation_writes test_a_search_is_near_exhaustive_search
    test_a_second_job_is_refused_by_name_until_the_first_is_killed test_a_stage_is_meant
    test_a_sum_of_gradients_is_the_mean_times_ranks test_a_trainer_generates_from_what_it_trained
    test_adapters_train_and_are_saved_as_in_transformers
    test_draws_have_the_numbers_that_they_have_in_a_trace_of_their_length test_each_pass_keeps_results_bit_for_bit
    test_each_rule_runs_in_plain_torch test_fp16_trains_as_plain test_groups_of_ranks_are_a_mesh
    test_more_memory_never_takes_more_time test_most_random_models_are_not_refused
    test_most_random_steps_are_not_refused test_noise_has_the_bound_of_transformers_in_training_alone
    test_one_program_serves_all_prompts_of_a_bucket_and_one_all_tokens_of_a_cache
    test_only_adapters_have_gradients_and_state test_options_mean_the_same test_parts_are_all_logits
    test_passes_preserve_meaning_in_any_order test_ranks_that_are_not_looked_at_have_as_much_as_others
    test_ranks_agree_on_what_is_uniform_in_a_changed_program_that_is_accepted
    test_run_clm_has_the_same_losses_with_both_trainers_also_when_it_goes_on
    test_sizes_that_meet_a_constant_of_the_model test_state_lies_on_the_host_where_the_file_says_so
    test_steps_that_compute_with_lengths_are_those_of_plain_torch
    test_the_newest_complete_checkpoint_is_resumed_and_others_are_logged
    test_tiles_in_tiles_are_the_function_under_every_transform test_what_is_too_far_from_its_reference_is_named
    test_quantized_layers_are_their_dequantized_values
    test_a_program_of_open_sizes_is_the_program_that_is_traced_at_each_size
    test_the_measured_peak_is_the_predicted_one
    test_results_are_those_of_a_step_that_is_traced_at_each_length_and_it_is_traced_twice
    test_state_elsewhere_trains_as_plain_torch test_batches_may_be_parts_of_longer_ones
    test_steps_that_are_traced_twice_for_all_lengths test_a_family_is_saved_and_loaded
    test_the_layers_of_llama_in_a_loop_are_the_model test_beams test_outlining_preserves_meaning
    test_further_lengths_are_not_traced_and_no_one_is_told_that_they_are
    test_autocast_is_that_of_torch_around_the_module test_running_statistics_are_those_of_transformers_also_resumed
    test_noise_is_drawn_anew_at_each_batch_and_is_that_of_the_seed test_offload_is_the_host
    test_activation_checkpointing_is_that_of_the_model test_hybrid_needs_replicas test_a_tiny_model_trains
    test_an_optimizer_of_a_subclass_is_taken_or_named test_arguments_mean_the_same
    test_a_search_of_placements_is_near_exhaustive_search
    test_a_loop_is_traced_twice_for_all_lengths test_a_branch_by_length_is_a_condition
    test_the_host_lowers_the_least_peak test_more_bytes_never_take_more_time test_results_are_equal
    test_a_manifest_that_says_anything_with_a_right_sum test_copies_of_layers_are_what_layers_record
    test_virtual_tokens_generate_nothing test_a_further_trace_is_logged_by_a_name_that_the_user_knows
    test_a_wait_for_a_copy_to_the_host_is_no_use_of_a_layer test_the_peak_falls_with_the_rows_of_a_part
    test_no_write_through_a_view_is_lost test_each_pass_preserves_meaning_alone
    """.split()
)
"""Functions of which a case takes more than two seconds of a processor, as far as that was measured."""
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
        quick += others[:1]
        further += others[1:]
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
