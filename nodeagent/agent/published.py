"""What a node publishes: readiness for placement, states of its pods and its agent, their use of the machine, where
the agent is reached.

Must never scan all of /proc (a machine with many cores has thousands of kernel threads), nor read what makes the kernel
walk a process's memory. So psutil reads the machine but not the processes: it finds children by a scan, and gives the
time of a start by the wall clock, which steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

import psutil

from nodeagent.agent.context import AgentContext
from nodeagent.agent.failsafe import FailsafeWatch
from nodeagent.agent.machine import OwnMachine
from nodeagent.agent.membership import Membership
from nodeagent.agent.podroom import within_room as within_beat
from nodeagent.agent.reach import Reach
from nodeagent.agent.readiness import within_room
from nodeagent.agent.savedview import Saver
from nodeagent.agent.snapshot import Snapshot
from nodeagent.agent.view import AgentHealth
from nodeagent.model.facts import MachineUsage, PodUsage
from nodeagent.model.node import Notice, Readiness
from nodeagent.model.pod import PodState
from nodeagent.model.timing import millis
from nodeagent.model.world import BRIEF
from nodeagent.osutil.clock import Clock
from nodeagent.osutil.linux import family, proc_stat
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.pods.prepare import failed_here
from nodeagent.plan.pods.report import without_output
from nodeagent.pods.base import PodStatus
from nodeagent.store.messages import Note
from nodeagent.trust.certificate import vouch
from nodeagent.trust.key import ClusterKey


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


def kept_verdicts(cluster: Cluster, node: str, statuses: Mapping[str, PodStatus]) -> dict[str, Readiness]:
    """Job uid to the verdict of a check that failed here, of jobs that wait and have no pod here any more to look
    again (``plan/pods/prepare.py``): forgotten, it would be found anew, again and again."""
    record = cluster.nodes.get(node)
    if record is None:
        return {}
    found = {uid: ready for uid, ready in record.readiness.items() if ready.state == "unfit" and uid not in statuses}
    jobs = cluster.jobs
    return {uid: ready for uid, ready in found.items() if uid in jobs and failed_here(cluster, jobs[uid], node)}


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
        pod = PodState(
            uid=uid,
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
            unreachable=dict(unreachable.get(uid, {})),
        )
        out.append(pod)
    return within_beat(out, lambda uid: _owner(cluster, uid))


def agent_health(
    lease: Membership,
    failsafe: FailsafeWatch,
    saver: Saver,
    lag: float,
    now: float,
    waits: str,
    unreachable: Mapping[str, Mapping[str, float]],
) -> AgentHealth:
    """How the node's agent is doing; ``lag``: how late its last heartbeat was; ``waits``: whom the store waits for;
    ``unreachable``: as ``Reach`` has it."""
    bridged = failsafe.bridged
    return AgentHealth(
        joined=lease.joined,
        reason=lease.reason,
        lease_left=lease.left(now),
        beat_age=max(0.0, now - lease.beat_sent),
        store_away_since=lease.away_since,
        unread=dict(lease.unread),
        beyond=lease.beyond,
        store_unusable=lease.unusable,
        loop_lag=lag,
        lent={uid: end - now for uid, end in bridged.lent.items() if end > now},
        not_lent=bridged.refusals,
        unsaved=saver.trouble,
        store_waits=waits if lease.away_since is None else "",
        unreachable=unreachable,
    )


class Publisher:
    """Gives the lease what each beat carries of this node's pods, and sees when it is no more what was given last."""

    def __init__(self, context: AgentContext, lease: Membership, machine: OwnMachine, reach: Reach) -> None:
        self._node, self._host = context.node, context.host
        self._lease, self._machine, self._reach = lease, machine, reach
        self._unreachable = reach.unreachable
        self._ready: dict[str, Readiness] = {}
        self._checked: dict[str, Readiness] = {}
        self._published: dict[str, Readiness] = {}

    async def publish(self, cluster: Cluster) -> bool:
        """True if others wait for it: then a beat was sent, and the view may be another. Raises StoreUnavailableError
        and StoreRefusedError."""
        statuses, self._unreachable = self._host.status(), self._reach.unreachable
        self._ready = readiness(statuses) | kept_verdicts(cluster, self._node, statuses)
        self._checked = self._machine.checked(self._ready, cluster)
        brief = within_room(self._checked, statuses, lambda uid: _owner(cluster, uid))
        self._published = dated(brief, self._published, cluster.served)
        self.hold()
        pods = pod_states(cluster, self._node, statuses, self._unreachable)
        if not self._lease.publish(self._published, pods):
            return False
        await self._lease.beat()
        return True

    def hold(self) -> None:
        """Have the next beat, or join, say which devices are given to nobody."""
        kept = held(self._host.status())
        if kept != self._lease.facts.held:
            self._lease.facts = self._lease.facts.model_copy(update={"held": kept})

    def is_news(self, cluster: Cluster) -> bool:
        """The neighbours' watch or a check before a job's start has changed what is to be published."""
        if self._unreachable is not self._reach.unreachable:
            return True
        return self._machine.checked(self._ready, cluster) != self._checked


