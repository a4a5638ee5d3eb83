"""The agent's copy of the store: every node and job as last read, and an estimate of the served clock. Asks nothing,
decides nothing."""

from __future__ import annotations

from nodeagent.model.job import JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.timing import Timing, millis
from nodeagent.plan.cluster import Cluster
from nodeagent.store.base import BeatReply


class Snapshot:
    """Absorbs replies; newer revisions replace older ones, never the other way round."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._nodes: dict[str, NodeRecord] = {}
        self._jobs: dict[str, JobRecord] = {}
        self._lapsed: frozenset[str] = frozenset()
        self._next_lapse: int | None = None
        self._served = 0
        self._at = 0.0
        self.rev = 0
        self.cluster_uid = ""
        self._run = ""
        self.complete = False
        """Everything has been read at least once."""

    def absorb(self, reply: BeatReply, now: float) -> None:
        """Take in a beat's reply received at ``now``. Another store's replaces everything."""
        if self.is_other(reply):
            self._nodes, self._jobs, self.complete = {}, {}, False
        self.cluster_uid, self._run = reply.cluster_uid, reply.run
        for node in reply.nodes:
            self._nodes[node.id] = node
        for job in reply.jobs:
            self.absorb_job(job)
        for key in reply.gone:
            kind, _, name = key.partition(":")
            (self._nodes if kind == "node" else self._jobs).pop(name, None)
        self._lapsed, self._next_lapse = frozenset(reply.lapsed), reply.next_lapse
        self._served, self._at = reply.served, now
        self.rev = reply.rev
        if not reply.more:
            self.complete = True

    def is_other(self, reply: BeatReply) -> bool:
        """Whether another store answers than before, or another process of it: it may have lost what was read, and
        its revisions may mean other changes."""
        return bool(self.cluster_uid) and (reply.cluster_uid, reply.run) != (self.cluster_uid, self._run)

    def absorb_job(self, job: JobRecord) -> bool:
        """Take in one job's record; false if it is older than what is known."""
        known = self._jobs.get(job.uid)
        if known is not None and known.rev > job.rev:
            return False
        self._jobs[job.uid] = job
        return True

    def forget_job(self, uid: str) -> None:
        """The job was removed."""
        self._jobs.pop(uid, None)

    def forget_revision(self) -> None:
        """Read everything again with the next beat."""
        self.rev = 0

    def cluster(self, now: float) -> Cluster:
        """The view at ``now``: served time goes on by our own clock, but never by more than one credit."""
        ahead = min(max(0.0, now - self._at), self._timing.credit)
        return Cluster(
            served=self._served + millis(ahead),
            nodes=dict(self._nodes),
            jobs=dict(self._jobs),
            lapsed=self._lapsed,
            timing=self._timing,
            next_lapse=self._next_lapse,
        )

    def node(self, name: str) -> NodeRecord | None:
        return self._nodes.get(name)

    def job(self, uid: str) -> JobRecord | None:
        return self._jobs.get(uid)
