"""The way to the store is slow, or cut for some nodes only: never two generations, and none for nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.bare import stepper_job
from tests.e2e.datagrams import cut_off, why_not
from tests.e2e.support import Cluster, check_steps, check_undisturbed, digits_job, is_alive, read_steps
from tests.e2e.wire import Wire

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.redis, pytest.mark.timeout(480)]

NODES = 4
CUT = 7.0
"""Seconds: two leases and more."""
LEASE = 3.0
KILLED = 2.4
"""Fence and kill, in seconds: by then no worker lives on a node that nobody grants time to."""
BUSY = 0.4
"""Seconds that a busy machine may take to look."""
WHY_NOT = why_not()


@pytest.fixture(scope="module")
def wire(shared: Cluster) -> Iterator[Wire]:
    place = shared.json("local", "status")["redis"]["url"].removeprefix("unix://")
    with Wire(Path(place)) as one:
        yield one


@contextmanager
def cut(calm: Cluster, wire: Wire, *nodes: str) -> Iterator[None]:
    """Cut these nodes off the store, and ask the others only."""
    calm.frozen.update(nodes)
    try:
        with wire.cut(nodes):
            yield
    finally:
        calm.frozen.difference_update(nodes)


def back(calm: Cluster, name: str, node: str, life: str, old: dict[int, int], reference: dict[int, float]) -> None:
    """The node that was cut off has a new life, and nothing of the old one is left or made another step."""
    calm.until(lambda: calm.node(node)["incarnation"]["life"] != life, 30, f"{node} comes back with a new life")
    assert not any(is_alive(pid) for pid in old.values())
    calm.until_steps(name, 5)
    assert calm.job(name)["budget"]["used"] == 0
    calm.ctl("stop", name)
    check_steps(read_steps(calm.work, name), reference)


def test_replies_that_come_late_disturb_nothing(calm: Cluster, wire: Wire, reference: dict[int, float]) -> None:
    calm.submit(digits_job(calm.work, "late", nodes="{min: 1, max: 3, target: 2}", steps=600, delay=0.1, workers=1))
    first = calm.until_running("late", 2)["generation"]  # 2 where a node was ready later than the other
    calm.until_steps("late", 5)
    before, lent = calm.until_workers("late", 2), calm.logged("runs on without the store")
    with wire.late(0.2):
        time.sleep(CUT)
        assert all(is_alive(pid) for pid in before.values())
    assert calm.logged("runs on without the store") == lent, "late is not away"
    calm.until_steps("late", 5)
    assert calm.workers("late") == before
    check_undisturbed([row for row in read_steps(calm.work, "late") if row["generation"] == first])
    calm.ctl("scale", "late", "3", "--timeout", "30s")
    calm.until_running("late", 3, above=first)
    calm.ctl("stop", "late")
    check_steps(read_steps(calm.work, "late"), reference)


def test_a_connection_breaks_while_replies_come_late(calm: Cluster, wire: Wire) -> None:
    """A new one and the first request on it take two round trips, which together are longer than one call's bound."""
    calm.submit(stepper_job(calm.work, "broke", "2"))
    node = calm.until_running("broke", 2)["pods"][1]["node"]
    calm.until_steps("broke", 5)
    before = calm.until_workers("broke", 2)
    with wire.late(0.3):
        wire.hang_up(node)
        time.sleep(LEASE + BUSY)
        assert all(is_alive(pid) for pid in before.values())
    calm.until_steps("broke", 5)
    assert calm.workers("broke") == before
    calm.ctl("stop", "broke")
    check_undisturbed(read_steps(calm.work, "broke"))


def test_all_members_cut_off_and_a_spare_is_not(calm: Cluster, wire: Wire, reference: dict[int, float]) -> None:
    calm.submit(digits_job(calm.work, "all", nodes="3", steps=600, delay=0.1, workers=1))
    job = calm.until_running("all", 3)
    calm.until(lambda: any(p["phase"] == "ready" for p in calm.job("all")["spares"]), 60, "a spare is ready")
    calm.until_steps("all", 5)
    before, members = calm.until_workers("all", 3), [p["node"] for p in job["pods"]]
    with cut(calm, wire, *members):
        calm.until(lambda: all(calm.nodes()[n] == "silent" for n in members), 20, "their leases are over")
        time.sleep(CUT - LEASE)
        assert all(is_alive(pid) for pid in before.values())
        seen = calm.job("all")
        assert (seen["generation"], seen["generations"][-1]["state"]) == (job["generation"], "active"), (
            "and none is tried"
        )
        # Others are asked first, and for as long as an answer may come there is no reason yet.
        silent = "nothing has been received from"
        calm.until(lambda: any(silent in why for why in calm.job("all")["why"]), 5, "it says why")
    calm.until(lambda: set(calm.nodes().values()) == {"ready"}, 20, "their leases are renewed")
    calm.until_steps("all", 20)
    calm.until(lambda: calm.workers("all") == before, 20, "every pod is published")
    now = calm.job("all")
    assert (now["generation"], now["restarts"]) == (job["generation"], 0)
    calm.ctl("stop", "all")
    rows = read_steps(calm.work, "all")
    check_undisturbed(rows)
    check_steps(rows, reference)


def test_one_member_cut_off_is_replaced(calm: Cluster, wire: Wire, reference: dict[int, float]) -> None:
    calm.submit(digits_job(calm.work, "one", nodes="3", steps=600, delay=0.1, workers=1))
    first = calm.until_running("one", 3)
    node = first["pods"][1]["node"]
    calm.until(lambda: any(p["phase"] == "ready" for p in calm.job("one")["spares"]), 60, "a spare is ready")
    calm.until_steps("one", 5)
    old, life = calm.workers("one", node), calm.node(node)["incarnation"]["life"]
    with cut(calm, wire, node):
        job = calm.until_running("one", 3, above=first["generation"])
        assert (job["cause"]["kind"], job["cause"]["node"]) == ("node_lost", node)
        assert node not in [p["node"] for p in job["pods"] if p["generation"] == job["generation"]]
        calm.until_steps("one", 5)
    back(calm, "one", node, life, old, reference)


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_one_node_cut_off_from_the_store_and_its_peers(calm: Cluster, wire: Wire, reference: dict[int, float]) -> None:
    calm.submit(digits_job(calm.work, "deaf", nodes="'1:4'", steps=600, delay=0.1, workers=1))
    first = calm.until_running("deaf", 4)
    node = first["pods"][0]["node"]
    calm.until_steps("deaf", 5)
    old, record = calm.workers("deaf", node), calm.node(node)
    others = [calm.lease_pid(n) for n in calm.nodes() if n != node]
    with cut(calm, wire, node), cut_off(calm.lease_pid(node), others):
        start = time.monotonic()
        calm.until(lambda: not any(is_alive(p) for p in old.values()), 20, "the fence stopped its workers")
        last = max(row["mono"] for row in read_steps(calm.work, "deaf") if row["pid"] in old.values())
        assert last - start < KILLED, "the last good renewal was sent before the cut"
        calm.until_running("deaf", 3, above=first["generation"])
        calm.until_steps("deaf", 5)
    back(calm, "deaf", node, record["incarnation"]["life"], old, reference)
    log = next(calm.home.glob(f"local/data/*/{node}/agent.log")).read_text()
    assert ' does not answer", "event": "no failsafe member gives failsafe time"' in log, "it asked in vain"
