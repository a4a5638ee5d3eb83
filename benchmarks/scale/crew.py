"""A whole cluster in one process: a few agents are real and measured, the others call through one client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

from benchmarks.scale import records
from benchmarks.scale.agents import LEASE_MS, PATIENCE, Agent, acknowledged, renew
from benchmarks.scale.meter import Cost, Meter
from nodeagent.agent.pace import BeatPeriod, look_period
from nodeagent.local.privateredis import PrivateRedis
from nodeagent.model.job import BudgetEntry, JobRecord, Phase
from nodeagent.model.timing import Timing
from nodeagent.model.world import Cause, Generation, PodReport
from nodeagent.store.client import NEVER, connect
from nodeagent.store.codec import report_arguments
from nodeagent.store.link import Links
from nodeagent.store.messages import Beat, BeatReply, Ending, Proposal
from nodeagent.store.scripts import who
from nodeagent.store.whois import parse_info
from tests.submitting import submit_one

AGENTS = 5
"""Members that are real, and nodes outside their job that are."""
PATIENT = Timing(lease=LEASE_MS / 1000)
CHUNK = 250
"""Nodes that join before the first of them renews."""
RENEWALS = 200
REPEATED = 40
"""Nodes that ask what an agent has asked."""


class Acks(NamedTuple):
    """What a generation's acknowledgements cost."""

    one: Cost
    ends: Cost
    """The first one, which counts, and the last one, which activates it or ends the wait."""


