"""Which end-to-end tests `make test` runs: one for each way of recovery, and one for each thing that users do.

All others are `slow`: the same fault at another moment, or a longer look at it. `make test-rest` runs those, and CI
after `make test`. A new end-to-end test is among them until it is named here. Other tests are marked where they are, or
named here if all that speaks against them is how long they take (`LATER`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

STOP_AT = "NODEAGENT_TESTS_STOP_AT"
"""Environment variable: begin no test after this time, in seconds since the epoch."""
NOT_REACHED = "not reached"
TESTS = "tests/"
E2E = TESTS + "e2e/"
WAYS: dict[str, tuple[str, ...]] = {
    "a trainer and a parameter server die": ("test_roles.py::test_a_trainer_and_a_server_are_killed",),
    "a shim dies": ("test_faults_workers.py::test_shim_killed",),
    "a node dies, and a spare takes its place": (
        "test_faults_nodes.py::test_a_node_killed_is_replaced_by_the_spare[rank-0]",
    ),
    "a node dies right after the start": (
        "test_blame.py::test_a_node_that_is_lost_right_after_the_start_costs_nothing_although_its_peers_hide_it",
    ),
    "a node freezes past its lease": ("test_faults_agents.py::test_frozen_past_the_lease[agent-and-shim]",),
    "an agent dies, and another is started": ("test_faults_agents.py::test_an_agent_killed_disturbs_nothing",),
    "an agent is stuck, and a lease process dies": (
        "test_faults_agents.py::test_a_stuck_agent_and_a_killed_lease_process_disturb_nothing",
    ),
    "an agent is stuck while another node has a fault": (
        "test_faults_agents.py::test_a_fault_elsewhere_does_not_wait_for_a_stuck_agent",
    ),
    "a second agent under the same name": ("test_second_agent.py::test_the_same_id_from_another_address",),
    "Redis freezes": ("test_store_away.py::test_redis_frozen_and_thawed",),
    "Redis dies and comes back": ("test_store_away.py::test_redis_killed_and_back_with_its_data",),
    "Redis comes back empty": ("test_lost_store.py::test_an_emptied_redis_disturbs_nothing[killed_without_its_data]",),
    "Redis fails over": ("test_failover.py::test_the_primary_dies[kill-1]",),
    "a node cut off from Redis": ("test_partitions.py::test_a_member_and_the_store[both]",),
    "a node cut off from everything": ("test_partitions.py::test_a_node_cut_off_from_the_store_and_all_others",),
    "everything loses power": ("test_power_cut.py",),
    "a GPU falls off the bus": ("test_health.py::test_a_gpu_that_falls_off_the_bus_is_left_out_until_it_is_repaired",),
    "a rank hangs": ("test_hangs.py::test_the_rank_that_hangs_is_named_and_the_gang_goes_on[stop]",),
    "scaled, drained, joined and paused without losing a step": (
        "test_graceful.py::test_scaled_drained_joined_paused_and_restarted_without_losing_a_step",
    ),
    "state in memory outlives its worker": ("test_snapshots.py::test_any_worker_and_all_of_them_may_be_killed",),
    "worker after worker dies, and not one bit changes": (
        "test_exact.py::test_kills_at_one_size_change_not_one_bit[3]",
    ),
    "the command that owns a cluster dies": (
        "test_local_cluster.py::test_kill_9_of_the_command_that_owns_a_cluster_leaves_nothing",
        "test_orphans.py::test_kill_9_of_run",
    ),
    "a cluster from up to down": ("test_local_cluster.py::test_a_cluster_and_its_job_from_up_to_down",),
    "torchrun's words": (
        "test_run_dropin.py::test_a_signal_is_128_more_and_the_restart_budget_counts",
        "test_run_dropin.py::test_the_same_variables_and_arguments_as_under_torchrun",
    ),
    "refusals": (
        "test_starts.py::test_a_command_that_does_not_exist",
        "test_starts.py::test_a_script_that_fails_at_its_start_is_not_tried_eleven_times",
    ),
}
"""What is shown, and by which tests of tests/e2e: a file, a function (with all its cases), or one case."""

LATER: tuple[str, ...] = (
    "contract/test_differences.py::test_what_was_read_in_differences_is_the_record[0-80]",
    "contract/test_differences.py::test_what_was_read_in_differences_is_the_record[1-80]",
    "contract/test_usual_acks.py::test_whatever_there_is_an_acknowledgement_does_what_the_whole_step_would[2]",
    "contract/test_usual_acks.py::test_whatever_there_is_an_acknowledgement_does_what_the_whole_step_would[3]",
    "e2e/test_addresses.py",
    "e2e/test_batches.py",
    "e2e/test_faults_workers.py::test_each_kill_of_a_worker_is_counted_once",
    "e2e/test_forged_jobs.py::test_with_a_changed_command",
    "e2e/test_jobs_together.py::test_the_higher_priority_goes_first",
    "e2e/test_membership.py::test_drain_moves_the_work",
    "e2e/test_other_users.py",
    "e2e/test_permissions.py",
    "e2e/test_planned_restart.py::test_seconds_without_an_agent_disturb_nothing",
    "e2e/test_refusals.py",
    "e2e/test_remote.py::test_the_tool_over_https_with_a_token",
    "e2e/test_run_dropin.py",
    "e2e/test_starts.py",
    "hostile/test_job_user_processes.py::test_what_left_its_session_ends_with_the_granted_time_of_a_stopped_shim[own_subreaper]",
    "hostile/test_job_user_processes.py::test_what_left_its_session_ends_with_the_granted_time_of_a_stopped_shim[twice]",
    "hostile/test_job_user_processes.py::test_what_left_its_session_ends_with_the_granted_time_of_a_stopped_shim[of_a_thread]",
    "hostile/test_job_user_processes.py::test_what_left_its_session_ends_with_the_granted_time_of_a_stopped_shim[without_its_main_thread]",
    "hostile/test_job_user_processes.py::test_what_runs_as_another_user_ends_before_its_pod_is_quiet[cgroup-retire]",
    "hostile/test_job_user_processes.py::test_what_runs_as_another_user_ends_before_its_pod_is_quiet[no cgroup-stop]",
    "hostile/test_local_account.py::test_many_large_jobs",
    "hostile/test_redis_only.py::test_a_field_that_no_difference_brings",
    "hostile/test_redis_only.py::test_a_key_that_is_deleted_or_of_another_type",
    "hostile/test_redis_only.py::test_a_number_that_no_step_can_have_made_is_forgotten",
    "integration/test_api_away.py::test_a_stopped_store",
    "integration/test_diag.py::test_a_driver_that_hangs_and_one_that_lost_a_gpu",
    "integration/test_diag.py::test_a_history_grows_and_a_gpu_that_has_become_slow_fails",
    "integration/test_fork_server_torch.py::test_gang_of_two_forked_and_plain",
    "integration/test_fork_server_torch.py::test_warming_up_leaves_nothing_behind",
    "integration/test_health_probes.py::test_a_call_that_never_returns",
    "integration/test_health_probes.py::test_gpus_that_are_slow_to_come_up_are_no_hung_driver",
    "integration/test_health_storm.py",
    "integration/test_lease_beside_agent.py::test_systemd_is_asked_to_run_it_and_first_to_forget_what_has_its_name",
    "integration/test_lease_failsafe.py::test_they_run_on_and_say_so[patient]",
    "integration/test_lease_process.py::test_no_reader_ever_sees_its_time_over_while_the_process_is_killed_again_and_again",
    "integration/test_page.py::test_a_store_that_waits_or_is_away_and_a_cluster_without_jobs",
    "integration/test_pods_host.py::test_a_full_disk_may_pass_and_a_missing_program_does_not",
    "integration/test_pods_host.py::test_unfit_and_fit_again",
    "integration/test_prometheus_https.py::test_prometheus_reads_over_https_with_a_token_only[reads-]",
    "integration/test_redis_client.py::test_a_call_that_has_to_connect_first_has_the_time_for_both",
    "integration/test_redis_replicas.py::test_a_fail_over_is_followed_and_nothing_acknowledged_is_lost[soon down]",
    "integration/test_redis_replicas.py::test_a_sentinel_that_names_a_replica_is_not_believed",
    "integration/test_redis_replicas.py::test_what_the_sentinels_can_tell",
    "integration/test_shim_grants.py::test_a_record_that_is_gone_or_damaged_gives_no_time[empty]",
    "integration/test_shim_grants.py::test_a_record_that_is_gone_or_damaged_gives_no_time[overwrite]",
    "integration/test_shim_hang.py::test_a_pod_that_is_asked_tells_what_it_sees",
    "integration/test_shim_hang.py::test_a_reading_before_the_limit_halts_nobody_whose_limit_is_short",
    "integration/test_shim_hang.py::test_stacks_are_begun_before_the_limit_is_reached",
    "integration/test_shim_restarts.py::test_a_role_is_stopped_for_a_failure_elsewhere_whatever_it_was_about_to_do",
    "integration/test_shim_restarts.py::test_a_service_that_is_started_again_has_its_own_progress",
    "integration/test_shim_silent.py::test_a_slow_disk_delays_a_promise_and_ends_no_shim",
    "integration/test_shim_snapshots.py::test_a_role_finds_what_it_has_kept_itself",
    "integration/test_shim_snapshots.py::test_ranks_whose_local_rank_is_0_on_all_have_each_their_own",
    "integration/test_shim_snapshots.py::test_a_state_that_all_share_serves_ranks_that_have_none",
    "integration/test_shim_watchdog.py::test_a_stopped_shim_leaves_nothing_running_past_the_granted_time[plain]",
    "integration/test_shim_writeout.py::test_a_grant_that_wants_the_workers_stopped_leaves_the_agents_own_stop_as_it_is",
    "integration/test_shim_writeout.py::test_what_the_workers_committed_meanwhile_is_later",
    "integration/test_train_checkpoints.py::test_one_process_goes_on_and_passes_over_what_is_damaged",
    "integration/test_train_checkpoints.py::test_what_goes_wrong_on_rank_0_is_known_to_all_and_ends_nothing",
    "integration/test_train_sharded.py::test_one_state_is_right_for_all",
    "sim/test_backfill.py",
    "sim/test_borrowing.py::test_a_queue_gets_its_part_back_from_one_that_has_all",
    "sim/test_damage.py::test_a_job_that_nobody_gives_back_then_is_found_missing",
    "sim/test_growth.py::test_a_broken_newcomer_ends_no_job_and_is_tried_less_and_less_often",
    "sim/test_growth.py::test_a_node_that_is_lost_again_and_again_stops_a_gang_less_and_less_often",
    "sim/test_growth.py::test_a_node_that_never_acknowledges_stops_a_gang_less_and_less_often",
    "sim/test_large.py::test_a_large_cluster_with_many_jobs",
    "sim/test_overload.py::test_a_busy_store_works_off_what_piled_up_while_it_stood",
    "sim/test_pace.py::test_events_without_end_make_no_agent_beat_without_end[0.005]",
    "sim/test_queue.py::test_jobs_that_cannot_have_enough_nodes_prepare_none",
    "sim/test_repair.py::test_of_many_sick_nodes_one_is_away_at_a_time",
    "sim/test_shares.py",
    "sim/test_signatures.py::test_a_cluster_that_was_off_for_a_weekend_goes_on",
    "sim/test_signatures.py::test_admissions_are_renewed_and_nodes_that_come_late_believe_them",
    "sim/test_teams.py::test_teams",
    "unit/diag/test_crew.py::test_a_start_that_hangs",
    "unit/diag/test_crew.py::test_a_wrong_result_and_one_hand_that_hangs_in_the_collective",
)
"""What `make test` has no time for, though it is part of the main proof: long tests beside shorter ones of the same
promise, and ways that others show in part or the simulation shows. In tests/, named as in ``WAYS``, which goes first;
`make test-rest` begins with them."""

AFTER_THE_START = E2E + "test_clocks.py"
"""Its Redis runs under libfaketime and is slow; it must answer in time, so it begins when the first clusters stand."""


def sort_out(items: list[pytest.Item]) -> None:
    """Mark end-to-end tests that are not in ``WAYS``, and those on systemd nodes, as slow; and put what takes longest
    first: the last ones to run should be short, so that all who run them end together."""
    chosen = {E2E + name for names in WAYS.values() for name in names}
    later = {TESTS + name for name in LATER}

    def forms(name: str) -> set[str]:
        return {name, name.partition("[")[0], name.partition("::")[0]}

    for item in items:
        apart = item.nodeid.startswith(E2E) or forms(item.nodeid) & later
        if (apart and not forms(item.nodeid) & chosen) or item.get_closest_marker("nodes_short"):
            item.add_marker(pytest.mark.slow)
    order = [f"{TESTS}{folder}/" for folder in ("nodes", "e2e", "hostile", "integration", "contract", "sim")]

    def place(item: pytest.Item) -> float:
        if forms(item.nodeid) & later:  # CI stops when its time is over, and these are part of the main proof
            return -1
        found = next((n for n, start in enumerate(order) if item.nodeid.startswith(start)), len(order))
        return found + 0.5 * item.nodeid.startswith(AFTER_THE_START)

    items.sort(key=place)


def seeds(first: Sequence[int], others: Sequence[int] = ()) -> tuple[ParameterSet, ...]:
    """Seeds of a simulation, for ``parametrize``: the first ones for `make test`, the others for `make test-rest`."""
    return (*(pytest.param(n) for n in first), *(pytest.param(n, marks=pytest.mark.slow) for n in others))


def one_in(count: int, cases: Iterable[Any]) -> tuple[ParameterSet, ...]:
    """Cases of one kind, for ``parametrize``: the first of each ``count`` for `make test`, the others for `make
    test-rest`."""
    return tuple(pytest.param(case, marks=pytest.mark.slow if at % count else ()) for at, case in enumerate(cases))


def skip_when_time_is_over(environ: Mapping[str, str]) -> None:
    """Called before each test."""
    if (end := environ.get(STOP_AT)) is not None and time.time() > float(end):
        pytest.skip(f"{NOT_REACHED}: the time for these tests was over")
