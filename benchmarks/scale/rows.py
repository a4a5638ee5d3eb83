"""The figures of docs/scale.md: each function measures one part of what a cluster of some size costs."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from benchmarks.scale import answers, rounds
from benchmarks.scale.agents import Agent
from benchmarks.scale.crew import FAILED, Crew
from benchmarks.scale.meter import Cost, Meter
from nodeagent.agent.pace import BeatPeriod
from nodeagent.local.privateredis import PrivateRedis
from nodeagent.model.job import JobRecord, Phase
from nodeagent.model.timing import Timing

SMALL_GANG, LARGEST_GANG = 8, 4096
"""Nodes of a job that concerns few, and the most that a job may have (``Nodes.max``)."""
QUEUED = 200
RENEWALS = 1 / Timing().heartbeat
"""Of each node in a second."""
ASKED = 3
"""Times that each question is asked of the API; the median counts."""
CHANGED_BY = ("ben", "eva", "leo", "mia")
Figures = dict[str, float]


async def measure(nodes: int) -> Figures:
    """All of a cluster of this size."""
    figures, most = Figures(), min(nodes, LARGEST_GANG)
    with PrivateRedis() as server:
        async with Meter(server) as meter:
            figures["plain command, us"] = (await meter.plain()).redis
            async with Crew(server, meter, nodes, most) as crew:
                figures |= await _one_job(crew)
            async with Crew(server, meter, nodes, min(SMALL_GANG, nodes)) as crew:
                figures |= await _small_job(crew)
    with PrivateRedis() as server:
        async with Meter(server) as meter, Crew(server, meter, nodes, most, Timing()) as crew:
            figures |= await _emptied(crew)
    return figures | await _round(nodes, most)


async def _one_job(crew: Crew) -> Figures:
    """A job over all nodes."""
    figures, nodes = await _joined(crew), len(crew.names)
    renewal = await crew.renewal()
    figures["renewal, us"], figures["renewal, bytes"] = renewal.redis, renewal.sent
    beat = await crew.beat()
    figures["beat, us"], figures["beat, bytes"] = beat.redis, beat.sent
    rest = (renewal * RENEWALS + beat * (1 / BeatPeriod("", Timing()).period(nodes))) * nodes
    figures["at rest, % of a core"], figures["at rest, MB/s"] = rest.redis / 1e4, rest.sent / 1e6
    job, first = await _formed(crew, await crew.submit())
    figures["first forming, ms"] = first.redis / 1000
    fault = await _fault(crew, job)
    figures["ack, us"] = fault.ack.redis
    figures["fault in all, ms"], figures["fault in all, MB"] = fault.gang.redis / 1000, fault.gang.sent / 1e6
    for part in ("received", "reported", "acks", "active"):
        figures[f"fault in all, {part}, ms"] = getattr(fault, part).redis / 1000
    figures["fault in all, an agent, ms"] = fault.agent / 1000
    change = await _change(crew, fault.job)
    figures["change, us"], figures["change, bytes"] = change.redis, change.sent
    await crew.publish()
    figures |= await _answers(crew, "")
    figures["memory, MB"] = await _memory(crew)
    await crew.queue(QUEUED)
    await crew.read()
    figures |= await _answers(crew, " and a queue")
    return figures | await _ends(crew, crew.members[0].cluster().jobs[crew.uid])


async def _small_job(crew: Crew) -> Figures:
    """A job of a few nodes among many that it does not concern."""
    await crew.join()
    beat = await crew.beat()
    job, _ = await _formed(crew, await crew.submit())
    fault = await _fault(crew, job)
    others = (await crew.news(crew.outside) - beat) * (len(crew.names) - len(crew.gang))
    return {
        "fault in 8, ms": fault.gang.redis / 1000,
        "fault in 8, the others, ms": max(0.0, others.redis / 1000),
        "fault in 8, the others, MB": max(0.0, others.sent / 1e6),
    }


async def _joined(crew: Crew) -> Figures:
    """Everybody joins; then everybody reads everything."""
    join = await crew.join()
    read = await crew.newcomers(crew.agents)
    return {
        "newcomer, us": read.redis,
        "newcomer, bytes": read.sent,
        "newcomer, agent ms": read.here / 1000,
        "join of all, ms": (join.redis + read.redis * len(crew.names)) / 1000,
    }


async def _formed(crew: Crew, job: JobRecord) -> tuple[JobRecord, Cost]:
    """The next generation, and what it cost until its members train."""
    await crew.read()
    proposed, job = await crew.meter.of(crew.propose(job))
    members = len(crew.gang)
    reported = await crew.news(crew.members)
    ack, ends = await crew.acks(job)
    active = await crew.woken(crew.members)
    cost = proposed + (reported + active) * members + ack * (members - 2) + ends
    return crew.members[0].cluster().jobs[crew.uid], cost


class _Fault(NamedTuple):
    """A worker has failed, and all train again. What that cost all members together, in the order in which it goes."""

    job: JobRecord
    received: Cost
    """The report, and that all read it."""
    reported: Cost
    """The proposal, and that all read it."""
    acks: Cost
    active: Cost
    """All read that it is active."""
    ack: Cost
    """One of the acknowledgements."""
    agent: float
    """Microseconds of CPU of one member's agent, all in all."""

    @property
    def gang(self) -> Cost:
        return self.received + self.reported + self.acks + self.active


