"""Which members of a gang this node cannot reach, though their leases run: workers wait for each other then, and
neither the store nor any agent notices. A fact for people; nothing is decided by it.

Each member asks its neighbours by rank, and the node of rank 0, by signed datagrams (``questions.py``): so a cut
between two nodes of a ring is seen, at a cost that does not grow with the gang. An answer takes both directions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from nodeagent.agent.questions import PeerQuestions
from nodeagent.lease.lending import Ask
from nodeagent.model.job import JobRecord
from nodeagent.model.world import Head
from nodeagent.osutil.clock import Clock
from nodeagent.plan.cluster import Cluster

EVERY = 1.0
"""Seconds between two questions to the same node; also how long an answer is waited for."""
MISSED = 2
"""Questions in a row without an answer after which a node counts as not reached."""


def asked(head: Head, node: str) -> tuple[str, ...]:
    """Whom this member asks: at most three others, whatever the size of the gang."""
    order = [m.node for m in head.ordered()]
    at = order.index(node)
    around = (order[at - 1], order[(at + 1) % len(order)], order[0])
    return tuple(dict.fromkeys(other for other in around if other != node))


class Reach:
    """One agent's view. ``changed`` is called when ``unreachable`` has changed."""

    def __init__(
        self,
        node: str,
        *,
        peers: PeerQuestions,
        clock: Clock,
        cluster: Callable[[], Cluster],
        changed: Callable[[], None],
    ) -> None:
        self._node, self._peers, self._clock, self._cluster = node, peers, clock, cluster
        self._changed = changed
        self._missed: dict[tuple[str, str], int] = {}
        """Job and node to the questions in a row that it has not answered."""
        self.unreachable: Mapping[str, Mapping[str, float]] = {}
        """Job (uid) to node to the Unix time of the first question that it did not answer."""
        self._log = structlog.get_logger("reach").bind(node=node)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            await self.look()

    async def look(self) -> None:
        """Ask everybody once, all at the same time: takes ``EVERY`` seconds at most."""
        cluster, began = self._cluster(), self._clock.wall()
        whom = [
            (job, other, address)
            for job in cluster.jobs.values()
            if job.phase == "running" and job.head is not None and job.head.state == "active"
            if self._node in job.head.members
            for other in asked(job.head, self._node)
            if (address := _address(cluster, job.head, other))
        ]
        async with asyncio.TaskGroup() as questions:
            tasks = [questions.create_task(self._answers(job, address)) for job, _, address in whom]
        missed = {
            (job.uid, other): 0 if task.result() else self._missed.get((job.uid, other), 0) + 1
            for (job, other, _), task in zip(whom, tasks, strict=True)
        }
        self._missed = missed
        found: dict[str, dict[str, float]] = {}
        for (uid, other), count in missed.items():
            if count >= MISSED:
                since = self.unreachable.get(uid, {}).get(other, began - EVERY * (count - 1))
                found.setdefault(uid, {})[other] = round(since, 3)
        if found != self.unreachable:
            self._log.warning("peers that cannot be reached", nodes=sorted({n for of in found.values() for n in of}))
            self.unreachable = found
            self._changed()

    async def _answers(self, job: JobRecord, address: str) -> bool:
        """A question that no keeper says yes to, whatever it knows: with no keepers named it promises nothing."""
        assert job.head is not None
        token, life = job.head.token, job.head.members[self._node].life
        question = Ask(job.uid, (token.number, token.id), {}, self._node, life)
        return await self._peers.ask(address, question, EVERY) is not None


def _address(cluster: Cluster, head: Head, node: str) -> str:
    """Where a member is asked; empty where it cannot be, or is gone as the store knows already."""
    record = cluster.nodes.get(node)
    alive = record is not None and cluster.live(node, head.members[node].life)
    return record.facts.peer if alive and record is not None else ""
