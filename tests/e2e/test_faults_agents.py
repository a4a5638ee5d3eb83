"""Faults of agents and lease processes: either may die or hang; where both do, the fence stops the workers."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from nodeagent.model.timing import Timing
from nodeagent.osutil.linux import boottime
from tests.e2e import lockstep
from tests.e2e.support import (
    Cluster,
    check_complete,
    check_steps,
    check_undisturbed,
    digits_job,
    is_alive,
    lockstep_job,
    read_steps,
)

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480)]

NODES = 3
FENCE = Timing().fence
AGENT_MB = 72
"""What an agent may hold: the goal for both is 80, 8 of them the lease process's. How much it is depends on how many
agents share their pages on this machine; `make bench` has the figure."""


def test_an_agent_killed_disturbs_nothing(calm: Cluster) -> None:
    calm.submit(lockstep_job(calm.work, "agent", nodes="2"))
    before = calm.until_running("agent", 2)
    calm.until_steps("agent", 10)
    workers = calm.until_workers("agent", 4)
    shims = {p["node"]: p["shim_pid"] for p in before["pods"]}
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in workers.values()} == {0}, "only what is ours goes first"
    for node in shims:  # rank 0's agent, then the other's
        agent = calm.node(node)
        os.kill(agent["agent_pid"], signal.SIGKILL)
        calm.until(lambda n=node, a=agent: calm.node(n)["agent_pid"] != a["agent_pid"], 30, "its agent is back")  # type: ignore[misc]
        now = calm.node(node)["incarnation"]
        assert (now["life"], now["start"]) == (agent["incarnation"]["life"], agent["incarnation"]["start"] + 1)
        calm.until_steps("agent", 10)
        # A pod that the new agent has not reached at once is published without its workers until it looks again.
        calm.until(lambda: calm.workers("agent") == workers, 20, "every pod is published again")
        assert {p["node"]: p["shim_pid"] for p in calm.job("agent")["pods"]} == shims
    calm.ctl("stop", "agent", "--timeout", "60s")
    job = calm.job("agent")
    assert (job["generation"], job["restarts"], job["budget"]["used"]) == (before["generation"], 0, 0)
    assert calm.restarts_counted("agent") == 0
    rows = read_steps(calm.work, "agent")
    check_undisturbed(rows)
    check_steps(rows, lockstep.losses())
    check_complete(rows, max(row["step"] for row in rows))
    for node in calm.nodes():
        assert proportional(calm.node(node)["agent_pid"]) < AGENT_MB, f"MB of {node}'s agent"


def test_restarts_are_counted_over_restarts_of_agents(calm: Cluster) -> None:
    """Workers are killed while agents are killed, too: before, after, and at the same moment."""
    calm.submit(yaml.safe_dump({"name": "counted", "command": ["sleep", "infinity"], "nodes": 2, "workers_per_node": 1,
                                "restarts": {"max": 10}}))  # fmt: skip
    job = calm.until_running("counted", 2)
    before = {node: calm.node(node)["incarnation"]["start"] for node in calm.nodes()}
    starts = dict.fromkeys(before, 0)
    for kills, (first, agents) in enumerate([(0, 0), (1, 1), (0, 2), (1, 2), (0, 1)], 1):
        nodes = [pod["node"] for pod in job["pods"]]
        victim = calm.until_workers("counted", 2)[kills % 2]
        for node in (nodes[first], nodes[1 - first])[:agents]:
            os.kill(calm.node(node)["agent_pid"], signal.SIGKILL)
            starts[node] += 1
        os.kill(victim, signal.SIGKILL)
        job = calm.until_running("counted", 2, above=job["generation"])

        def back(starts: dict[str, int] = starts) -> bool:
            now = {node: calm.node(node) for node in before}
            return all(
                n["state"] == "ready" and n["http"] and n["incarnation"]["start"] == before[node] + starts[node]
                for node, n in now.items()
            )

        calm.until(back, 30, "all agents are back")
        calm.until(lambda k=kills: calm.restarts_counted("counted") == k, 10, f"{kills} restarts are counted")  # type: ignore[misc]
        assert calm.job("counted")["restarts"] == kills


def proportional(pid: int) -> float:
    """MB of memory that a process holds, its share of what it has in common with others (PSS): as the goal is set."""
    rows = dict(line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(rows["Pss:"]) / 1024


def freeze(calm: Cluster, node: str, pids: Iterable[int]) -> None:
    calm.frozen.add(node)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def thaw(calm: Cluster, node: str, pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    calm.frozen.discard(node)


def test_a_stuck_agent_and_a_killed_lease_process_disturb_nothing(calm: Cluster) -> None:
    """The agent is stopped for four fences; then its lease process is killed ten times, each after a renewal."""
    calm.submit(lockstep_job(calm.work, "stuck", nodes="2", delay=0.1))
    before = calm.until_running("stuck", 2)
    node = before["pods"][0]["node"]
    calm.until_steps("stuck", 10)
    workers, incarnation = calm.until_workers("stuck", 4), calm.node(node)["incarnation"]
    agent = calm.node(node)["agent_pid"]
    freeze(calm, node, [agent])
    try:
        time.sleep(4 * FENCE)
        assert all(is_alive(pid) for pid in workers.values())
    finally:
        thaw(calm, node, [agent])
    for _ in range(10):
        os.kill(calm.lease_pid(node), signal.SIGKILL)
        killed = boottime()
        calm.until(lambda since=killed: calm.renewed(node) > since, 10, "another one renews the lease")  # type: ignore[misc]
    calm.until_steps("stuck", 10)
    calm.until(lambda: calm.workers("stuck") == workers, 20, "every pod is published again")
    assert calm.node(node)["incarnation"] == incarnation
    calm.ctl("stop", "stuck", "--timeout", "60s")
    job = calm.job("stuck")
    assert (job["generation"], job["restarts"]) == (before["generation"], 0)
    rows = read_steps(calm.work, "stuck")
    check_undisturbed(rows)
    check_steps(rows, lockstep.losses())


@pytest.mark.slow
def test_20_s_without_an_agent_disturb_nothing(calm: Cluster, reference: dict[int, float]) -> None:
    """One node's agent stands still for 20 s; the other's is killed again whenever it is back."""
    calm.submit(digits_job(calm.work, "alone", nodes="2", steps=600, delay=0.1))
    before = calm.until_running("alone", 2)
    stuck, crashing = (pod["node"] for pod in before["pods"])
    calm.until_steps("alone", 10)
    workers, lives = calm.until_workers("alone", 4), {n: calm.node(n)["incarnation"]["life"] for n in (stuck, crashing)}
    agent, killed, end = calm.node(stuck)["agent_pid"], set[int](), time.monotonic() + 20
    freeze(calm, stuck, [agent])
    try:
        while time.monotonic() < end:
            pid = calm.node(crashing)["agent_pid"]
            if pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.1)
        assert len(killed) >= 2, "one that was back, too"
        assert all(is_alive(pid) for pid in workers.values())
    finally:
        thaw(calm, stuck, [agent])
    calm.until_steps("alone", 10)
    calm.until(lambda: calm.workers("alone") == workers, 20, "every pod is published again")
    assert {n: calm.node(n)["incarnation"]["life"] for n in lives} == lives
    calm.ctl("stop", "alone", "--timeout", "60s")
    job = calm.job("alone")
    assert (job["generation"], job["restarts"]) == (before["generation"], 0)
    rows = read_steps(calm.work, "alone")
    check_undisturbed(rows)
    check_steps(rows, reference)


def test_a_fault_elsewhere_does_not_wait_for_a_stuck_agent(calm: Cluster) -> None:
    """Its node lets go of the job that waits for it. Another job's workers there go on, and it is as good as before
    when its agent is back."""
    calm.submit(json.dumps({"name": "stays", "command": ["sleep", "600"], "nodes": 3, "workers_per_node": 1}))
    stays = calm.until_running("stays", 3)
    calm.submit(lockstep_job(calm.work, "waits", nodes="'1:2'", delay=0.2, workers=1))
    job = calm.until_running("waits", 2)
    calm.until(lambda: any(p["phase"] == "ready" for p in calm.job("waits")["spares"]), 60, "a spare is ready")
    calm.until_steps("waits", 5)
    victim = calm.until_workers("waits", 2)[1]  # rank 0's agent is stuck
    stuck = job["pods"][0]["node"]
    agent, life = calm.node(stuck)["agent_pid"], calm.node(stuck)["incarnation"]["life"]
    freeze(calm, stuck, [agent])
    try:
        time.sleep(2 * FENCE)
        os.kill(victim, signal.SIGKILL)
        # With the spare; and before a lease process without its agent would leave by itself (``without_agent``).
        job = calm.until_running("waits", 2, above=job["generation"], limit=24)
        assert stuck not in [p["node"] for p in job["pods"] if p["generation"] == job["generation"]]
        assert calm.nodes()[stuck] == "mute"
        assert job["budget"]["used"] == 1, "a SIGKILL came of no other's end"
    finally:
        thaw(calm, stuck, [agent])
    calm.until(lambda: calm.nodes()[stuck] == "ready", 30, "its agent speaks")
    assert calm.node(stuck)["incarnation"]["life"] == life
    calm.until_steps("waits", 5)
    now = calm.job("stays")
    assert (now["generation"], now["pods"]) == (stays["generation"], stays["pods"])
    for name in ("waits", "stays"):
        calm.ctl("stop", name, "--timeout", "60s")
    check_steps(read_steps(calm.work, "waits"), lockstep.losses())


@pytest.mark.parametrize(
    "with_shim", [pytest.param(False, id="agent", marks=pytest.mark.endurance), pytest.param(True, id="agent-and-shim")]
)
def test_frozen_past_the_lease(calm: Cluster, with_shim: bool) -> None:
    name = "frozen-shim" if with_shim else "frozen"
    calm.submit(lockstep_job(calm.work, name, nodes="'1:3'", delay=0.1, workers=1))
    before = calm.until_running(name, 3)
    calm.until_steps(name, 10)
    calm.until_workers(name, 3)
    pod = before["pods"][0 if with_shim else 1]  # once rank 0's
    node = pod["node"]
    old, life = calm.workers(name, node), calm.node(node)["incarnation"]["life"]
    pids = [calm.lease_pid(node), calm.node(node)["agent_pid"], *([pod["shim_pid"]] if with_shim else [])]
    freeze(calm, node, pids)
    try:
        if not with_shim:
            calm.until(lambda: not any(is_alive(p) for p in old.values()), 20, "the fence stopped its workers")
        job = calm.until_running(name, 2, above=before["generation"])
        assert node not in [p["node"] for p in job["pods"] if p["generation"] == job["generation"]]
        assert job["budget"]["used"] == 0, "whatever is seen first, a lost node costs nothing"
        calm.until_steps(name, 10)
        formed = calm.job(name)["generation"]
    finally:
        thaw(calm, node, pids)
    calm.until(lambda: not any(is_alive(p) for p in old.values()), 20, "none of its old workers is left")
    calm.until(lambda: calm.node(node)["incarnation"]["life"] != life, 30, "it comes back with a new life")
    job = calm.until_running(name, 3, above=formed)
    assert (job["cause"]["kind"], job["budget"]["used"]) == ("join", 0)
    calm.until_steps(name, 10)
    calm.ctl("stop", name, "--timeout", "60s")
    check_steps(read_steps(calm.work, name), lockstep.losses())
