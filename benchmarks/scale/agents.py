"""One agent in a large cluster, without workers: its lease, its view and what it decides, all of them production's."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from benchmarks.scale import records
from nodeagent.agent.context import AgentContext
from nodeagent.agent.membership import Membership
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.snapshot import Snapshot
from nodeagent.agent.undecided import Undecided
from nodeagent.model.job import JobRecord
from nodeagent.model.pod import PodState
from nodeagent.model.timing import Timing
from nodeagent.model.world import Ack, Generation, PodReport
from nodeagent.osutil.clock import SystemClock
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.job.gang import decide
from nodeagent.plan.steps import Decision
from nodeagent.store.calls import Calls
from nodeagent.store.client import COMMAND_LINKS, WAIT_LINKS, RedisStore
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links, StoreLink
from nodeagent.store.scripts import ActedOn, never

LEASE_MS = 3_600_000
"""What a renewal is for: nobody renews while something else is measured."""
PATIENCE = 60.0
"""Seconds that a call may take here: what is measured is what it costs."""


Command = Sequence[str | int]


class _NotedLink:
    """A link that keeps the plain commands."""

    def __init__(self, link: StoreLink, noted: list[tuple[Command, ...]]) -> None:
        self._link, self._noted = link, noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    async def ask(self, *command: str | int) -> Any:
        self._noted.append((command,))
        return await self._link.ask(*command)

    async def ask_beside(self, *commands: Command) -> tuple[Any, list[Any]]:
        self._noted.append(commands)
        return await self._link.ask_beside(*commands)


class NotedCalls(Calls):
    """Keeps the arguments of each step that was called last, by its name."""

    def __init__(self, url: str, cluster: str) -> None:
        commands, waits = Links(url, COMMAND_LINKS, PATIENCE), Links(url, WAIT_LINKS, PATIENCE)
        super().__init__(commands, waits, prefix(cluster), PATIENCE)
        self.last: dict[str, dict[str, object]] = {}
        self.plain: list[tuple[Command, ...]] | None = None
        """Commands that are no steps, as they were sent, since somebody asked for them with a list."""

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Any]:
        async with super().link() as link:
            yield link if self.plain is None else _NotedLink(link, self.plain)

    async def step(
        self, name: str, arguments: dict[str, object], acted_on: ActedOn = never, words: Sequence[str] = ()
    ) -> Any:
        self.last[name] = arguments
        return await super().step(name, arguments, acted_on, words)


async def _nobody(*_: object) -> None:
    """No peer has its lease in another store."""


class Agent:
    """One node's. To be closed."""

    def __init__(self, url: str, cluster: str, node: str, timing: Timing) -> None:
        self.node = node
        self.calls = NotedCalls(url, cluster)
        self.store = RedisStore(self.calls)
        self.snapshot = Snapshot(timing)
        stubs: dict[str, Any] = {
            "host": SimpleNamespace(promised=lambda _uids: {}),
            "process": SimpleNamespace(
                tend=self._tend, wake=lambda: None, alive=lambda *_, **__: None, elsewhere=lambda _: ""
            ),
        }
        identity: Any = SimpleNamespace(incarnation=records.life(node), before="")  # it keeps its life
        self._era = ""
        context = AgentContext(
            node, timing, self.store, clock=SystemClock(), random_id=lambda: "r", snapshot=self.snapshot,
            metrics=Metrics(), undecided=Undecided(node, Metrics().left_undecided), **stubs,
        )  # fmt: skip
        self._lease = Membership(context, identity, records.facts(node), find_peer=_nobody)

    async def join(self) -> None:
        await self._lease.join()

    async def beat(self) -> None:
        """Read what changed; everything at first. A store that lost writes is given what is known here."""
        await self._lease.beat()

    async def woken(self) -> None:
        """Take in what an event brings that has come already. Raises RuntimeError if it brings nothing."""
        jobs = self.snapshot.concern(self.node)
        woken = await self.store.wake(self._lease.newest_event, PATIENCE, self.node, jobs)
        if not self.snapshot.absorb_jobs(woken.jobs):
            raise RuntimeError(f"{self.node} has to beat")
        self._lease.newest_event = woken.event

    async def renew(self) -> None:
        """As its lease process does."""
        await renew(self.store, self.node, self._era)

    def _tend(self, _life: str, _start: int, era: str, _cluster_uid: str) -> None:
        self._era = era

    def cluster(self) -> Cluster:
        return self.snapshot.cluster(SystemClock().now())

    def decide(self, uid: str) -> Decision:
        """The next step of a job."""
        return decide(self.cluster(), self.cluster().jobs[uid], time.time())

    def publish(self, *pods: PodState) -> None:
        """The next beat tells them."""
        self._lease.publish({}, pods)

    async def ack(self, job: JobRecord) -> JobRecord:
        assert job.generation is not None
        ack = acknowledged(self.node, job.generation)
        ended = await self.store.ack(job.uid, job.generation.token, self.node, records.life(self.node), ack, None)
        self.snapshot.absorb_job(ended)
        return ended

    async def report(self, job: JobRecord, report: PodReport) -> None:
        assert job.generation is not None
        reported = await self.store.report(job.uid, job.generation.token, self.node, records.life(self.node), report)
        self.snapshot.absorb_job(reported)

    async def close(self) -> None:
        await self.store.close()


async def renew(store: RedisStore, node: str, era: str) -> None:
    """A lease process's step, which the agents' client has no method for."""
    about = {"node": node, "life": records.life(node).life, "era": era, "length": LEASE_MS, "asks": False}
    await store._calls.step("renew_lease", about)


def acknowledged(node: str, generation: Generation) -> Ack:
    if generation.state == "ended":
        return Ack(life=records.life(node).life, ended=True)
    return Ack(life=records.life(node).life, address=f"{node}:29500", host="10.0.0.1", signature="a" * 64, ready=0.01)
