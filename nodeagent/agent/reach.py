"""Which members and failsafe members of a gang this node cannot reach, though their leases run: workers wait for each
other then, or would get no failsafe time, and neither the store nor any agent notices. A fact for people; nothing is
decided by it.

Each member asks its neighbours by rank, and the node of rank 0, by signed datagrams (``questions.py``): so a cut
between two nodes of a ring is seen at once, at a cost that does not grow with the gang. And one more each time, another
one in turn: so a cut between any two is seen once each pair had its turn. The node of rank 0 asks in turn the failsafe
members that are no members. An answer takes both directions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from nodeagent.agent.questions import PeerQuestions
from nodeagent.lease.lending import Ask
from nodeagent.model.job import JobRecord
from nodeagent.model.world import Generation
from nodeagent.osutil.clock import Clock
from nodeagent.plan.cluster import Cluster

EVERY = 1.0
"""Seconds between two questions to the same node; also how long an answer is waited for."""
MISSED = 2
"""Questions in a row without an answer after which a node counts as not reached."""


MOST_FOLLOWED = 8
"""Nodes of one gang that are asked each time because they did not answer in their turn."""


def asked(generation: Generation, node: str, turn: int = 0) -> tuple[str, ...]:
    """Whom this member asks: at most four others, whatever the size of the gang. In half as many turns as there are
    members each pair is asked for, by one of the two."""
    order = [m.node for m in generation.ordered()]
    at, size = order.index(node), len(order)
    others = size // 2 - 1  # at distances from 2 to half of the ring
    around = [order[at - 1], order[(at + 1) % size], order[0]]
    if others > 0:
        around.append(order[(at + 2 + turn % others) % size])
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
        self._turn = 0
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
            if job.phase == "running" and job.generation is not None and job.generation.state == "active"
            if self._node in job.generation.members
            for other in self._asked(job, job.generation)
            if (address := _address(cluster, job, other))
        ]
        if not (whom or self._missed or self.unreachable):
            return
        async with asyncio.TaskGroup() as questions:
            tasks = [questions.create_task(self._answers(job, address)) for job, _, address in whom]
        missed = {
            (job.uid, other): 0 if task.result() else self._missed.get((job.uid, other), 0) + 1
            for (job, other, _), task in zip(whom, tasks, strict=True)
        }
        self._missed, self._turn = missed, self._turn + 1
        found: dict[str, dict[str, float]] = {}
        for (uid, other), count in missed.items():
            if count >= MISSED:
                since = self.unreachable.get(uid, {}).get(other, began - EVERY * (count - 1))
                found.setdefault(uid, {})[other] = round(since, 3)
        if found != self.unreachable:
            self._log.warning("peers that cannot be reached", nodes=sorted({n for of in found.values() for n in of}))
            self.unreachable = found
            self._changed()

    def _asked(self, job: JobRecord, generation: Generation) -> tuple[str, ...]:
        """Those whose turn it is, and those that did not answer the last time."""
        whom, outside = [*asked(generation, self._node, self._turn)], job.outside_failsafe_members
        if outside and self._node == generation.ordered()[0].node:
            whom.append(outside[self._turn % len(outside)])
        known = {*generation.members, *outside}
        follow = [other for (of, other), count in self._missed.items() if of == job.uid and count and other in known]
        return tuple(dict.fromkeys((*whom, *follow[:MOST_FOLLOWED])))

    async def _answers(self, job: JobRecord, address: str) -> bool:
        """A question that no failsafe member says yes to, whatever it knows: with no failsafe members named it promises
        nothing."""
        assert job.generation is not None
        token, life = job.generation.token, job.generation.members[self._node].life
        question = Ask(job.uid, (token.number, token.id), {}, self._node, life)
        return await self._peers.ask(address, question, EVERY) is not None


def _address(cluster: Cluster, job: JobRecord, node: str) -> str:
    """Where a member, or failsafe member, is asked; empty where it cannot be, or is gone as the store knows already."""
    record = cluster.nodes.get(node)
    member = job.generation.members.get(node) if job.generation is not None else None
    life = member.life if member is not None else job.failsafe_members.get(node, "")
    alive = record is not None and cluster.live(node, life)
    return record.facts.peer if alive and record is not None else ""
