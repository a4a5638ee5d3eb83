"""What a keeper answers when a member of a gang asks it for time, and what its promises forbid it. Pure: time comes in.

The rules that make it safe: a keeper lends only to the newest generation that it knows to be active, under the very
keepers that it knows; having lent, it does not let go of that job for ``promise`` seconds.
"""

from __future__ import annotations

from nodeagent.model.base import Record
from nodeagent.model.job import JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.timing import Timing
from nodeagent.model.world import Token
from nodeagent.plan.cluster import Cluster


class Ask(Record):
    """A member's question to one keeper: may the workers of this generation run on?"""

    uid: str
    token: Token
    keepers: dict[str, str]
    """As the member knows them."""
    node: str
    life: str
    to: str = ""
    """The keeper that is asked, and its life: what is reached at its address may be another agent."""
    to_life: str = ""


class Answer(Record):
    """A keeper's answer. ``yes`` is a promise."""

    yes: bool
    why: str = ""
    node: str = ""
    """Whose answer it is: a keeper that is reached at another's address must not answer for two."""
    life: str = ""

    def of(self, node: str, life: str) -> bool:
        """It is this node's, in this life."""
        return (self.node, self.life) == (node, life)


def answer(cluster: Cluster, node: str, renewed: float, ask: Ask) -> Answer:
    """What ``node`` answers. ``renewed``: seconds since its last good renewal at the store was sent."""
    job = cluster.jobs.get(ask.uid)
    head = job.head if job is not None else None
    if job is None or head is None or head.token != ask.token or head.state != "active":
        return Answer(yes=False, why=f"{node} does not know generation {ask.token.number} as active")
    if job.keepers != ask.keepers or node not in job.keepers:
        return Answer(yes=False, why=f"{node} knows other keepers of generation {ask.token.number}")
    member = head.members.get(ask.node)
    if member is None or member.life != ask.life:
        return Answer(yes=False, why=f"{node} does not know {ask.node} as a member of generation {ask.token.number}")
    if renewed <= cluster.timing.heartbeat + cluster.timing.store_timeout / 2:
        return Answer(yes=False, why=f"the store answers {node}")
    return Answer(yes=True)


class Promises:
    """The promises of one agent process, by job. An earlier process of this node may have made some as well: what it
    may have lent to is not let go of within one promise's length of the start."""

    def __init__(self, timing: Timing, started: float) -> None:
        self._length = timing.promise
        self._before = started + timing.promise
        self._until: dict[str, float] = {}

    def give(self, uid: str, now: float) -> None:
        self._until[uid] = now + self._length

    def end(self, job: JobRecord, node: str, incarnation: Incarnation) -> float:
        """Until when this node may not let go of the job. A keeper named in the very life that began with this
        process has no earlier one."""
        if node not in job.keepers:
            return 0.0
        ours = job.keepers[node] == incarnation.life and incarnation.start == 1
        return max(self._until.get(job.uid, 0.0), 0.0 if ours else self._before)
