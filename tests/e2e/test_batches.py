"""A batch on real nodes: jobs that come after others, an array whose agent dies, and a job whose time is over."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.support import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(300)]
NODES = 2
COUNT, AT_ONCE = 6, 2
BATCH = f"""
name: collect
command: [sh, -c, 'echo collect >> order']
nodes: 1
workers_per_node: 1
fork_server: off
after: sweep
---
name: prepare
command: [sh, -c, 'sleep 1; echo prepare >> order']
nodes: 1
workers_per_node: 1
fork_server: off
---
name: sweep
command: [sh, -c, 'echo begin $NODEAGENT_ARRAY_INDEX >> order; sleep 1.5; echo end $NODEAGENT_ARRAY_INDEX >> order']
nodes: 1
workers_per_node: 1
fork_server: off
after: prepare
array: 1-{COUNT}%{AT_ONCE}
"""


def test_a_batch_runs_in_its_order_and_no_more_at_once_than_may(calm: Cluster) -> None:
    calm.submit(BATCH)
    order = calm.work / "order"
    calm.until(lambda: order.exists() and "begin" in order.read_text(), 60, "the array has begun")
    waits = calm.job("collect")["why"]
    assert any(why.startswith("waits for array sweep to succeed (") for why in waits), waits
    os.kill(calm.node("n1")["agent_pid"], signal.SIGKILL)
    calm.until_phase("collect", "succeeded", 120)
    first, *steps, last = order.read_text().splitlines()
    assert (first, last) == ("prepare", "collect")
    assert sorted(steps) == sorted(f"{what} {i}" for what in ("begin", "end") for i in range(1, COUNT + 1))
    running = 0
    for step in steps:
        running += 1 if step.startswith("begin") else -1
        assert running <= AT_ONCE, steps
    assert calm.job("sweep-1")["restarts"] == 0
    shown = calm.ctl("get").stdout
    assert f"sweep[1-{COUNT}]" in shown and "6 SUCCEEDED" in shown
    calm.ctl("delete", "sweep")
    assert calm.ctl("get", "sweep", check=None).returncode == 3


def test_a_job_whose_time_is_over_saves_and_has_failed(calm: Cluster) -> None:
    script = "trap 'echo saved; exit 0' TERM; echo left $NODEAGENT_TIME_LEFT; while :; do sleep 0.1; done"
    spec = f'name: limited\ncommand: [sh, -c, "{script}"]\nnodes: 2\nworkers_per_node: 1\nfork_server: off\n'
    calm.ctl("cordon", "n1", "--reason", "its time is to begin when both are submitted")
    calm.submit(spec + "time_limit: 5s\n")
    calm.submit("name: next\ncommand: ['true']\nnodes: 1\nworkers_per_node: 1\nfork_server: off\nafter: limited\n")
    calm.ctl("uncordon", "n1")
    job = calm.until_phase("limited", "failed", 60)
    assert (job["reason"], job["outcome"]["code"]) == ("its time limit of 5 s is reached", 124)
    calm.until(lambda: calm.ctl("logs", "limited").stdout.count("saved") == 2, 30, "both workers had their grace")
    assert calm.ctl("logs", "limited").stdout.count("left 5\n") == 2
    never = calm.until_phase("next", "failed")
    assert (never["reason"], never["outcome"]["code"]) == ("never ran: job limited has failed", 125)