async def _fault(crew: Crew, job: JobRecord) -> _Fault:
    await crew.read()
    blamed, *others = crew.members
    members = len(crew.gang)
    report, _ = await crew.meter.of(blamed.report(job, FAILED))
    received = await crew.woken(others)
    job = others[0].cluster().jobs[crew.uid]
    decided = _decided(others[0], crew.uid)
    proposed, job = await crew.meter.of(crew.propose(job))
    reported = await crew.woken(crew.members)
    ack, ends = await crew.acks(job)
    active = await crew.woken(crew.members)
    return _Fault(
        blamed.cluster().jobs[crew.uid], report + received * (members - 1), proposed + reported * members,
        ack * (members - 2) + ends, active * members, ack,
        received.here + reported.here + ack.here + active.here + decided,
    )  # fmt: skip


def _decided(agent: Agent, uid: str) -> float:
    """Microseconds of CPU time until the agent knows the job's next step."""
    began = time.process_time()
    agent.decide(uid)
    return 1e6 * (time.process_time() - began)


async def _change(crew: Crew, job: JobRecord) -> Cost:
    """What one member pays for one field of its job's record."""
    await crew.read()
    cost = Cost()
    for who in CHANGED_BY:
        control = job.control.model_copy(update={"by": who})
        job = await crew.store.control(job.uid, job.control.rev, control, "", "JobScaled", f"by {who}")
        cost += await crew.news(crew.members)
    return cost * (1 / len(CHANGED_BY))


async def _ends(crew: Crew, job: JobRecord) -> Figures:
    """The job is stopped; then it runs again, and succeeds."""
    members = len(crew.gang)
    stop = await _ended(crew, job, "pausing")
    job, _ = await _formed(crew, crew.members[0].cluster().jobs[crew.uid])
    reports = await crew.succeed(job)
    reports += await crew.news(crew.members) * members
    end = reports + await _ended(crew, crew.members[0].cluster().jobs[crew.uid], "succeeded")
    return {
        "stop of all, ms": stop.redis / 1000,
        "stop of all, MB": stop.sent / 1e6,
        "end of all, ms": end.redis / 1000,
        "end of all, MB": end.sent / 1e6,
        "end of all, reports, ms": reports.redis / 1000,
    }


async def _ended(crew: Crew, job: JobRecord, phase: Phase) -> Cost:
    """The generation ends, all members read that, let go, and read that all have."""
    members = len(crew.gang)
    ended, job = await crew.meter.of(crew.end(job, phase))
    read = await crew.news(crew.members)
    ack, ends = await crew.acks(job)
    over = await crew.news(crew.members)
    return ended + (read + over) * members + ack * (members - 2) + ends


async def _emptied(crew: Crew) -> Figures:
    """Redis loses everything."""
    await crew.join()
    await _formed(crew, await crew.submit())
    cost = await crew.empty()
    return {"emptied, ms": cost.redis / 1000, "emptied, MB": cost.sent / 1e6}


async def _answers(crew: Crew, when: str) -> Figures:
    figures: Figures = {}
    for name, ask in answers.QUESTIONS.items():
        reported = [await crew.meter.of(ask(crew.members[0])) for _ in range(ASKED)]
        figures[f"{name}{when}, ms"] = statistics.median(one.cpu for _, one in reported)
        figures[f"{name}{when}, on the loop, ms"] = statistics.median(one.loop for _, one in reported)
        figures[f"{name}{when}, Redis ms"] = statistics.median(cost.redis for cost, _ in reported) / 1000
        figures[f"{name}{when}, bytes"] = reported[0][1].size
    return figures


async def _memory(crew: Crew) -> float:
    newcomer = crew.newcomer()
    try:
        return await answers.memory(newcomer)
    finally:
        await newcomer.close()


async def _round(nodes: int, most: int) -> Figures:
    """Many jobs wait, and the rest is taken by jobs as large as can be."""
    took = await rounds.measure(nodes, QUEUED, most)
    return {
        "first round with a queue, ms": took.first,
        "round at rest with a queue, ms": took.rest,
        "round after a change with a queue, ms": took.changed,
    }