def _owner(cluster: Cluster, uid: str) -> int | None:
    job = cluster.jobs.get(uid)
    return job.owner if job is not None else None


MOST_NOTED = 64
NOTICE_STEP = 1.0
"""Seconds by which the served time of a notice's end may be wrong: served time stands while the store is away, and each
change goes to the store."""


class Advert:
    """The agent's own addresses, its node's health, and until when the node is there."""

    def __init__(
        self, node: str, cluster: str, key: ClusterKey, lease: Membership, clock: Clock, snapshot: Snapshot
    ) -> None:
        self._node, self._cluster, self._key, self._lease = node, cluster, key, lease
        self._clock, self._snapshot = clock, snapshot
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

    def peer(self, address: str) -> None:
        """Where the lease process is asked."""
        if address != self._lease.facts.peer:
            self._publish(peer=address)

    def vouch(self) -> None:
        """Sign the https address for the life that the node has now."""
        if self._https is not None:
            life = self._lease.incarnation.life
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
        found, now = self._lease.facts.health, self._clock.now()
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
        notice, now = self._lease.facts.notice, self._clock.now()
        if notice is None or not self._snapshot.complete:
            return
        until = max(1, self._snapshot.served(now) + millis(self._until - now))
        if not notice.until_served or abs(until - notice.until_served) > millis(NOTICE_STEP):
            self._publish(notice=notice.model_copy(update={"until_served": until}))

    def note(self, kind: str, text: str) -> None:
        """An event of this node, for the log; beyond ``MOST_NOTED`` that nobody took the oldest go."""
        self._lease.notes.append(Note(kind=kind, text=text))
        del self._lease.notes[:-MOST_NOTED]

    def _publish(self, **facts: object) -> None:
        self._lease.facts = self._lease.facts.model_copy(update=facts)


MOST_PROCESSES = 256
"""Processes of all pods together that are read in one measurement; those beyond it are not counted. What a pod leaves
of its part the next one has, of those that name more."""
SLACK = 2
"""Ticks by which the kernel's rounding may let a process seem to have started earlier."""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Meter:
    """Remembers the CPU time of each process since the measurement before."""

    def __init__(self) -> None:
        self._ticks: dict[int, tuple[int, int]] = {}
        """Process to (start time, CPU ticks)."""
        self._at = 0.0

    def measure(self, statuses: Mapping[str, PodStatus], now: float) -> dict[str, PodUsage]:
        """By job uid: of every pod that has a process. ``now`` is CLOCK_BOOTTIME."""
        roots = {uid: roots_of(status) for uid, status in statuses.items()}
        before, since = self._ticks, self._at
        self._ticks, self._at = {}, now
        if not any(roots.values()):
            return {}
        machine = machine_usage()
        found, left = {}, MOST_PROCESSES
        named = sorted((uid for uid in roots if roots[uid]), key=lambda uid: len(roots[uid]))
        for i, uid in enumerate(named):
            cpu = pages = count = 0
            pids = family(roots[uid], left // (len(named) - i))
            left -= len(pids)
            for pid in pids:
                try:
                    fields = proc_stat(f"/proc/{pid}/stat")
                except OSError:  # no descriptor to look with: not counted this time
                    continue
                if not fields:
                    continue
                ticks, start = int(fields[11]) + int(fields[12]), int(fields[19])
                self._ticks[pid] = (start, ticks)
                cpu += cpu_spent(start, ticks, before.get(pid), since)
                pages += int(fields[21])
                count += 1
            cores = round(cpu / _TICKS / (now - since), 2) if 0 < since < now else None
            found[uid] = PodUsage(cpu=cores, memory=pages * _PAGE, processes=count, machine=machine)
        return found


def cpu_spent(start: int, ticks: int, before: tuple[int, int] | None, since: float) -> int:
    """CPU ticks of a process since the measurement at ``since``: of one that was not seen then, all if it started
    after it, else (it is another pod's, or it was beyond the bound) none."""
    if before is not None and before[0] == start:
        return max(0, ticks - before[1])
    return ticks if start >= since * _TICKS - SLACK else 0


def roots_of(status: PodStatus) -> list[int]:
    """The processes of a pod that its shim tells of."""
    workers = [w.pid for w in status.workers if w.state != "exited"]
    return [pid for pid in (status.shim_pid, status.fork_server_pid, *workers) if pid]


def machine_usage() -> MachineUsage:
    """This machine now."""
    memory = psutil.virtual_memory()
    return MachineUsage(
        load=round(os.getloadavg()[0], 2),
        cpus=os.cpu_count() or 1,
        memory_used=max(0, memory.total - memory.available),
        memory_total=memory.total,
    )
