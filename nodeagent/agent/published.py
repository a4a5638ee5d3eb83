"""What a node publishes with its beats: readiness for placement, states of its pods, what is known of its health, where
its agent is reached.

Looks at nothing by itself: what is published it is given, or the pods' host has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from nodeagent.agent.context import AgentContext
from nodeagent.agent.membership import Membership
from nodeagent.agent.reach import Reach
from nodeagent.agent.room import pods_within_room, readiness_within_room
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.node import Notice, Readiness
from nodeagent.model.pod import PodState
from nodeagent.model.timing import millis
from nodeagent.model.world import BRIEF
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.nodes.candidates import asked
from nodeagent.plan.pods.prepare import failed_here
from nodeagent.plan.pods.report import without_output
from nodeagent.pods.base import PodStatus
from nodeagent.store.messages import Note
from nodeagent.trust.certificate import vouch
from nodeagent.trust.key import ClusterKey
from nodeagent.trust.seal import LIFETIME


def readiness(statuses: Mapping[str, PodStatus]) -> dict[str, Readiness]:
    """Job uid to readiness, which everybody may read. A stuck pod makes the node unfit for the job; its devices are
    kept from all others, too (``held``)."""
    out: dict[str, Readiness] = {}
    for uid, status in statuses.items():
        reason, output = without_output(status.reason)
        if status.phase in ("unknown", "preparing", "gone"):
            out[uid] = Readiness(state="preparing", reason=reason, folder=status.folder)
        elif status.phase in ("unfit", "stuck"):
            out[uid] = Readiness(
                state="unfit", reason=reason, error=output[:BRIEF], code=status.code, passing=status.passing
            )
        elif status.portless:
            out[uid] = Readiness(
                state="unfit", reason=status.portless, passing=True, portless=True, folder=status.folder
            )  # fmt: skip
        else:
            out[uid] = Readiness(state="ready", folder=status.folder, warming=status.warming)
    return out


def held(statuses: Mapping[str, PodStatus]) -> dict[str, str]:
    """As ``NodeFacts.held``."""
    return {device: uid for uid, status in sorted(statuses.items()) for device in status.held}


def dated(found: Mapping[str, Readiness], before: Mapping[str, Readiness], served: int) -> dict[str, Readiness]:
    """``found`` with the times of its states: that of ``before`` where the state is the same, else ``served``."""
    out = {}
    for uid, ready in found.items():
        old = before.get(uid)
        since = old.since if old is not None and old.state == ready.state else served
        out[uid] = ready.model_copy(update={"since": since})
    return out


def standing_verdicts(cluster: Cluster, node: str, statuses: Mapping[str, PodStatus]) -> dict[str, Readiness]:
    """Job uid to the verdict of a check that failed here, of jobs that wait and have no pod here any more to look
    again (``plan/pods/prepare.py``): forgotten, it would be found anew, again and again."""
    record = cluster.nodes.get(node)
    if record is None:
        return {}
    unfit = {uid: ready for uid, ready in record.readiness.items() if ready.state == "unfit" and not ready.clock}
    found = {uid: ready for uid, ready in unfit.items() if uid not in statuses}
    jobs = cluster.jobs
    return {uid: ready for uid, ready in found.items() if uid in jobs and failed_here(cluster, jobs[uid], node)}


def refused_by_clock(cluster: Cluster, node: str) -> dict[str, Readiness]:
    """Job uid to why this node takes no part in it, of jobs that it refuses by what its clock shows. Not of a job whose
    signature may have expired in truth."""
    out = {}
    for uid, refusal in cluster.refused.items():
        job = cluster.jobs.get(uid)
        if job is None or job.phase in TERMINAL or job.admission is None or refusal.kind not in ("early", "expired"):
            continue
        if job.generation is not None and node in job.generation.members:
            continue
        if refusal.kind == "expired" and not _lives(cluster, job, node):
            continue
        seen = "from the future" if refusal.kind == "early" else "too old"
        by = "this node itself" if job.admission.by == node else job.admission.by
        why = f"as its clock has it, the job's signature, by {by}, is {seen}: one of the two clocks is hours off"
        out[uid] = Readiness(state="unfit", reason=f"{why} (timedatectl)", passing=True, clock=True)
    return out


def _lives(cluster: Cluster, job: JobRecord, node: str) -> bool:
    """By no clock of this machine's: it has not been here for as long as a signature holds, or others take part."""
    young = job.phase == "queued" and cluster.served - job.since < millis(LIFETIME)
    others = ((name, ready) for name, ready in asked(cluster).get(job.uid, {}).items() if name != node)
    return young or any(ready.state != "unfit" and cluster.live(name) for name, ready in others)


