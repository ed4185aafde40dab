"""What `make test` leaves to `make test-all`, so that it ends within ten minutes on a slow CPU.

A test with the mark `slow` is left out. Of those with many cases in the files below about one case
of eight runs, the first always, and the same ones every time. CI runs all.
"""

from __future__ import annotations

import zlib

import pytest

ONE_OF = 8
MANY = 3
"""Tests with at least so many cases are thinned out."""
THINNED = (
    *("test_model_matrix.py", "test_greedy.py", "test_windows.py", "test_turboquant_loops.py"),
    *("test_cold_parity.py", "test_hybrids.py", "test_compressed.py", "test_hybrid_loops.py"),
    *("test_bounds.py", "test_quantized_tiers.py", "test_quantized_latents.py", "test_sampling.py"),
    *("test_factory.py", "test_codecs.py", "test_codec.py", "test_quantized_prefix_cache.py"),
    *("test_machines.py", "test_engine_machine.py", "test_tree_machine.py"),
    *("test_cold_machine.py", "test_schema.py", "test_coded_reads.py", "test_engine.py"),
    *("test_requantize.py", "test_segment.py", "test_memory.py", "test_plan.py"),
    *("test_parsing.py", "test_speculation.py", "test_kernels.py", "test_draft.py"),
    *("test_speculation_families.py",),
    *("test_attend.py", "test_conversation_ends.py", "test_scripted_model.py"),
    *("test_cold_faults.py", "test_evaluate.py", "test_partial_blocks.py", "test_codec_hits.py"),
    *("test_prompt_memory.py", "test_connections.py", "test_min_tokens.py"),
)
"""Files whose cases take longest."""
SLOW = (
    *("test_machine_notices_a_broken_engine", "test_machine_notices_a_broken_policy"),
    *("test_machine_notices_a_broken_tree", "test_a_broken_cache_is_noticed"),
    *("test_machine_notices_a_wrong_end_of_a_match", "test_machine_notices"),
    *("test_the_machine_notices_a_broken_scheduler", "test_machine_notices_what_is_broken"),
    *("test_a_process_that_forgets_to_close_ends_as_it_would_without",),
    *("test_processes_that_are_killed_at_any_moment_leave_a_good_folder",),
    *(
        "test_two_processes_share_a_folder_and_one_is_killed",
        "test_two_processes_write_nothing_twice",
    ),
    *("test_a_process_whose_engine_dies_tells_all_and_ends_with_1",),
    *("test_a_process_whose_idle_engine_dies_ends_with_1", "test_huge_numbers"),
    *("test_the_second_signal_ends_it_at_once", "test_filters_with_ties"),
    *("test_what_was_told_this_morning_is_known_this_evening", "test_its_text_is_that_of_generate"),
    *("test_what_is_held_is_what_mlx_has_within_3_percent", "test_little_memory"),
    *("test_all_of_it_beside_a_process_that_writes", "test_objects_that_somebody_keeps_are_seen"),
    *("test_damage_beside_a_process_that_writes_is_still_found",),
    *("test_an_index_that_is_made_anew_under_a_process_is_the_one_it_goes_on_with",),
    *("test_another_answer_to_the_same_request_is_seen", "test_the_comparison_sees"),
    *("test_a_writer_that_is_killed_loses_at_most_its_block",),
    *("test_a_disk_that_is_full_and_one_that_is_read_only",),
    *("test_the_limit_holds_where_the_scores_of_one_token_are_many",),
    *("test_a_run_takes_less_at_its_peak_than_in_full_precision",),
    *("test_both_servers_answer_every_session", "test_blocks_of_any_size_are_read_back"),
    *("test_idle_connections_leave_the_engine_alive_and_a_place_for_health",),
    *("test_no_connection_stays_open_for_a_request_that_does_not_come",),
    *("test_the_default_bounds_hold_in_a_process", "test_every_byte_comes_back"),
    *("test_families_of_other_kinds", "test_what_was_deleted_stays_deleted_after_a_restart"),
    *("test_eight_answers_that_ask_for_32_000_tokens_run_together",),
    *("test_a_preempted_answer_goes_on_as_if_it_was_alone",),
    *("test_storing_takes_little_more_than_what_is_stored",),
    *("test_the_process_writes_down_nothing_of_anybody",),
    *("test_raw_is_itself_and_the_same_on_every_form",),
    *("test_codes_take_less_at_rest_and_at_the_peak",),
    *("test_turns_after_restarts_as_an_engine_is_shipped",),
    *("test_the_limit_that_is_proposed_is_enough", "test_other_codecs_miss_and_harm_nothing"),
    *("test_however_it_is_fed_what_is_short_is_raw_and_what_is_long_is_not",),
    *("test_arrays_that_somebody_keeps_are_seen",),
    *("test_tasks_on_a_real_text_and_what_the_layers_lose",),
    *("test_ends_that_do_not_linger_would_be_more",),
    *("test_records_of_no_more_than_a_large_block_would_be_more",),
    *("test_engine_does_so_whatever_its_settings_are_together",),
    *("test_told_to_stop_it_ends_what_is_open_and_nothing_new", "test_raw_is_no_codec"),
    *("test_agents_of_one_seed_say_the_same", "test_a_short_prompt_passes_a_long_one"),
    *("test_it_says_when_the_server_is_gone_and_greys_its_figures",),
    *("test_what_an_engine_wrote_is_read_by_another_from_an_imported_folder",),
    *("test_a_failure_stops_nothing", "test_every_task_is_measured_on_every_side"),
    *("test_windows_are_measured_on_all_forms_and_beside_raw",),
    *("test_a_bench_that_is_told_to_end_leaves_no_process_behind",),
    *("test_nobody_hangs_when_the_engines_thread_dies", "test_what_fits_is_let_in"),
)
"""Tests that take long, most of them because they start processes or look for planted faults."""


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return which of the tests are for `make test-all` alone."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        cases.setdefault((str(item.path), _name(item)), []).append(item)
    found = []
    for (_, name), of_one in cases.items():
        if name in SLOW or of_one[0].get_closest_marker("slow"):
            found += of_one
        elif of_one[0].path.name in THINNED and len(of_one) >= MANY:
            found += [item for item in of_one[1:] if zlib.crc32(item.name.encode()) % ONE_OF]
    return found


def _name(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", None) or item.name)
