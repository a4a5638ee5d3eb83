"""A whole cluster in one process: a few agents are real and measured, the others call through one client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any, Self

from benchmarks.scale import records
from benchmarks.scale.agents import LEASE_MS, PATIENCE, Agent, acknowledged, renew
from benchmarks.scale.meter import Cost, Meter
from nodeagent.model.job import JobRecord, Phase, Spend
from nodeagent.model.timing import Timing
from nodeagent.model.world import Cause, PodReport, Token
from nodeagent.store.client import connect
from nodeagent.store.messages import Beat, BeatReply, Ending, Proposal
from nodeagent.store.server import PrivateRedis

AGENTS = 5
"""Members that are real, and nodes outside their job that are."""
PATIENT = Timing(lease=LEASE_MS / 1000)
CHUNK = 250
"""Nodes that join before the first of them renews."""
RENEWALS = 200


class Crew:
    """``nodes`` nodes; one job, over the first ``size`` of them. To be closed."""

    def __init__(self, server: PrivateRedis, meter: Meter, nodes: int, size: int, timing: Timing = PATIENT) -> None:
        self.meter, self.timing = meter, timing
        self.cluster_name = f"scale{nodes}x{size}l{timing.lease:g}"
        self.names, self.gang = records.names(nodes), records.names(nodes)[:size]
        self.store = connect(server.url, self.cluster_name, PATIENCE)
        self.uid = "f" * 32
        self._url = server.url
        self._seq = 0
        self._seen: BeatReply | None = None
        inner = self.gang[1:-1]  # the first acknowledgement and the last are not like the others
        self.members = [self._agent(n) for n in _spread(inner, AGENTS)]
        self.outside = [self._agent(n) for n in _spread(self.names[size:], AGENTS)]

    def _agent(self, node: str) -> Agent:
        return Agent(self._url, self.cluster_name, node, self.timing)

    def newcomer(self) -> Agent:
        """A member whose agent has read nothing. To be closed."""
        return self._agent(self.members[0].node)

    async def of(self, calls: Iterable[Awaitable[object]]) -> Cost:
        """What these cost together, one after the other."""

        async def all_of_them() -> None:
            for call in calls:
                await call

        return (await self.meter.of(all_of_them()))[0]

    async def each(self, agents: Sequence[Agent]) -> Cost:
        """What one of these agents pays to read what is new; nothing where there are none."""
        return await self.of(agent.beat() for agent in agents) * (1 / max(1, len(agents)))

    async def join(self) -> Cost:
        """Everybody takes its name."""
        cost = Cost()
        for chunk in _chunks(self.names):
            cost += await self.of(self.store.join(n, records.life(n), records.facts(n), self.timing) for n in chunk)
            await self.renew(chunk)
        for agent in self.agents:
            await agent.join()
        return cost

    @property
    def agents(self) -> list[Agent]:
        return [*self.members, *self.outside]

    async def read(self) -> None:
        """The real ones learn what is new, and all hold their leases then, however long that took."""
        for agent in (*self.agents, *self.agents):
            await agent.beat()
            await agent.renew()

    async def renew(self, names: Iterable[str]) -> None:
        """Leases that last."""
        for name in names:
            era = (self._seen or await self._beat(name)).era
            await renew(self.store, name, era)

    async def renewal(self) -> Cost:
        """One node's, by its lease process."""
        return await self.of(self.renew([self.gang[-1]]) for _ in range(RENEWALS)) * (1 / RENEWALS)

    async def beat(self) -> Cost:
        """One agent's, when there is nothing new."""
        node = self.gang[-1]
        while (await self._beat(node)).more:
            pass
        return await self.of(self._beat(node) for _ in range(RENEWALS)) * (1 / RENEWALS)

    async def _beat(self, node: str, **more: Any) -> BeatReply:
        """By a node without an agent: it asks only for what was written since any of them asked."""
        self._seq += 1
        beat = Beat(node=node, incarnation=records.life(node), seq=self._seq, rev=0, **more)
        if (seen := self._seen) is not None:
            beat = beat.model_copy(update={"rev": seen.rev, "era": seen.era, "silent": seen.silent})
        self._seen = await self.store.beat(beat)
        return self._seen

    async def submit(self) -> JobRecord:
        spec = records.spec("train", 1, len(self.gang))
        return await self.store.submit(self.uid, spec, 1000, 1.0, "ann", "")

    async def queue(self, jobs: int) -> None:
        """Jobs that wait for nodes."""
        for i in range(jobs):
            spec = records.spec(f"wait-{i}", records.WANTED, records.WANTED)
            await self.store.submit(f"{i:032x}", spec, 1000, 1.0, "ann", "")

    async def propose(self, job: JobRecord) -> JobRecord:
        members = {name: records.member(rank, name) for rank, name in enumerate(self.gang)}
        first = self.gang[0]
        spend = Spend(at=1, wall=2.0, kind="worker_failed", counts=True, node=first, rank=3, text="failed", exit=1)
        self._seq += 1
        proposal = Proposal(
            uid=self.uid, expect=job.head.token if job.head else None, expect_state=job.head.state if job.head else "",
            control_rev=job.control.rev, id=f"g{self._seq}", members=members, cause=Cause(kind="start", text="go"),
            spend=spend if job.head else None, form_ms=LEASE_MS, by=first,
            keepers={n: records.life(n).life for n in self.gang[:5]},
        )  # fmt: skip
        return await self.store.propose(proposal)

    async def acks(self, job: JobRecord) -> tuple[Cost, Cost]:
        """What one member's costs; and the first one's, which counts, with the last one's, which activates."""
        assert job.head is not None
        one, ends = Cost(), Cost()
        real = {agent.node: agent for agent in self.members}
        for i, name in enumerate(self.gang):
            if i % CHUNK == 0 and self.timing is not PATIENT:
                await self.read()  # their own leases are short
            if agent := real.get(name):
                one += (await self.meter.of(agent.ack(job)))[0]
            elif name in (self.gang[0], self.gang[-1]):
                ends += (await self.meter.of(self._ack(job, name)))[0]
            else:
                await self._ack(job, name)
        return one * (1 / len(real)), ends

    async def _ack(self, job: JobRecord, name: str) -> JobRecord:
        assert job.head is not None
        ack = acknowledged(name, job.head)
        return await self.store.ack(self.uid, job.head.token, name, records.life(name), ack, None)

    async def succeed(self, job: JobRecord) -> Cost:
        """What it costs that every member reports the success of its pod, one after the other."""
        assert job.head is not None
        one, real = Cost(), {agent.node: agent for agent in self.members}
        *others, last = self.gang
        for name in others:
            if agent := real.get(name):
                one += (await self.meter.of(agent.report(job, SUCCEEDED)))[0]
            else:
                await self._report(job.head.token, name, SUCCEEDED)
        ends = await self.of([self._report(job.head.token, last, SUCCEEDED)])
        return one * (len(others) / len(real)) + ends

    async def _report(self, token: Token, name: str, report: PodReport) -> JobRecord:
        return await self.store.report(self.uid, token, name, records.life(name), report)

    async def end(self, job: JobRecord, phase: Phase) -> JobRecord:
        assert job.head is not None
        ending = Ending(
            uid=self.uid, expect=job.head.token, expect_state=job.head.state, control_rev=job.control.rev, phase=phase,
            reason="it ends", wall=3.0, by=self.gang[0],
        )  # fmt: skip
        return await self.store.end(ending)

    async def publish(self) -> None:
        """Every member tells its pod's state."""
        real = {agent.node: agent for agent in self.members}
        for rank, name in enumerate(self.gang):
            pod = records.pod(self.uid, name, rank)
            if agent := real.get(name):
                agent.publish(pod)
                await agent.beat()
            else:
                await self._beat(name, pods=(pod,))

    async def empty(self) -> Cost:
        """The store loses everything. What it costs until all have come back and read everything anew."""
        await self.read()
        await self.meter.empty()
        first, *others = self.members
        restored = await self.of([first.beat()])
        came = await self.each(others)
        self._seen = None
        for chunk in _chunks(self.names):
            await self.of(self.store.join(n, records.life(n), records.facts(n), self.timing) for n in chunk)
            await self.renew(n for n in chunk if n not in {agent.node for agent in self.members})
        while first.snapshot.recovering:
            await asyncio.sleep(self.timing.heartbeat)
            await first.beat()
        read = await self.each(others)
        return restored + came * (len(self.names) - 1) + read * len(self.names)

    async def close(self) -> None:
        await self.store.close()
        for agent in self.agents:
            await agent.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


FAILED = PodReport(state="failed", reason="worker 3 ended with code 1")
SUCCEEDED = PodReport(state="succeeded")


def _spread(names: Sequence[str], wanted: int) -> list[str]:
    """So many of them, or as many as there are, from all over the list."""
    count = min(wanted, len(names))
    return [names[i * len(names) // count] for i in range(count)]


def _chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), CHUNK):
        yield names[start : start + CHUNK]