def pod_states(
    cluster: Cluster,
    node: str,
    statuses: Mapping[str, PodStatus],
    unreachable: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> tuple[PodState, ...]:
    """The node's pods as published under TTL keys, by job uid. ``unreachable``: as ``Reach`` has it."""
    out = []
    for uid, status in sorted(statuses.items()):
        job = cluster.jobs.get(uid)
        if job is None:
            continue
        out.append(pod_state(job, node, status, unreachable.get(uid, {})))
    return pods_within_room(out, lambda uid: _owner(cluster, uid))


def pod_state(job: JobRecord, node: str, status: PodStatus, unreachable: Mapping[str, float]) -> PodState:
    """The node's pod of this job, as it is published."""
    return PodState(
        uid=job.uid,
        job=job.name,
        role=job.role_names_on(node),
        node=node,
        phase=status.phase,
        reason=status.reason or status.refused,
        generation=status.generation.number if status.generation is not None else 0,
        shim_pid=status.shim_pid,
        fork_server_pid=status.fork_server_pid,
        preforked=len(status.preforked),
        preforked_memory=sum(status.preforked.values()),
        workers=status.workers,
        snapshot_bytes=status.snapshot_bytes,
        unreachable=dict(unreachable),
    )


Checked = Callable[[dict[str, Readiness], Cluster], dict[str, Readiness]]
"""Readiness by job uid, as it is with the checks before a job's start in it."""


def unchecked(found: dict[str, Readiness], _cluster: Cluster) -> dict[str, Readiness]:
    """Nothing is checked before a job's start."""
    return found


class Publisher:
    """Gives the lease what each beat carries of this node's pods, and sees when it is no more what was given last."""

    def __init__(self, context: AgentContext, membership: Membership, checked: Checked, reach: Reach) -> None:
        self._node, self._host = context.node, context.host
        self._membership, self._check, self._reach = membership, checked, reach
        self._unreachable = reach.unreachable
        self._ready: dict[str, Readiness] = {}
        self._checked: dict[str, Readiness] = {}
        self._published: dict[str, Readiness] = {}

    async def publish(self, cluster: Cluster) -> bool:
        """True if others wait for it: then a beat was sent, and the view may be another. Raises StoreUnavailableError
        and StoreRefusedError."""
        statuses, self._unreachable = self._host.status(), self._reach.unreachable
        self._ready = readiness(statuses) | standing_verdicts(cluster, self._node, statuses)
        self._ready |= refused_by_clock(cluster, self._node)
        self._checked = self._check(self._ready, cluster)
        brief = readiness_within_room(self._checked, statuses, lambda uid: _owner(cluster, uid))
        self._published = dated(brief, self._published, cluster.served)
        self.hold()
        pods = pod_states(cluster, self._node, statuses, self._unreachable)
        if not self._membership.publish(self._published, pods):
            return False
        await self._membership.beat()
        return True

    def hold(self) -> None:
        """Have the next beat, or join, say which devices are given to nobody."""
        now = held(self._host.status())
        if now != self._membership.facts.held:
            self._membership.facts = self._membership.facts.model_copy(update={"held": now})

    def is_news(self, cluster: Cluster) -> bool:
        """The neighbours' watch or a check before a job's start has changed what is to be published."""
        if self._unreachable is not self._reach.unreachable:
            return True
        return self._check(self._ready, cluster) != self._checked


def _owner(cluster: Cluster, uid: str) -> int | None:
    job = cluster.jobs.get(uid)
    return job.owner if job is not None else None


MOST_NOTED = 64
NOTICE_STEP = 1.0
"""Seconds by which the served time of a notice's end may be wrong: served time stands while the store is away, and each
change goes to the store."""


class Advert:
    """The agent's own addresses, its node's health, and until when the node is there."""

    def __init__(self, context: AgentContext, membership: Membership, cluster: str, key: ClusterKey) -> None:
        """``cluster``: its name."""
        self._node, self._clock, self._snapshot = context.node, context.clock, context.snapshot
        self._membership, self._cluster, self._key = membership, cluster, key
        self._https: tuple[str, str] | None = None
        self._until = 0.0
        """When (our clock) the machine is taken away, if there is a notice."""
        self._began: dict[tuple[str, str, float], int] = {}
        """By rule, device and Unix time of a verdict: the served time that it was published with."""

    def http(self, url: str) -> None:
        """Where health and metrics are to be found."""
        self._publish(http=url)

    def https(self, url: str, certificate: str) -> None:
        """Where others are served over https, by this certificate."""
        self._https = (url, certificate)
        self.vouch()

    def address(self, address: str, gloo: str | None) -> None:
        """Where the node is reached, and the interface that gloo has to be given."""
        self._publish(address=address, gloo_interface=gloo)

    def peer(self, address: str) -> None:
        """Where the lease process is asked."""
        if address != self._membership.facts.peer:
            self._publish(peer=address)

    def vouch(self) -> None:
        """Sign the https address for the life that the node has now."""
        if self._https is not None:
            life = self._membership.incarnation.life
            self._publish(https=vouch(self._key, self._cluster, self._node, life, *self._https))

    def restarts(self, since: float) -> None:
        """No agent is there from this Unix time on, until its next start."""
        self._publish(restarting=since, http="")

    def health(self, facts: Mapping[str, object]) -> None:
        """What is known of the node's health."""
        self._publish(**facts)
        self.date_health()

    def date_health(self) -> None:
        """Have the next beat give the served time at which each verdict began, by how old it is for our wall clock:
        that may be wrong, and is compared with no other's."""
        found, now = self._membership.facts.health, self._clock.now()
        if not self._snapshot.complete or all(verdict.since_served is not None for verdict in found):
            return
        served, wall, before = self._snapshot.served(now), self._clock.wall(), self._began
        self._began = {}
        for verdict in found:
            what = (verdict.rule, verdict.device, verdict.since)
            age = millis(max(0.0, wall - verdict.since))
            known = before.get(what)
            self._began[what] = known if known is not None and known <= served else served - age
        dated = (v.model_copy(update={"since_served": self._began[v.rule, v.device, v.since]}) for v in found)
        self._publish(health=tuple(dated))

    def notice(self, notice: Notice | None) -> None:
        """The machine is being taken away; None: it is not. It is there for as long as our wall clock says now: that
        may be wrong, and is compared with no other's."""
        if notice is not None:
            self._until = self._clock.now() + notice.until - self._clock.wall()
        self._publish(notice=notice)
        self.date_notice()

    def date_notice(self) -> None:
        """Have the next beat give the notice's end in served time, where what was given is not right any more."""
        notice, now = self._membership.facts.notice, self._clock.now()
        if notice is None or not self._snapshot.complete:
            return
        until = max(1, self._snapshot.served(now) + millis(self._until - now))
        if not notice.until_served or abs(until - notice.until_served) > millis(NOTICE_STEP):
            self._publish(notice=notice.model_copy(update={"until_served": until}))

    def note(self, kind: str, text: str) -> None:
        """An event of this node, for the log; beyond ``MOST_NOTED`` that nobody took the oldest go."""
        self._membership.notes.append(Note(kind=kind, text=text))
        del self._membership.notes[:-MOST_NOTED]

    def _publish(self, **facts: object) -> None:
        self._membership.facts = self._membership.facts.model_copy(update=facts)
