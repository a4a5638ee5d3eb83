"""While the store is away: healthy training goes on, on time that the failsafe members of its generation lend.

The lease process asks and answers (``lease/failsafe.py``); this tells it what it has to know of this node's jobs, and
knows what it has promised. Who the failsafe members are is ``plan/nodes/failsafe.py``'s. Must never let go of a job
before the lease process has the order, and its promises were read after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from nodeagent.agent.context import AgentContext
from nodeagent.agent.membership import Membership
from nodeagent.lease.lending import FailsafeAddress, LoanRow
from nodeagent.lease.statefiles import MOST_MEMBERS, Bridged
from nodeagent.model.job import JobRecord
from nodeagent.model.world import Generation, Token
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.pods.actions import SetFailsafeMembers
from nodeagent.pods.folder import folder_name

_Under = tuple[Token, frozenset[tuple[str, str]]]


def _under(token: Token, failsafe_members: Mapping[str, str]) -> _Under:
    """A generation under certain failsafe members."""
    return token, frozenset(failsafe_members.items())


class FailsafeWatch:
    """One agent's part: what its lease process is to know, and when its promises are over."""

    def __init__(self, context: AgentContext, membership: Membership, cluster: Callable[[], Cluster]) -> None:
        self._timing, self._clock, self._host = context.timing, context.clock, context.host
        self._process, self._membership, self._cluster = context.process, membership, cluster
        self._given_up: set[_Under] = set()
        self._members: dict[str, tuple[Generation, Mapping[str, str]]] = {}
        """Job to a generation that was looked at, and the lives of its members."""
        self.leaving = False
        """Goes soon: promises nothing any more."""
        self._seen = Bridged({}, {})
        self._log = structlog.get_logger("failsafe").bind(node=membership.node)

    # --- as a failsafe member

    async def set_failsafe_members(
        self, action: SetFailsafeMembers, send: Callable[[SetFailsafeMembers], Awaitable[bool]]
    ) -> bool:
        """Have the store replace the failsafe members. From before it is asked this node lends nothing under the old
        ones: never again where no answer comes, since the step may have happened, or may yet."""
        generations = {job.generation.token for job in self._cluster().jobs.values() if job.generation is not None}
        self._given_up = {one for one in self._given_up if one[0] in generations}
        old = _under(action.token, action.expect)
        doubtful = old in self._given_up  # an earlier request of ours may still be under way
        self._given_up.add(old)
        lent = action.uid in self.promised(self._cluster())  # perhaps since this was planned
        changed = not lent and await send(action)
        if not doubtful:
            self._given_up.discard(old)
        return changed

    async def let_promises_end(self) -> bool:
        """Promise nothing more, and wait until what was promised is over. False if the order could not be written:
        then it may promise on."""
        self.leaving = True
        if not self._write(self._cluster()):
            return False
        promises, length, now = self._process.promises(), self._timing.promise, self._clock.now()
        await asyncio.sleep(max(0.0, (promises.last(length) if promises is not None else now + length) - now))
        return True

    def promised(self, cluster: Cluster) -> Mapping[str, float]:
        """The jobs that this node may still lend to, so that it may not let go of them yet, and until when (our clock).
        What the lease process must not lend to any more, as this view has it, is written first: what it promises after
        that it does not say."""
        now, me = self._clock.now(), self._membership.node
        written = self._write(cluster)
        life = self._membership.incarnation.life
        ours = {
            uid: job.failsafe_members[me] == life for uid, job in cluster.jobs.items() if me in job.failsafe_members
        }  # few, of many
        promises = self._process.promises() if written and ours else None
        if promises is None:
            return dict.fromkeys(ours, now + self._timing.heartbeat)  # nobody knows: look again then
        ends = {uid: promises.end(uid, self._timing.promise, present) for uid, present in ours.items()}
        return {uid: end for uid, end in ends.items() if end > now}

    def _write(self, cluster: Cluster) -> bool:
        """Whether the lease process knows this."""
        rows, members, room = {}, {}, MOST_MEMBERS
        statuses, me = self._host.status(), self._membership
        for uid, job in cluster.jobs.items():
            generation = job.generation
            if generation is None or generation.state != "active":
                continue
            lends, status, member = me.node in job.failsafe_members, statuses.get(uid), generation.members.get(me.node)
            ours = member is not None and member.life == me.incarnation.life
            runs = ours and status is not None and not status.quiet and status.generation == generation.token
            if not (lends or ours):
                continue
            room -= len(generation.members) if lends else 1
            if room < 0:
                continue
            if lends:
                members[uid] = self._lives(uid, generation)
            replaced = _under(generation.token, job.failsafe_members) in self._given_up
            rows[uid] = LoanRow(
                token=(generation.token.number, generation.token.id), failsafe_members=job.failsafe_members,
                members=members[uid][1] if lends else {},
                refuses="is having the failsafe members replaced" if replaced else "",
                pod=folder_name(uid) if runs else "", places=self._places(cluster, job) if runs else {},
            )  # fmt: skip
        self._members = members
        return self._process.know(me.incarnation.life, self.leaving, rows)

    def _lives(self, uid: str, generation: Generation) -> tuple[Generation, Mapping[str, str]]:
        known = self._members.get(uid)
        if known is not None and known[0] is generation:
            return known
        return generation, {node: member.life for node, member in generation.members.items()}

    def _places(self, cluster: Cluster, job: JobRecord) -> dict[str, FailsafeAddress]:
        """Of the other failsafe members."""
        found = {}
        for node in sorted(job.failsafe_members):
            record = cluster.nodes.get(node)
            if node != self._membership.node and record is not None and record.facts.peer:
                found[node] = FailsafeAddress(record.facts.peer, record.incarnation.life)
        return found

    # --- for people

    @property
    def bridged(self) -> Bridged:
        """What runs on failsafe time here, and what gets none."""
        return self._process.bridged()

    def log(self) -> None:
        """Log what the lease process has done since the last call."""
        before, now = self._seen, self.bridged
        if now is before:
            return
        for uid in sorted(now.lent.keys() - before.lent.keys()):
            job = self._cluster().jobs.get(uid)
            self._log.warning(
                "runs on without the store", job=uid, failsafe_members=sorted(job.failsafe_members) if job else None
            )
        for uid, why in sorted(now.refusals.items() - before.refusals.items()):
            self._log.warning("no failsafe member gives failsafe time", job=uid, why=why)
        if any(before) and not any(now):
            self._log.info("no failsafe time is needed", why=self._why_none())
        self._seen = now

    def _why_none(self) -> str:
        if self._membership.away_since is None:
            return "the store answers again"
        pulse = self._process.pulse()
        if pulse is not None and self._clock.now() - pulse.last < self._timing.failsafe:
            return "the store answers this node's lease process, though not its agent"
        return "nothing runs here any more"