class Crew:
    """``nodes`` nodes; one job, over the first ``size`` of them. To be closed."""

    def __init__(self, server: PrivateRedis, meter: Meter, nodes: int, size: int, timing: Timing = PATIENT) -> None:
        self.meter, self.timing = meter, timing
        self.cluster_name = f"scale{nodes}x{size}l{timing.lease:g}"
        self.names, self.gang = records.names(nodes), records.names(nodes)[:size]
        self.store = connect(server.url, self.cluster_name, PATIENCE)
        self.uid = "f" * 32
        self._url, self._waits = server.url, Links(server.url, REPEATED + 1, PATIENCE)
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

    async def news(self, agents: Sequence[Agent]) -> Cost:
        """As ``each``, of changes since they asked last. The server's time is that of the same question asked by other
        nodes, one right after the other, as a cluster's agents ask it: what an agent decodes in this process between
        two questions drives the server's records and scripts out of the processor's caches, which costs up to 250 us a
        call, and more in a larger cluster."""
        cost = await self.each(agents)
        if not agents:
            return cost
        real = {agent.node for agent in self.agents}
        names = [name for name in self.names if name not in real][:REPEATED]
        asked = [agent.calls.last["beat"] for agent in agents]
        repeated = await self.of(
            self._step("beat", name, asked[i % len(asked)] | {"seq": self._next(), "pods": [], "facts": None})
            for i, name in enumerate(names)
        )
        return Cost(repeated.redis / len(names), cost.sent, cost.here) if names else cost

    async def newcomers(self, agents: Sequence[Agent]) -> Cost:
        """As ``news``, of agents that have read nothing."""
        noted = agents[0].calls.plain = []
        cost = await self.each(agents)
        agents[0].calls.plain = None
        asked = agents[0].calls.last["beat"] | {"rev": 0, "era": "", "nodes": NEVER}

        async def read(name: str) -> None:
            await self._step("beat", name, asked | {"seq": self._next(), "pods": [], "facts": None})
            async with self.store._calls.link() as link:
                for commands in noted:
                    await link.ask_beside(*commands)

        names = [name for name in self.names if name not in {agent.node for agent in self.agents}][:REPEATED]
        repeated = await self.of(map(read, names))
        return Cost(repeated.redis / len(names), cost.sent, cost.here) if names else cost

    async def woken(self, agents: Sequence[Agent]) -> Cost:
        """What one of these agents pays for what it is woken with. The server's time is that of other connections that
        wait for the same entry, including that they wait. Where it brings nothing, since that is too much, they ask."""
        async with self._waits.one() as link:
            ((_, entry),) = await link.ask("XREVRANGE", f"{self.store._prefix}wake:job:{self.uid}", "+", "-")
        if entry[0] != "era":
            return await self.news(agents)
        cost = await self.of(agent.woken() for agent in agents) * (1 / max(1, len(agents)))
        return Cost(await self._wake_of(entry) / REPEATED, cost.sent, cost.here)

    async def _wake_of(self, entry: Sequence[str]) -> float:
        """Microseconds of the server until REPEATED connections have waited for this entry and have read it."""
        key = f"{self.store._prefix}wake:yardstick"

        async def wait() -> None:
            async with self._waits.one() as link:
                await link.ask("XREAD", "COUNT", 1, "BLOCK", int(PATIENCE * 1000), "STREAMS", key, "0-0")

        async def wake() -> None:
            async with asyncio.TaskGroup() as tasks, self._waits.one() as link:
                for _ in range(REPEATED):
                    tasks.create_task(wait())
                # The server tells nobody when it has blocked them.
                while parse_info(await link.ask("INFO", "clients"))["blocked_clients"] != str(REPEATED):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                await link.ask("XADD", key, "MAXLEN", 1, "*", *entry)

        await self.meter.of(wake())  # connects
        async with self._waits.one() as link:
            await link.ask("DEL", key)
        cost, _ = await self.meter.of(wake())
        async with self._waits.one() as link:
            await link.ask("DEL", key)
        return cost.redis

    async def _step(self, step: str, name: str, arguments: dict[str, object]) -> None:
        """By a node without an agent; nobody reads the reply."""
        await self.store._calls.step(step, arguments | who(name, records.life(name)))

    def _next(self) -> int:
        self._seq += 1
        return self._seq

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
        while (await self._beat(self.gang[-1])).more:  # who proposes for the others knows the nodes too
            pass

    async def renew(self, names: Iterable[str]) -> None:
        """Leases that last."""
        for name in names:
            era = (self._seen or await self._beat(name)).era
            await renew(self.store, name, era)

    async def renewal(self) -> Cost:
        """One node's, by its lease process."""
        return await self.of(self.renew([self.gang[-1]]) for _ in range(RENEWALS)) * (1 / RENEWALS)

    async def beat(self) -> Cost:
        """One agent's, when there is nothing new: on average, of those that look for damage and the others."""
        node, nodes, usual = self.gang[-1], len(self.names), Timing()
        while (await self._beat(node)).more:
            pass
        looks = round(look_period(nodes, usual) / BeatPeriod("", usual).period(nodes))
        calls = (self._beat(node, looks=0 if i % looks else i // looks + 1) for i in range(RENEWALS))
        return await self.of(calls) * (1 / RENEWALS)

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
        return await submit_one(self.store, self.uid, spec, 1000, 1.0, "ann", "")

    async def queue(self, jobs: int) -> None:
        """Jobs that wait for nodes."""
        for i in range(jobs):
            spec = records.spec(f"wait-{i}", records.WANTED, records.WANTED)
            await submit_one(self.store, f"{i:032x}", spec, 1000, 1.0, "ann", "")

    async def propose(self, job: JobRecord) -> JobRecord:
        members = {name: records.member(rank, name) for rank, name in enumerate(self.gang)}
        first = self.gang[0]
        spend = BudgetEntry(
            at=1, wall=2.0, kind="worker_failed", counts=True, node=first, rank=3, text="failed", exit=1
        )
        self._seq += 1
        proposal = Proposal(
            uid=self.uid, expect=job.generation.token if job.generation else None,
            expect_state=job.generation.state if job.generation else "",
            control_rev=job.control.rev, id=f"g{self._seq}", members=members, cause=Cause(kind="start", text="go"),
            spend=spend if job.generation else None, form_ms=LEASE_MS, by=first,
            failsafe_members={n: records.life(n).life for n in self.gang[:5]},
        )  # fmt: skip
        return await self.store.propose(proposal)

    async def acks(self, job: JobRecord) -> Acks:
        """Every member acknowledges. The agents of the real ones decode what that brings them."""
        assert job.generation is not None
        first, *inner, last = self.gang
        ack: dict[str, object] = {"uid": self.uid, "token": job.generation.token.model_dump(), "base": self._base()}
        ends = await self.of([self._ack(ack, job.generation, first)])
        some, here = Cost(), 0.0
        for chunk in _chunks([name for name in inner if name not in {agent.node for agent in self.members}]):
            if self.timing is not PATIENT:
                await self.read()  # their own leases are short
            some += await self.of(self._ack(ack, job.generation, name) for name in chunk)
        for agent in self.members:
            here += (await self.of([agent.ack(job)])).here / len(self.members)
        one = some * (1 / max(1, len(inner) - len(self.members)))
        ends += await self.of([self._ack(ack, job.generation, last)])
        return Acks(Cost(one.redis, one.sent, here), ends)

    async def _ack(self, arguments: dict[str, object], generation: Generation, name: str) -> None:
        await self._step("ack", name, arguments | {"ack": acknowledged(name, generation).to_json()})

    def _base(self) -> dict[str, object]:
        """How much of the job the members have read."""
        base = self.members[0].store._decoder.base(self.uid)
        assert base is not None
        return base._asdict()

    async def succeed(self, job: JobRecord) -> Cost:
        """What it costs that every member reports the success of its pod, one after the other."""
        assert job.generation is not None
        report: dict[str, object] = {"uid": self.uid, "token": job.generation.token.model_dump(), "base": self._base()}
        report |= {"reason": ""} | report_arguments(PodReport(state="succeeded"))
        return await self.of(self._step("report", name, report) for name in self.gang)

    async def end(self, job: JobRecord, phase: Phase) -> JobRecord:
        assert job.generation is not None
        ending = Ending(
            uid=self.uid, expect=job.generation.token, expect_state=job.generation.state,
            control_rev=job.control.rev, phase=phase,
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
        await self._waits.close()
        for agent in self.agents:
            await agent.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


FAILED = PodReport(state="failed", reason="worker 3 ended with code 1")


def _spread(names: Sequence[str], wanted: int) -> list[str]:
    """So many of them, or as many as there are, from all over the list."""
    count = min(wanted, len(names))
    return [names[i * len(names) // count] for i in range(count)]


def _chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), CHUNK):
        yield names[start : start + CHUNK]
