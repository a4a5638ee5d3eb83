"""Directed schedules with a store in which somebody removes what is there: training goes on, and recovers."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.model.base import RECORD_VERSION
from nodeagent.store import codec
from nodeagent.store.keys import prefix
from tests.inprocess.server import CLUSTER
from tests.sim.cluster import TIMING, SimCluster
from tests.sim.parts import WatchedServer
from tests.sim.provocations import store_loses_writes
from tests.sim.test_directed import running, simulate
from tests.sim.test_failsafe import alive, members, pids, started

DAMAGES = {
    "job": ("job:uid-j",),
    "node": ("node:n2",),
    "names": ("names",),
    "alloc": ("alloc:n1", "alloc:n2", "alloc:n3"),
    "highest": ("highest",),
    "lease": ("lease",),
    "changes": ("changes",),
    "all": ("job:uid-j", "names", "alloc:n1", "alloc:n2", "alloc:n3", "highest", "lease"),
}
"""What is removed, by what it is called: keys."""


@pytest.mark.parametrize("what", DAMAGES)
def test_what_is_removed_while_a_job_runs_is_given_back_and_a_worker_that_dies_is_replaced(what: str) -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before, number = pids(c), _number(c)
        c.checker.store_loses()
        c.server.take(*DAMAGES[what])
        await asyncio.sleep(10)
        assert pids(c) == before, "nothing that runs is hurt"
        assert (_number(c), c.job("j").phase) == (number, "running")
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: _number(c) > number and c.whole("j"), 60, "the worker is replaced")
        assert len(c.server.state.jobs) == 1

    simulate(4, scenario)


@pytest.mark.parametrize("text", ["", "{"], ids=["nothing", "no JSON"])
@pytest.mark.parametrize(
    ("key", "field"),
    [
        *((key, "") for key in ("job:uid-j", "node:n2", "names", "alloc:n1", "highest", "lease", "changes")),
        *(("job:uid-j", field) for field in ("control", "spec", "since", "last_number", "head_number", "head_cause")),
        ("node:n2", "seq"), ("node:n2", "facts"),
    ],
)  # fmt: skip
def test_what_is_written_over_while_a_job_runs_is_given_back_too(key: str, field: str, text: str) -> None:
    """A field that nobody can read, or (no field) a key that has become a text. A field with nothing in it passed for
    JSON where the store looks for damage, and the job was stuck for ever."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before, number = pids(c), _number(c)
        c.checker.store_loses()
        c.damaged = True
        watched = c.server
        assert isinstance(watched, WatchedServer)
        watched.spoiled = True
        c.server.spoil(key, field, text)
        await asyncio.sleep(10)
        assert pids(c) == before, "nothing that runs is hurt"
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.find("j") is not None and _number(c) > number and c.whole("j"), 60, "it is replaced")
        assert len(c.server.state.jobs) == 1

    simulate(4, scenario)


@pytest.mark.parametrize("what", ["job", "lease", "all"])
def test_it_is_given_back_also_where_a_node_dies_with_it(what: str) -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        c.checker.store_loses()
        c.server.take(*DAMAGES[what])
        victim = members(c)[-1] if what == "lease" else "n2"
        await c.nodes[victim].power_cut()
        await c.until(lambda: c.whole("j") and victim not in members(c), 120, "re-formed without it")

    simulate(4, scenario)


def test_a_job_that_is_deleted_by_its_owner_is_deleted() -> None:
    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        await c.operate("j", desired="stop", delete=True)
        await c.until(lambda: not c.server.state.jobs and not alive(c), 60, "gone")
        await asyncio.sleep(20)
        assert not c.server.state.jobs
        assert "StoreDamaged" not in {event.kind for event in c.server.state.events}

    simulate(4, scenario)


@pytest.mark.parametrize("version", [9, 0])
def test_another_version_under_running_agents_ends_none_of_them(version: int) -> None:
    """Found by strangers: every agent ended for good."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        before = pids(c)
        c.server.run("redis.call('HSET', META, 'version', A.version)", version=version)
        await asyncio.sleep(60)
        assert pids(c) == before
        assert all(n.agent and n.agent.health().store_unusable for n in c.nodes.values())
        c.server.data.hset(f"{prefix(CLUSTER)}meta", "version", RECORD_VERSION)
        await asyncio.sleep(5)
        assert pids(c) == before
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await running(c, 3)

    simulate(4, scenario)


def test_of_more_silent_nodes_than_a_page_none_counts_as_live() -> None:
    """Found by strangers: those beyond the first 256 did, for a day."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 2)
        template = c.server.state.nodes["n1"]
        for number in range(300):
            name = f"old{number:03}"
            fields = codec.encode_node(template.model_copy(update={"id": name, "rev": 0})) | {"seq": "0", "dead": ""}
            c.server.run("node_save(A.node) redis.call('ZADD', LEASE, int(served), A.node.id)", node=fields)
        await asyncio.sleep(2)
        victim = members(c)[-1]
        await c.nodes[victim].power_cut()
        await c.until(lambda: c.whole("j") and victim not in members(c), TIMING.lease + 20, "re-formed without it")
        cluster = next(n.agent for n in c.nodes.values() if n.agent).cluster()
        assert not any(cluster.live(f"old{number:03}") for number in range(300))

    simulate(4, scenario)


def _number(c: SimCluster) -> int:
    head = c.job("j").head
    return head.number if head is not None else 0


def test_a_primary_that_comes_back_as_the_same_process_may_have_lost_writes() -> None:
    """Found by strangers: a fail-over there and back kept the run id, and no recovery opened."""

    async def scenario(c: SimCluster) -> None:
        await started(c, 2, 3)
        number = _number(c)
        rolling = asyncio.ensure_future(c.roll_back_store(6, same_process=True))
        await asyncio.sleep(0.5)
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: _number(c) > number and c.whole("j"), 5, "re-formed in what is lost")
        newer, before = _number(c), pids(c)
        await rolling
        assert _number(c) == number
        await asyncio.sleep(15)
        assert (_number(c), pids(c)) == (newer, before), "the agents gave it back, and nothing was hurt"
        assert "StoreRestored" in {event.kind for event in c.server.state.events}

    simulate(4, scenario)


def test_such_a_primary_that_meets_those_first_who_know_less_decides_nothing() -> None:
    simulate(5, lambda c: store_loses_writes(c, same_process=True))
