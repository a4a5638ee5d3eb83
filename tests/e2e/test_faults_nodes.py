"""Faults of whole nodes: power cuts of one, of rank 0's, of two at once; one that freezes and thaws. They cost none
of the job's budget."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

import pytest

from nodeagent.local import power
from tests.e2e.support import Cluster, check_complete, check_steps, digits_job, is_alive, read_steps
from tests.processes import command_line

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480)]

NODES = 4
FROZEN = 10.0
"""Seconds: three leases."""
ACTS = 10.0
"""Seconds a test waits for what shims and watchdogs do alone: nobody else runs, so it proves the same at any time."""


@pytest.mark.parametrize("position", [0, 1], ids=["rank-0", "rank-2"])
def test_a_node_killed_is_replaced_by_the_spare(calm: Cluster, reference: dict[int, float], position: int) -> None:
    name = f"cut{position}"
    calm.submit(digits_job(calm.work, name, nodes="2", steps=600, delay=0.1))
    before = calm.until_running(name, 2)
    calm.until(lambda: any(p["phase"] == "ready" for p in calm.job(name)["spares"]), 60, "a spare is ready")
    calm.until_steps(name, 6)
    lost, stays = before["pods"][position]["node"], before["pods"][1 - position]["node"]
    if position:  # its shim is then no child of its agent any more: the power is cut all the same
        agent = calm.node(lost)["agent_pid"]
        os.kill(agent, signal.SIGKILL)
        calm.until(lambda: calm.node(lost)["agent_pid"] != agent, 30, "its agent is started again")
    calm.until_workers(name, 4)
    victims = [before["pods"][position]["shim_pid"], *calm.workers(name, lost).values()]
    calm.ctl("local", "kill", lost)
    assert not any(is_alive(p) for p in victims)
    job = calm.until_running(name, 2, above=before["generation"])
    assert (job["restarts"], job["budget"]["used"]) == (1, 0)
    assert (job["cause"]["kind"], job["cause"]["node"]) == ("node_lost", lost)
    nodes = [p["node"] for p in job["pods"]]
    assert nodes[1 - position] == stays, "the survivor keeps its rank"
    assert lost not in nodes
    calm.until_steps(name, 6)
    calm.ctl("stop", name, "--timeout", "60s")
    job = calm.job(name)
    # One between may have been proposed and not formed: survivors die of the lost peer before its lease is over.
    ran = [g for g in job["generations"] if g["state"] != "not formed"]
    assert (len(ran), job["restarts"], job["budget"]["used"]) == (2, 1, 0)
    assert calm.restarts_counted(name) == 1
    rows = read_steps(calm.work, name)
    check_steps(rows, reference)
    check_complete(rows, max(row["step"] for row in rows))


def at_once(calm: Cluster, verb: str, nodes: Iterable[str]) -> None:
    """``local kill`` or ``local start`` of several nodes at the same time."""
    for call in [calm.start("local", verb, node) for node in nodes]:
        out, errors = call.communicate(timeout=90)
        assert call.returncode == 0, f"{out}\n{errors}"


def test_two_nodes_killed_at_once_and_back_again(calm: Cluster, reference: dict[int, float]) -> None:
    calm.submit(digits_job(calm.work, "two", nodes="'2:4'", steps=600, delay=0.1, workers=1))
    before = calm.until_running("two", 4)  # it may have begun with fewer, and have grown: a restart, too
    calm.until_steps("two", 6)
    lost = [before["pods"][i]["node"] for i in (0, 2)]  # rank 0's, and another's
    stay = [before["pods"][i]["node"] for i in (1, 3)]
    counted = calm.restarts_counted("two", stay)
    at_once(calm, "kill", lost)
    calm.until_running("two", 2, above=before["generation"])
    step = calm.until_steps("two", 10)
    job = calm.job("two")
    assert [p["node"] for p in job["pods"] if p["workers"]] == stay
    assert (job["phase"], job["budget"]["used"], job["cause"]["kind"]) == ("running", 0, "node_lost")
    formed = job["generation"]
    assert calm.restarts_counted("two", stay) - counted == job["restarts"] - before["restarts"]

    at_once(calm, "start", lost)
    job = calm.until_running("two", 4, above=formed)
    assert (job["cause"]["kind"], job["budget"]["used"]) == ("join", 0)
    assert calm.until_steps("two", 10) > step
    calm.ctl("stop", "two", "--timeout", "60s")
    check_steps(read_steps(calm.work, "two"), reference)


def stop_all(calm: Cluster, node: str) -> set[int]:
    """SIGSTOP every process of a node, until no new one turns up."""
    uid = json.loads(next(calm.home.glob("local/run/*/cluster.json")).read_text())["uid"]
    calm.frozen.add(node)
    stopped: set[int] = set()
    while new := power.processes(uid, node) - stopped:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    return stopped


def go_on(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def is_guard(pid: int) -> bool:
    """A shim or its watchdog, which is a fork of it."""
    return "nodeagent.shim" in command_line(pid)


def test_a_whole_node_frozen_and_thawed(calm: Cluster, reference: dict[int, float]) -> None:
    # The second job's one worker waits for no peer: thawed, it would make its next step at once.
    calm.submit(digits_job(calm.work, "froze", nodes="3", steps=600, delay=0.2, workers=1))
    froze = calm.until_running("froze", 3)
    (spare,) = {n["name"] for n in calm.ask("/v1/nodes")["items"]} - {p["node"] for p in froze["pods"]}
    calm.ctl("cordon", spare, "--reason", "the two share a node")
    calm.submit(digits_job(calm.work, "alone", nodes="1", steps=600, delay=0.2, workers=1))
    alone = calm.until_running("alone", 1)
    node = alone["pods"][0]["node"]
    calm.ctl("uncordon", spare)
    for name in ("froze", "alone"):
        calm.until(lambda n=name: any(p["phase"] == "ready" for p in calm.job(n)["spares"]), 60, "a spare is ready")  # type: ignore[misc]
        calm.until_steps(name, 5)
    life = calm.node(node)["incarnation"]["life"]
    old = {*calm.workers("froze", node).values(), *calm.workers("alone", node).values()}
    pids, start = stop_all(calm, node), time.monotonic()
    guards = {pid for pid in pids if is_guard(pid)}
    try:
        assert old < pids - guards
        assert len(guards) == 4, "a shim and a watchdog for each job"
        for name, nodes, before in (("froze", 3, froze), ("alone", 1, alone)):
            calm.until_running(name, nodes, above=before["generation"])
            calm.until_steps(name, 5)
        time.sleep(max(0.0, start + FROZEN - time.monotonic()))
        assert all(calm.job(n)["budget"]["used"] == 0 for n in ("froze", "alone"))
        # A machine thaws all at one time, and its timers fire at once. Signals thaw one process after the other, so
        # those with the timers come first, and all others once these had the time to act: nobody else may be needed.
        go_on(guards)
        calm.until(lambda: not any(is_alive(pid) for pid in old), ACTS, "shims or watchdogs killed their workers")
    finally:
        go_on(pids)
        calm.frozen.discard(node)
    calm.until(lambda: calm.node(node)["incarnation"]["life"] != life, 30, "it comes back with a new life")
    # It is the only node that is left for this job; of the other, one of the two that did not freeze is the spare.
    calm.until(lambda: node in [p["node"] for p in calm.job("froze")["spares"]], 30, "it is a spare")
    for name in ("froze", "alone"):
        calm.until_steps(name, 5)
        job = calm.job(name)
        assert (job["cause"]["kind"], job["restarts"], job["budget"]["used"]) == ("node_lost", 1, 0)
        calm.ctl("stop", name)
        rows = read_steps(calm.work, name)
        check_steps(rows, reference)
        assert all(row["mono"] < start for row in rows if row["pid"] in old), "a step of the frozen node's old workers"
