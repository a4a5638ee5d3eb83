"""Which end-to-end tests `make test` runs: one for each way of recovery, and one for each thing that users do.

All others are `slow`: the same fault at another moment, or a longer look at it. `make test-rest` runs those, and CI
after `make test`. A new end-to-end test is among them until it is named here; other tests are marked where they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest
from _pytest.mark import ParameterSet

STOP_AT = "NODEAGENT_TESTS_STOP_AT"
"""Environment variable: begin no test after this time, in seconds since the epoch."""
NOT_REACHED = "not reached"
E2E = "tests/e2e/"
WAYS: dict[str, tuple[str, ...]] = {
    "a trainer and a parameter server die": ("test_roles.py::test_a_trainer_and_a_server_are_killed",),
    "a worker dies": ("test_faults_workers.py::test_each_kill_of_a_worker_is_counted_once",),
    "a shim dies": ("test_faults_workers.py::test_shim_killed",),
    "a node dies, and a spare takes its place": (
        "test_faults_nodes.py::test_a_node_killed_is_replaced_by_the_spare[rank-0]",
    ),
    "a node dies, and its peers hide why they failed": (
        "test_blame.py::test_a_node_that_is_lost_right_after_the_start_costs_nothing_although_its_peers_hide_it",
    ),
    "nodes whose address nobody configured": ("test_addresses.py",),
    "a node freezes past its lease": ("test_faults_agents.py::test_frozen_past_the_lease[agent-and-shim]",),
    "an agent dies, and another is started": ("test_faults_agents.py::test_an_agent_killed_disturbs_nothing",),
    "an agent hangs, and a lease process dies": (
        "test_faults_agents.py::test_a_stuck_agent_and_a_killed_lease_process_disturb_nothing",
    ),
    "a job waits for a node whose agent hangs": (
        "test_faults_agents.py::test_a_fault_elsewhere_does_not_wait_for_a_stuck_agent",
    ),
    "an agent is restarted on purpose; its lease process holds the lease": (
        "test_planned_restart.py::test_seconds_without_an_agent_disturb_nothing",
    ),
    "Redis freezes": ("test_store_away.py::test_redis_frozen_and_thawed",),
    "Redis dies and comes back": ("test_store_away.py::test_redis_killed_and_back_with_its_data",),
    "Redis comes back empty": ("test_lost_store.py::test_an_emptied_redis_disturbs_nothing[killed_without_its_data]",),
    "Redis fails over": ("test_failover.py::test_the_primary_dies[kill-1]",),
    "a node cut off from Redis": ("test_partitions.py::test_a_member_and_the_store[both]",),
    "a node cut off from everything": ("test_partitions.py::test_a_node_cut_off_from_the_store_and_all_others",),
    "everything loses power": ("test_power_cut.py",),
    "a GPU falls off the bus": ("test_health.py::test_a_gpu_that_falls_off_the_bus_is_left_out_until_it_is_repaired",),
    "a rank hangs": ("test_hangs.py::test_the_rank_that_hangs_is_named_and_the_gang_goes_on[stop]",),
    "a node is drained": ("test_membership.py::test_drain_moves_the_work",),
    "scaled, drained, joined and paused without losing a step": (
        "test_graceful.py::test_scaled_drained_joined_paused_and_restarted_without_losing_a_step",
    ),
    "state in memory outlives its worker": ("test_snapshots.py::test_any_worker_and_all_of_them_may_be_killed",),
    "not one bit changes": ("test_exact.py::test_kills_at_one_size_change_not_one_bit",),
    "a clock steps": ("test_clocks.py::test_a_wall_clock_steps_by_an_hour[store]",),
    "the command that owns a cluster dies": (
        "test_local_cluster.py::test_kill_9_of_the_command_that_owns_a_cluster_leaves_nothing",
        "test_orphans.py::test_kill_9_of_run",
    ),
    "a second agent of the same name": ("test_second_agent.py",),
    "a cluster from up to down": ("test_local_cluster.py::test_a_cluster_and_its_job_from_up_to_down",),
    "torchrun's words": ("test_run_dropin.py",),
    "a batch, and a time limit": ("test_batches.py",),
    "two jobs, one place": ("test_jobs_together.py::test_the_higher_priority_goes_first",),
    "a forged job": ("test_forged_jobs.py::test_with_a_changed_command",),
    "other users": ("test_other_users.py", "test_permissions.py"),
    "the tool over https": ("test_remote.py::test_the_tool_over_https_with_a_token",),
    "refusals": ("test_refusals.py", "test_starts.py"),
}
"""What is shown, and by which tests of tests/e2e: a file, a function (with all its cases), or one case."""


AFTER_THE_START = E2E + "test_clocks.py"
"""Its Redis runs under libfaketime and is slow; it must answer in time, so it begins when the first clusters stand."""


def sort_out(items: list[pytest.Item]) -> None:
    """Mark end-to-end tests that are not in ``WAYS``, and those on systemd nodes, as slow; and put what takes longest
    first: the last ones to run should be short, so that all who run them end together."""
    chosen = {E2E + name for names in WAYS.values() for name in names}
    for item in items:
        name = item.nodeid
        forms = {name, name.partition("[")[0], name.partition("::")[0]}
        of_e2e = name.startswith(E2E) and not forms & chosen
        if of_e2e or item.get_closest_marker("nodes_short"):
            item.add_marker(pytest.mark.slow)
    order = [f"tests/{folder}/" for folder in ("nodes", "e2e", "hostile", "integration", "contract", "sim")]

    def place(item: pytest.Item) -> float:
        found = next((n for n, start in enumerate(order) if item.nodeid.startswith(start)), len(order))
        return found + 0.5 * item.nodeid.startswith(AFTER_THE_START)

    items.sort(key=place)


def seeds(first: Sequence[int], others: Sequence[int] = ()) -> tuple[ParameterSet, ...]:
    """Seeds of a simulation, for ``parametrize``: the first ones for `make test`, the others for `make test-rest`."""
    return (*(pytest.param(n) for n in first), *(pytest.param(n, marks=pytest.mark.slow) for n in others))


def skip_when_time_is_over(environ: Mapping[str, str]) -> None:
    """Called before each test."""
    if (end := environ.get(STOP_AT)) is not None and time.time() > float(end):
        pytest.skip(f"{NOT_REACHED}: the time for these tests was over")
