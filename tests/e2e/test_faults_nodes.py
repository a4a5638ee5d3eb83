"""Faults of whole nodes: power cuts of one, of rank 0's, of two at once. They cost none of the job's budget."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import pytest

from tests.e2e.support import Cluster, check_complete, check_steps, digits_job, is_alive, read_steps

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(240)]

NODES = 4


@pytest.mark.parametrize("position", [0, 1], ids=["rank-0", "rank-2"])
def test_a_node_killed_is_replaced_by_the_spare(calm: Cluster, reference: dict[int, float], position: int) -> None:
    name = f"cut{position}"
    calm.submit(digits_job(calm.work, name, nodes="2", steps=60))
    before = calm.until_running(name, 2)
    calm.until(lambda: any(p["phase"] == "ready" for p in calm.job(name)["spares"]), 60, "a spare is ready")
    calm.until_steps(name, 6)
    lost, stays = before["pods"][position]["node"], before["pods"][1 - position]["node"]
    if position:  # its shim is then no child of its agent any more: the power is cut all the same
        agent = calm.node(lost)["agent_pid"]
        os.kill(agent, signal.SIGKILL)
        calm.until(lambda: calm.node(lost)["agent_pid"] != agent, 30, "its agent is started again")
    victims = [before["pods"][position]["shim_pid"], *calm.workers(name, lost).values()]
    calm.ctl("local", "kill", lost)
    assert not any(is_alive(p) for p in victims)
    job = calm.until_running(name, 2, above=1)
    assert (job["restarts"], job["budget"]["used"]) == (1, 0)
    assert (job["cause"]["kind"], job["cause"]["node"]) == ("node_lost", lost)
    nodes = [p["node"] for p in job["pods"]]
    assert nodes[1 - position] == stays, "the survivor keeps its rank"
    assert lost not in nodes
    job = calm.until_phase(name, "succeeded", 90)
    # One between may have been proposed and not formed: survivors die of the lost peer before its lease is over.
    ran = [g for g in job["generations"] if g["state"] != "not formed"]
    assert (len(ran), job["restarts"], job["budget"]["used"]) == (2, 1, 0)
    assert calm.restarts_counted(name) == 1
    rows = read_steps(calm.work, name)
    check_steps(rows, reference)
    check_complete(rows, 60)


def at_once(calm: Cluster, verb: str, nodes: Iterable[str]) -> None:
    """``local kill`` or ``local start`` of several nodes at the same time."""
    for call in [calm.start("local", verb, node) for node in nodes]:
        out, errors = call.communicate(timeout=90)
        assert call.returncode == 0, f"{out}\n{errors}"


def test_two_nodes_killed_at_once_and_back_again(calm: Cluster, reference: dict[int, float]) -> None:
    calm.submit(digits_job(calm.work, "two", nodes="'2:4'", steps=600, delay=0.1, workers=1))
    before = calm.until_running("two", 4)
    calm.until_steps("two", 6)
    lost = [before["pods"][i]["node"] for i in (0, 2)]  # rank 0's, and another's
    stay = [before["pods"][i]["node"] for i in (1, 3)]
    at_once(calm, "kill", lost)
    calm.until_running("two", 2, above=1)
    step = calm.until_steps("two", 10)
    job = calm.job("two")
    assert [p["node"] for p in job["pods"] if p["workers"]] == stay
    assert (job["phase"], job["budget"]["used"], job["cause"]["kind"]) == ("running", 0, "node_lost")
    formed = job["generation"]
    assert calm.restarts_counted("two") == job["restarts"]

    at_once(calm, "start", lost)
    job = calm.until_running("two", 4, above=formed)
    assert (job["cause"]["kind"], job["budget"]["used"]) == ("join", 0)
    assert calm.until_steps("two", 10) > step
    calm.ctl("stop", "two", "--timeout", "60s")
    check_steps(read_steps(calm.work, "two"), reference)
