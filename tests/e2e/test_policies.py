"""Policies with real processes: a role that is done completes the job, and a job that finds no nodes is paused."""

from __future__ import annotations

import pytest

from tests.e2e.roles import pids, submit_caches
from tests.e2e.support import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(180)]

NODES = 3


def test_a_role_that_is_done_completes_the_job(shared: Cluster) -> None:
    folder = submit_caches(
        shared, "complete", cache="grace: 2s", work="policies: [{on: TaskCompleted, do: CompleteJob}]"
    )
    (folder / "enough").touch()
    job = shared.until_phase("complete", "succeeded", 30)
    assert job["reason"] == (
        "a policy of the job says CompleteJob for TaskCompleted: every worker of role work of generation 1 exited 0"
    )
    shared.until(lambda: not pids(shared, "complete"), 15, "the caches were stopped")


def test_a_job_that_finds_no_nodes_is_paused_until_it_is_resumed(shared: Cluster) -> None:
    shared.submit(f"""
name: pending
command: [sleep, "600"]
nodes: {NODES + 1}
workers_per_node: 1
gpus_per_worker: 0
policies: [{{on: PodPending, timeout: 3s, do: AbortJob}}]
""")
    text = (
        "a policy of the job says AbortJob for PodPending: it has waited for nodes for 3 s; go on with: nodeagentctl "
        "resume pending"
    )
    assert shared.until_phase("pending", "paused", 30)["reason"] == text
    assert text in shared.ctl("describe", "pending").stdout.replace("\n", " ")
    assert shared.ctl("resume", "pending", "--no-wait").returncode == 0
    shared.until_phase("pending", "holding", 10)
    assert shared.until_phase("pending", "paused", 30)["reason"] == text
    shared.ctl("stop", "pending")
    shared.until_phase("pending", "stopped", 10)
