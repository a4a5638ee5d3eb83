"""Somebody writes to the store: what nobody signed, or what has ended, is run by nobody, however it got there; and what
was signed runs on, however old it gets."""

from __future__ import annotations

import asyncio

import pytest

from nodeagent.model.job import Control, JobRecord
from nodeagent.store import codec
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.seal import LIFETIME, Seal
from tests.sim.cluster import SimCluster
from tests.sim.parts import sim_spec
from tests.sim.test_directed import running, simulate
from tests.sim.virtual import SimClock

HOUR = 3600.0
SETTLED = 20.0
"""Seconds after which a job that could run would have started long ago."""


def write(c: SimCluster, job: JobRecord) -> None:
    """As with a client of the store, past every agent."""
    c.checker.store_loses()  # whatever it says from now on is no step from what it said
    body = """
      job_save(A.job)
      redis.call('HSET', NAMES, A.job.name, A.job.uid)
      event({ kind = 'JobSubmitted', job = A.job, text = 'written straight into the store' })
    """
    c.server.run(body, job=codec.encode_job(job))


def forged(name: str, seal: Seal | None = None) -> JobRecord:
    """A queued job as a submit leaves it, but for its signatures: none, or another key's."""
    uid, spec, control = f"uid-{name}", sim_spec(name, 1, 3, 1), Control(rev=1, target=1)
    return JobRecord(
        uid=uid, name=name, owner=0, spec=spec, phase="queued", reason="submitted", submitted=0.0, order=99,
        control=seal.control(uid, control) if seal else control,
        admission=seal.admit(uid, 0, spec, SimClock().wall(), "n1") if seal else None,
    )  # fmt: skip


def refused(c: SimCluster, uid: str) -> set[str]:
    """Why the agents refuse it; an empty text for each that does not."""
    found = [n.agent.cluster().refused.get(uid) for n in c.nodes.values() if n.agent is not None]
    return {one.kind if one else "" for one in found}


async def not_run(c: SimCluster, uid: str, kind: str) -> None:
    """For a while no node prepares or starts it, and every agent says why."""
    await asyncio.sleep(SETTLED)
    assert not any(uid in n.machine.pods for n in c.nodes.values())
    assert refused(c, uid) == {kind}


@pytest.mark.parametrize(("seal", "kind"), [(None, "unsigned"), (Seal(ClusterKey(b"x" * 32), "default"), "changed")])
def test_a_job_that_nobody_signed_is_not_run_and_disturbs_nobody(seal: Seal | None, kind: str) -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        write(c, forged("f", seal))
        await not_run(c, "uid-f", kind)
        assert c.whole("j") and c.job("j").restarts == 0
        assert c.job("f").phase == "queued"
        await c.submit("k", 1, 1, 1)
        await running(c, 1, "k")

    simulate(4, scenario)


def test_a_job_that_ended_and_was_deleted_is_not_run_again() -> None:
    async def scenario(c: SimCluster) -> None:
        stolen = await c.submit("j", 1, 3, 2)
        await running(c, 2)
        await c.operate("j", desired="stop", delete=True)
        await c.until(lambda: c.find("j") is None, 30, "deleted")
        await asyncio.sleep(5)
        assert all(n.ledger.kept.jobs["uid-j"].ended for n in c.nodes.values()), "written down"
        write(c, stolen)
        await not_run(c, "uid-j", "ended")
        await c.nodes["n1"].kill_agent()
        c.nodes["n1"].start_agent()
        await not_run(c, "uid-j", "ended")
        late = c.add("n4")
        late.clock.wall_step = LIFETIME
        late.start_agent()
        await asyncio.sleep(SETTLED)
        assert "uid-j" not in late.machine.pods, "nor by a node that never saw it, once its admission is over"
        c.checker.forgotten.add("uid-j")

    simulate(3, scenario)


def test_a_changed_job_runs_on_as_it_was_and_is_started_nowhere_else() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 3, 2)
        await running(c, 2)
        job = c.job("j")
        assert job.generation is not None
        await asyncio.sleep(5)
        prepared = {n.name for n in c.nodes.values() if "uid-j" in n.machine.pods}
        write(c, job.model_copy(update={"spec": job.spec.model_copy(update={"env": {"LD_PRELOAD": "/evil.so"}})}))
        for node in set(c.nodes) - prepared:
            await c.nodes[node].power_cut()
            c.nodes[node].power_on()
        await asyncio.sleep(SETTLED)
        assert refused(c, "uid-j") == {"changed"}
        assert {n.name for n in c.nodes.values() if "uid-j" in n.machine.pods} <= prepared
        assert c.whole("j"), "what runs is left alone"
        await c.operate("j", desired="stop")
        await c.until(lambda: c.job("j").phase == "stopped", 30, "an operator stops it")

    simulate(4, scenario)


