"""Arrays and jobs that come after others, under faults: never more at once than may be, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from nodeagent.model.job import TERMINAL, USES_TIME, JobRecord
from nodeagent.model.jobspec import After, Array, JobSpec
from nodeagent.plan.failure.timeouts import TIME_IS_OVER
from nodeagent.store.messages import NewJob
from tests.groups import seeds
from tests.inprocess.server import HereStore
from tests.sim import faults
from tests.sim.cluster import SEAL, SimCluster
from tests.sim.parts import sim_spec
from tests.sim.test_directed import running, simulate
from tests.sim.virtual import SimClock
from tests.submitting import first_control

AT_ONCE = 3
Fault = Callable[[SimCluster], Awaitable[None]]
FAULTS: list[Fault] = [
    faults.restart_agent, faults.cut_power, faults.empty_store, faults.restart_store, faults.freeze_agent,
    faults.kill_worker,
]  # fmt: skip


def member(i: int, count: int) -> JobSpec:
    array = Array(name="sweep", id="a1", index=i, count=count, first=0, last=count - 1, at_once=AT_ONCE)
    return sim_spec(f"sweep-{i}", 1, 1, 1, array=array)


async def submit(c: SimCluster, *specs: JobSpec) -> None:
    """In one step, through an agent."""
    now, new = SimClock().wall(), []
    for spec in specs:
        uid = f"uid-{spec.name}"
        control = SEAL.control(uid, first_control(spec, "test"))
        new.append(NewJob(uid=uid, spec=spec, control=control, admission=SEAL.admit(uid, 0, spec, now, "n1")))

    async def step() -> None:
        await HereStore(c.server).submit(new, 0, now, "test", "request")

    await c.patiently(step)
    c.checker.submitted.update(one.uid for one in new)


def members(c: SimCluster) -> list[JobRecord]:
    return [job for job in c.server.state.jobs.values() if job.spec.array is not None]


def end_well(c: SimCluster, job: JobRecord) -> None:
    for node in c.nodes.values():
        pod = node.machine.pods.get(job.uid)
        for local in sorted(pod.alive) if pod is not None else ():
            node.machine.worker_ends(job.uid, local, code=0)


@pytest.mark.parametrize("seed", seeds([1], [2, 3]))
def test_never_more_members_than_may_run_and_all_of_them_end_well(seed: int) -> None:
    count = 12

    async def scenario(c: SimCluster) -> None:
        began: dict[str, float] = {}
        most, loop = 0, asyncio.get_running_loop()

        def look() -> None:
            nonlocal most
            has_nodes = [job for job in members(c) if job.phase in USES_TIME]
            most = max(most, len(has_nodes))
            assert len(has_nodes) <= AT_ONCE, [(job.name, job.phase) for job in has_nodes]
            for job in has_nodes:
                ran = loop.time() - began.setdefault(job.uid, loop.time())
                if job.phase == "running" and c.whole(job.name) and ran > 2.0:
                    end_well(c, job)

        async def disturb() -> None:
            while True:
                await asyncio.sleep(c.rng.uniform(2.0, 8.0))
                await c.rng.choice(FAULTS)(c)

        await submit(c, *(member(i, count) for i in range(count)))
        disturber = asyncio.ensure_future(disturb())
        end = loop.time() + 900
        while loop.time() < end:
            look()
            done = {job.uid for job in members(c) if job.phase == "succeeded"}
            if len(done) == count:
                break
            if len(done) >= count - 2 and not disturber.done():
                disturber.cancel()
            await asyncio.sleep(0.02)
        disturber.cancel()
        assert {job.name: job.phase for job in members(c)} == {f"sweep-{i}": "succeeded" for i in range(count)}
        assert most == AT_ONCE, "as many as may did run"

    simulate(4, scenario, seed=seed)


def test_a_chain_goes_on_although_records_are_removed_and_agents_die() -> None:
    async def scenario(c: SimCluster) -> None:
        after = After(uid="uid-prepare", name="prepare")
        await submit(
            c, sim_spec("train", 4, 4, 4, after=(after,)), sim_spec("prepare", 1, 1, 1), sim_spec("other", 1, 1, 1)
        )
        await running(c, 1, "other")
        await running(c, 1, "prepare")
        assert c.job("train").phase == "queued"
        end_well(c, c.job("prepare"))
        await c.until(lambda: c.job("prepare").phase == "succeeded", 10, "prepare has succeeded")
        await c.until(lambda: c.job("train").control.met == ("uid-prepare",), 10, "train has noted it")
        await HereStore(c.server).remove("uid-prepare")
        c.checker.submitted.discard("uid-prepare")
        for node in c.nodes.values():
            await node.kill_agent()
        for node in c.nodes.values():
            node.start_agent()
        await running(c, 4, "train")

    simulate(4, scenario)


def test_who_comes_after_a_failure_never_runs_and_so_on() -> None:
    async def scenario(c: SimCluster) -> None:
        one = After(uid="uid-one", name="one")
        two = After(uid="uid-two", name="two")
        anyhow = After(uid="uid-two", name="two", need="any")
        await submit(
            c,
            sim_spec("one", 1, 1, 1), sim_spec("two", 1, 1, 1, after=(one,)), sim_spec("three", 1, 1, 1, after=(two,)),
            sim_spec("last", 1, 1, 1, after=(anyhow,)),
        )  # fmt: skip
        await running(c, 1, "one")
        await c.operate("one", desired="stop", delete=True)
        await c.until(lambda: c.find("one") is None, 30, "one is stopped and removed")
        c.checker.submitted.discard("uid-one")
        await running(c, 1, "last")
        for name in ("two", "three"):
            job = c.job(name)
            assert (job.phase, job.first_active, job.outcome and job.outcome.code) == ("failed", None, 125)
        assert c.job("two").reason == "never ran: job one has been stopped"

    simulate(2, scenario)


def test_a_time_limit_outlives_agents_and_the_store() -> None:
    async def scenario(c: SimCluster) -> None:
        await c.submit("j", 2, 2, 2, time_limit=40.0)
        await running(c, 2)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.sleep(5)
        await faults.restart_agent(c)
        await asyncio.sleep(5)
        c.server.restart(keep_data=True)
        await asyncio.sleep(5)
        await c.empty_store()
        await c.until(lambda: c.job("j").phase in TERMINAL, 60, "its time is over")
        job, lease = c.job("j"), c.timing.lease
        assert (job.phase, job.outcome and job.outcome.code) == ("failed", TIME_IS_OVER)
        assert 40.0 - 1.0 <= loop.time() - began <= 40.0 + 2 * lease, "a lease for each start of the store at most"

    simulate(2, scenario)
