"""While the store is away: healthy training goes on, on time that the keepers of its generation lend.

Owns this agent's promises, and its questions to others; what may be answered is ``plan/lending.py``'s, who the keepers
are ``plan/keepers.py``'s. Must never extend anything unless every keeper said yes after the question was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from nodeagent.agent.clock import Clock
from nodeagent.agent.lease import Lease
from nodeagent.agent.peers import Peers
from nodeagent.model.timing import Timing
from nodeagent.model.world import Token
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.lending import Answer, Ask, Promises, answer
from nodeagent.plan.pod import Keep
from nodeagent.pods.base import PodHost

_Kept = tuple[Token, frozenset[tuple[str, str]]]


def _kept(token: Token, keepers: Mapping[str, str]) -> _Kept:
    """A generation under certain keepers."""
    return token, frozenset(keepers.items())


class Failsafe:
    """One agent's part: asking for its own jobs, answering for others'."""

    def __init__(
        self,
        timing: Timing,
        *,
        lease: Lease,
        host: PodHost,
        clock: Clock,
        peers: Peers,
        cluster: Callable[[], Cluster],
    ) -> None:
        self._timing, self._lease, self._host = timing, lease, host
        self._clock, self._peers, self._cluster = clock, peers, cluster
        self._promises = Promises(timing, clock.now())
        self._given_up: set[_Kept] = set()
        self.leaving = False
        """Goes soon: promises nothing any more."""
        self.lent: dict[str, float] = {}
        """Jobs that run on failsafe time here: uid to its end (our clock)."""
        self.refusals: dict[str, str] = {}
        """Jobs that nobody lends time to, and why."""
        self._log = structlog.get_logger("failsafe").bind(node=lease.node)
        peers.handler = self.answer

    # --- as a keeper

    def answer(self, ask: Ask) -> Answer:
        """For others, and for this node's own workers. A yes is kept."""
        said = self._answer(ask)
        return said.model_copy(update={"node": self._lease.node, "life": self._lease.incarnation.life})

    def _answer(self, ask: Ask) -> Answer:
        if (ask.to, ask.to_life) != (self._lease.node, self._lease.incarnation.life):
            return Answer(yes=False, why=f"{self._lease.node} was asked in the place of {ask.to}")
        if self.leaving:
            return Answer(yes=False, why=f"{self._lease.node} is leaving")
        if _kept(ask.token, ask.keepers) in self._given_up:
            return Answer(yes=False, why=f"{self._lease.node} is having the keepers replaced")
        now = self._clock.now()
        said = answer(self._cluster(), self._lease.node, now - self._lease.beat_sent, ask)
        if said.yes:
            self._promises.give(ask.uid, now)
            self._lease.speak()
        return said

    async def replace_keepers(self, action: Keep, send: Callable[[Keep], Awaitable[bool]]) -> bool:
        """Have the store replace the keepers. From before it is asked this node lends nothing under the old ones: never
        again where no answer comes, since the step may have happened, or may yet."""
        if action.uid in self.lending():
            return False  # lent since this was planned
        heads = {job.head.token for job in self._cluster().jobs.values() if job.head is not None}
        self._given_up = {kept for kept in self._given_up if kept[0] in heads}
        old = _kept(action.token, action.expect)
        doubtful = old in self._given_up  # an earlier request of ours may still be under way
        self._given_up.add(old)
        changed = await send(action)
        if not doubtful:
            self._given_up.discard(old)
        return changed

    def lending(self) -> frozenset[str]:
        """Jobs that this node may not let go of yet."""
        return frozenset(self._ends())

    def next_end(self) -> float | None:
        """When (our clock) the next promise runs out."""
        return min(self._ends().values(), default=None)

    async def let_promises_end(self) -> None:
        """Promise nothing more, and wait until what was promised is over."""
        self.leaving = True
        await asyncio.sleep(max(0.0, max(self._ends().values(), default=0.0) - self._clock.now()))

    def _ends(self) -> dict[str, float]:
        """The jobs that this node may still lend to, and until when."""
        now, me = self._clock.now(), self._lease
        kept = [job for job in self._cluster().jobs.values() if me.node in job.keepers]  # of many jobs, few
        ends = {job.uid: self._promises.end(job, me.node, me.incarnation) for job in kept}
        return {uid: end for uid, end in ends.items() if end > now}

    # --- as a member

    async def run(self) -> None:
        """Ask at each heartbeat while the store is away."""
        while True:
            due = self._lease.beat_sent + self._timing.failsafe - self._clock.now()
            # Not "has joined": a store that lost writes may go away again before its agents have joined anew.
            if due > 0 or self._lease.lost:
                self._back()
                await asyncio.sleep(max(due, self._timing.heartbeat / 4))
                continue
            started = self._clock.now()
            await self._ask_for_all()
            await asyncio.sleep(max(0.0, self._timing.heartbeat - (self._clock.now() - started)))

    def _back(self) -> None:
        if self.lent or self.refusals:
            self._log.info("the store answers again: no failsafe time is needed")
            self.lent, self.refusals = {}, {}

    async def _ask_for_all(self) -> None:
        if self._clock.now() - self._lease.beat_sent > self._timing.failsafe_limit:  # the fence ends it
            why = f"the store has been away for longer than failsafe_limit ({self._timing.failsafe_limit:g} s)"
            self.refusals |= {question.uid: why for question in self._questions()}
            return
        async with asyncio.TaskGroup() as tasks:
            for question in self._questions():
                tasks.create_task(self._ask_all(question))

    def _questions(self) -> list[Ask]:
        """One for each generation whose workers run here as members of the head."""
        out = []
        cluster, me = self._cluster(), self._lease
        for uid, status in self._host.status().items():
            job = cluster.jobs.get(uid)
            head = job.head if job is not None else None
            if job is None or head is None or head.state != "active" or status.quiet:
                continue
            member = head.members.get(me.node)
            if status.generation == head.token and member is not None and member.life == me.incarnation.life:
                life = me.incarnation.life
                out.append(Ask(uid=uid, token=head.token, keepers=job.keepers, node=me.node, life=life))
        return out

    async def _ask_all(self, question: Ask) -> None:
        """Lend to our own workers if every keeper says yes."""
        asked = self._clock.now()
        problem = "" if question.keepers else "this generation has no keepers"
        async with asyncio.TaskGroup() as tasks:
            answers = {n: tasks.create_task(self._ask(n, question)) for n in sorted(question.keepers)}
        for node, task in answers.items():
            said = task.result()
            if said is None or not said.yes:
                problem = problem or (said.why if said is not None else f"{node} does not answer")
        if problem:
            if self.refusals.get(question.uid) != problem:
                self._log.warning("no keeper gives failsafe time", job=question.uid, why=problem)
            self.refusals[question.uid] = problem
            return
        if question.uid not in self.lent:
            self._log.warning("runs on without the store", job=question.uid, keepers=sorted(question.keepers))
        self.refusals.pop(question.uid, None)
        self.lent[question.uid] = asked + self._timing.fence
        self._lease.lend(question.uid, asked + self._timing.fence)

    async def _ask(self, node: str, question: Ask) -> Answer | None:
        me, record = self._lease, self._cluster().nodes.get(node)
        life = me.incarnation.life if node == me.node else record.incarnation.life if record is not None else ""
        question = question.model_copy(update={"to": node, "to_life": life})
        if node == me.node:
            return self.answer(question)
        if record is None or not record.facts.peer:
            return None
        said = await self._peers.ask(record.facts.peer, question, self._timing.heartbeat)
        if said is not None and not said.of(node, life):
            who = said.node or "somebody else"
            return Answer(yes=False, why=f"{who} answers at the address of {node}")
        return said
