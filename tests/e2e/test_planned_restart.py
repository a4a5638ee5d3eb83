"""Planned restarts of an agent: training goes on while it is away; and if it stays away, the job goes on without its
node."""

from __future__ import annotations

import time
import urllib.request
from typing import Any

import pytest

from nodeagent.model.timing import Timing
from nodeagent.spec.agentconfig import AgentConfig
from tests.e2e import lockstep
from tests.e2e.support import Cluster, check_complete, check_steps, check_undisturbed, is_alive, read_steps
from tests.e2e.test_store_away import frozen, redis_pid, trains, undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(480)]

NODES = 3


def restart(calm: Cluster, node: str, away: float) -> dict[str, Any]:
    """Returns once the others see that the agent is away; what they knew of it before."""
    before = calm.node(node)
    calm.ctl("local", "restart", node, "--away", f"{away}s")
    calm.until(lambda: calm.nodes()[node] == "restarting", 10, f"{node} is restarting")
    calm.until(lambda: not is_alive(before["agent_pid"]), 10, "its agent has ended")
    return before


def until_back(calm: Cluster, node: str, before: dict[str, Any], limit: float = 60) -> None:
    """Its next agent is there, in the same life."""
    life, start = before["incarnation"]["life"], before["incarnation"]["start"] + 1

    def back() -> bool:
        now = calm.node(node)
        return bool(now["state"] == "ready" and now["incarnation"] == {"life": life, "start": start})

    calm.until(back, limit, f"{node} is back")


def restarting_count(calm: Cluster) -> float:
    """What the metrics of a node that is ready say."""
    ready = next(n for n in calm.ask("/v1/nodes")["items"] if n["state"] == "ready")
    with urllib.request.urlopen(ready["http"] + "/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return float(next(x for x in lines if x.startswith('nodeagent_nodes{state="restarting"}')).rpartition(" ")[2])


AWAY = 20
"""Seconds: less than ``without_agent``."""


def test_seconds_without_an_agent_disturb_nothing(calm: Cluster) -> None:
    job, workers = trains(calm, "planned")
    shims = {p["node"]: p["shim_pid"] for p in job["pods"]}
    node = job["pods"][0]["node"]  # rank 0's
    before = restart(calm, node, AWAY)
    assert calm.node(node)["restarting_for"] < AWAY
    assert "Restarting:" in calm.ctl("describe", f"node/{node}").stdout
    assert restarting_count(calm) == 1
    calm.until_steps("planned", 20)
    assert calm.nodes()[node] == "restarting"
    until_back(calm, node, before)

    def same() -> bool:
        return {p["node"]: p["shim_pid"] for p in calm.job("planned")["pods"]} == shims

    calm.until(same, 20, "every pod is published again")
    undisturbed(calm, job, workers)


def test_an_agent_that_is_asked_to_end_waits_for_a_store_that_is_away(calm: Cluster) -> None:
    """Nobody else can ask the failsafe members for time."""
    job, workers = trains(calm, "planned-frozen")
    node = job["pods"][1]["node"]
    before = calm.node(node)
    with frozen(redis_pid(calm)):
        calm.ctl("local", "restart", node)
        time.sleep(2 * Timing().fence)  # it runs on failsafe time
        assert is_alive(before["agent_pid"])
    until_back(calm, node, before)
    undisturbed(calm, job, workers)


def test_an_agent_that_does_not_come_back(calm: Cluster) -> None:
    job, workers = trains(calm, "planned-gone", nodes="'1:2'")
    node = job["pods"][0]["node"]
    theirs = calm.workers("planned-gone", node)  # a node that has left lists none
    assert theirs
    started = time.monotonic()
    restart(calm, node, 120)
    lease = calm.lease_pid(node)
    calm.until(lambda: calm.nodes()[node] == "left", 60, "its lease process has left")
    assert time.monotonic() - started > AgentConfig().without_agent - 1
    assert not any(is_alive(pid) for pid in theirs.values())
    calm.until_running("planned-gone", 2, limit=20, above=job["generation"])  # on the node that was spare
    calm.until(lambda: not is_alive(lease), 10, "the lease process has ended")
    assert not set(workers.values()) & set(calm.workers("planned-gone").values())
    assert calm.job("planned-gone")["budget"]["used"] == 0
    calm.ctl("local", "start", node)
    calm.until(lambda: calm.nodes()[node] == "ready", 20, "it takes work again")
    calm.ctl("stop", "planned-gone", "--timeout", "60s")
    rows = read_steps(calm.work, "planned-gone")
    check_undisturbed([row for row in rows if row["generation"] == job["generation"]])
    check_steps(rows, lockstep.losses())


def test_a_drain_tells_that_it_will_not_be_back(calm: Cluster) -> None:
    """Its work moves away at once, and it leaves when its agent was away for long enough."""
    job, _ = trains(calm, "planned-drain")
    node = job["pods"][1]["node"]
    restart(calm, node, 120)
    lease = calm.lease_pid(node)
    calm.ctl("drain", node, "--reason", "will not be back", "--timeout", "30s")
    calm.until(lambda: calm.nodes()[node] == "left", 60, "its lease process has left")
    calm.until(lambda: not is_alive(lease), 10, "the lease process has ended")
    calm.ctl("local", "start", node)
    calm.until_running("planned-drain", 2, above=job["generation"])
    calm.until_steps("planned-drain", 10)
    calm.ctl("stop", "planned-drain", "--timeout", "60s")
    done = calm.job("planned-drain")
    assert (done["restarts"], done["budget"]["used"]) == (1, 0)
    rows = read_steps(calm.work, "planned-drain")
    check_steps(rows, lockstep.losses())
    check_complete(rows, max(row["step"] for row in rows))


def test_an_agent_without_work_gives_its_lease_back_at_once(calm: Cluster) -> None:
    agent = calm.node("n3")
    calm.ctl("local", "restart", "n3", "--away", "10s")
    calm.until(lambda: calm.nodes()["n3"] == "left", 8, "it has left, well before it is back")
    calm.until(lambda: not is_alive(agent["agent_pid"]), 10, "its process has ended, which it does after it has left")
    until_back(calm, "n3", agent)