@pytest.mark.parametrize("change", [{"target": 3}, {"desired": "pause"}, {"desired": "stop"}, {"restart": 1}])
def test_a_request_that_nobody_signed_is_not_carried_out(change: dict[str, object]) -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 3, 2)
        await running(c, 2)
        job = c.job("j")
        commit_request = job.control.model_copy(update={"rev": 2, **change})
        write(c, job.model_copy(update={"control": commit_request}))
        await asyncio.sleep(SETTLED)
        assert refused(c, "uid-j") == {"control"}
        after = c.job("j")
        assert (after.phase, after.generation, after.restarts) == ("running", job.generation, 0)
        await c.operate("j", desired="run", target=2, restart=0)
        await asyncio.sleep(2)
        assert refused(c, "uid-j") == {""}, "said anew through an agent"
        assert c.whole("j") and c.job("j").generation == job.generation

    simulate(3, scenario)


def test_agents_sign_the_end_of_a_scale() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 3, 1)
        await running(c, 1)
        await c.scale("j", "scaleout", count=2, timeout=10)
        await c.until(lambda: c.job("j").control.target == 1, 30, "rolled back: there are only two nodes")
        assert refused(c, "uid-j") == {""}
        await c.scale("j", "scaleout", count=1, timeout=10)
        await running(c, 2)

    simulate(2, scenario)


def test_admissions_are_renewed_and_nodes_that_come_late_believe_them() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 1, 4, 2, admitted=LIFETIME / 2 + HOUR)
        await running(c, 2)
        first = c.job("j").admission
        assert first is not None

        def renewed() -> bool:
            now = c.job("j").admission
            return now is not None and now.expires > SimClock().wall() + LIFETIME - HOUR

        await c.until(renewed, 150, "renewed")
        again = c.job("j").admission
        await asyncio.sleep(130)
        assert c.job("j").admission == again, "once"
        for node in c.nodes.values():
            node.clock.wall_step = LIFETIME / 2 - HOUR  # the first one is over by now
        c.add("n4").start_agent()
        c.nodes["n4"].clock.wall_step = LIFETIME / 2 - HOUR
        await c.operate("j", target=4)
        await running(c, 4)

    simulate(3, scenario)


def test_a_cluster_that_was_off_for_a_weekend_goes_on() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 2)
        await running(c, 2)
        await asyncio.sleep(5)
        for node in c.nodes.values():
            await node.power_cut()
            node.clock.wall_step = 3 * 24 * HOUR
        for node in c.nodes.values():
            node.power_on()
        await running(c, 2, limit=60)
        new = c.add("n4")
        new.clock.wall_step = 3 * 24 * HOUR
        new.start_agent()
        await asyncio.sleep(150)
        assert refused(c, "uid-j") == {""}, "renewed, so that the new one believes it too"

    simulate(3, scenario)


@pytest.mark.parametrize("step", [-HOUR, HOUR])
def test_a_stepped_wall_clock_stops_nothing(step: float) -> None:
    async def scenario(c: SimCluster) -> None:
        c.nodes["n1"].clock.wall_step = step
        await c.submit("j", 3, 3, 3, admitted=LIFETIME / 2)
        await running(c, 3)
        c.nodes["n2"].clock.wall_step = -step
        await c.submit("k", 3, 3, 3)
        await running(c, 3, "k")
        await c.nodes["n1"].power_cut()
        c.nodes["n1"].power_on()
        await running(c, 3)
        await running(c, 3, "k")
        assert refused(c, "uid-j") == refused(c, "uid-k") == {""}

    simulate(3, scenario)


def test_a_store_that_was_emptied_gets_the_signatures_back() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 3, 3)
        await running(c, 3)
        await c.empty_store()
        await asyncio.sleep(10)
        assert c.whole("j") and c.job("j").restarts == 0
        assert refused(c, "uid-j") == {""}
        c.nodes["n2"].machine.worker_ends("uid-j", 0, signal=9)
        await c.until(lambda: c.job("j").restarts == 1, 30, "re-formed")
        await running(c, 3)

    simulate(3, scenario)
