"""Who may still run workers, and what devices they have, in the twin.

The twin of ``scripts/_holders.lua``. A holder is a life that may still run workers of an older generation: a member
of a head that was active, until it acknowledges, leaves, is declared lost or is replaced by another life. Must never
decide whether a step is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable

from nodeagent.model.job import JobRecord, Phase
from nodeagent.model.world import Head, Holder, Member
from nodeagent.store.twin.state import State


def retire(s: State, node: str, *, lives_on: str = "", but: str = "") -> None:
    """A life of this node has ended (left, lost, replaced): take it out of the holders of every job.

    ``lives_on`` is the life that goes on, ``but`` a job (uid) to leave alone.
    """
    for uid in sorted(set(s.alloc.get(node, {}).values()) - {but}):
        job = s.jobs.get(uid)
        if job is None or job.head is None or node not in job.head.holders or job.head.holders[node].life == lives_on:
            continue
        holders = {n: h for n, h in job.head.holders.items() if n != node}
        after = job.model_copy(update={"head": job.head.model_copy(update={"holders": holders})})
        rebook(s, job, after)
        settled(s, after)


def still_held(s: State, job: JobRecord) -> list[str]:
    """Nodes that may still run workers of an ended job, then those that may lend them time."""
    holders = job.head.holders if job.head else {}
    # Since it ended no member has renewed: whoever has asked its keepers for time began before.
    ended = job.since + s.lease_ms
    keepers = sorted(node for node in job.keepers if max(s.lease.get(node, 0), ended) > s.served - s.limit_ms)
    return sorted(node for node, holder in holders.items() if not s.gone(node, holder.life)) + keepers


def release_keepers(s: State, node: str) -> None:
    """This node will never lend again: nobody can, under the keepers that it was one of."""
    for uid in list(s.names.values()):
        job = s.jobs.get(uid)
        if job is not None and node in job.keepers:
            s.save_job(job.model_copy(update={"keepers": {}}))


def lives_of(head: Head | None, node: str) -> set[str]:
    """The lives of a node that the head names, as member or holder."""
    if head is None:
        return set()
    found: tuple[Member | Holder | None, ...] = (head.members.get(node), head.holders.get(node))
    return {entry.life for entry in found if entry is not None}


def declare_lost(s: State, job: JobRecord, lost: Iterable[str], by: str) -> None:
    """Mark the lives that the head names lost for ever, where they are still their node's."""
    for node in sorted(set(lost)):
        record = s.nodes.get(node)
        if record is None or record.lost or record.left or record.incarnation.life not in lives_of(job.head, node):
            continue
        s.save_node(record.model_copy(update={"lost": True}))
        s.event("NodeLost", node=node, by=by, text=f"node {node} was silent for its whole lease")
        retire(s, node, but=job.uid)


def next_holders(s: State, job: JobRecord, lost: Iterable[str]) -> dict[str, Holder]:
    """Who may still run workers once the head is superseded or ended."""
    head = job.head
    if head is None:
        return {}
    found = dict(head.holders)
    if head.state == "active":
        found |= {n: Holder(life=m.life, devices=m.devices) for n, m in head.members.items()}
    out = {}
    for node, holder in found.items():
        record = s.nodes.get(node)
        if node in lost or (record is None and s.buried(f"node:{node}")):
            continue
        if record is not None and (record.incarnation.life != holder.life or record.lost or record.left):
            continue
        out[node] = holder
    return out


def enter_phase(s: State, job: JobRecord, phase: Phase, reason: str) -> JobRecord:
    """The job in this phase; ``since`` only changes with the phase."""
    since = job.since if job.phase == phase else s.served
    return job.model_copy(update={"phase": phase, "reason": reason, "since": since})


def settled(s: State, job: JobRecord) -> JobRecord:
    """Write the job; with the last holder gone, pausing has become paused."""
    head = job.head
    if job.phase != "pausing" or head is None or head.holders:
        return s.save_job(job)
    job = s.save_job(enter_phase(s, job, "paused", job.reason))
    s.event("JobPaused", job=job, generation=head.number, text=job.reason)
    return job


def rebook(s: State, before: JobRecord, after: JobRecord) -> None:
    """Book what the head's members and holders have, on every node that either version names."""
    nodes: set[str] = set()
    for job in (before, after):
        if job.head is not None:
            nodes |= set(job.head.members) | set(job.head.holders)
    head = after.head
    for node in nodes:
        devices: set[str] = set()
        if head is not None and head.state != "ended" and node in head.members:
            devices |= set(head.members[node].devices)
        if head is not None and node in head.holders:
            devices |= set(head.holders[node].devices)
        s.book(node, after.uid, frozenset(devices))
