"""Several roles as one gang, on machines of their own: one is cut off from all others and lives on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.bare import Bare, bare
from tests.e2e.netns import Net, both, why_not
from tests.e2e.roles import PLACES, newest, pids, result, roles_job
from tests.e2e.support import is_alive
from tests.integration.redis_support import Server

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(240), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]  # fmt: skip

NODES = ("n1", "n2", "n3")


@pytest.fixture
def net() -> Iterator[Net]:
    with Net() as one:
        for name in ("store", *NODES):
            one.machine(name)
        yield one


@pytest.fixture
def machines(net: Net, tmp_path: Path) -> Iterator[Bare]:
    server = Server(tmp_path / "redis", ["appendonly yes"], port=6379, address=net.address("store"))
    with net.inside("store"):
        server.start()
        asyncio.run(server.ready())
    with bare({"url": server.url}) as one:
        for node in NODES:
            with net.inside(node):
                one.start_agent(node, net.address(node), interface="eth0")
        one.until_ready()
        yield one
    server.stop()


@pytest.mark.parametrize("place", ["pserver.1", "trainer.1"])
def test_a_node_of_a_role_is_cut_off_and_lives_on(machines: Bare, net: Net, place: str) -> None:
    """Its workers end by themselves; the whole gang goes on elsewhere, and the weights are those of an undisturbed
    run."""
    machines.submit(roles_job(machines.work, "quiet", pause=0.0))
    machines.until_phase("quiet", "succeeded", 60)
    machines.submit(roles_job(machines.work, "cut"))
    machines.until_running("cut", len(NODES))
    machines.until(lambda: newest(machines.work, "cut") > 5, 30, "it trains")
    pods = machines.job("cut")["pods"]
    lost = next(pod["node"] for pod in pods if any(w["place"] == place for w in pod["workers"]))
    theirs = machines.workers("cut", lost).values()
    others = [node for node in NODES if node != lost]
    machines.frozen.add(lost)  # it knows nothing new
    with net.cut(both([lost], [*others, "store"])):
        job = machines.until_running("cut", len(others), above=1)
        assert not any(map(is_alive, theirs)), "they were gone before the others began"
        assert (job["cause"]["kind"], job["cause"]["node"], job["budget"]["used"]) == ("node_lost", lost, 0)
        machines.until(lambda: sorted(pids(machines, "cut")) == PLACES, 10, "all places are on the other nodes")
        machines.until_phase("cut", "succeeded", 60)
    machines.frozen.discard(lost)
    assert result(machines.work, "cut") == result(machines.work, "quiet")
    machines.until(lambda: set(machines.nodes().values()) == {"ready"}, 30, f"{lost} is back")
    machines.until(lambda: not pids(machines, "cut"), 15, "the servers were stopped")
