"""Which devices of a node jobs hold, as members of a generation not ended, or because they may still run there; and
which of a node's free GPUs a job gets that does not take them all.

A job keeps those that it has; then it gets such as are near each other, so that their traffic stays on one NUMA node,
with the network card and the cores there. Says nothing about which job may have them next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Gpu
from nodeagent.model.world import Generation
from nodeagent.plan.cluster import Cluster, SeenNodes, changed, seen

Booking = tuple[str, tuple[str, ...]]
"""A job (uid) and the devices it holds."""
Booked = Mapping[str, Sequence[Booking]]
"""Node to the jobs that hold devices there."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What one job holds, as of this generation."""

    generation: Generation | None
    held: Mapping[str, tuple[Booking, ...]]


@dataclass(frozen=True, slots=True)
class _AllHeld:
    seen: SeenNodes
    jobs: Mapping[str, _Held]
    found: Booked


def booked(cluster: Cluster) -> Booked:
    """The very same object for as long as no booking changes."""
    return cluster.once("booked", lambda before: _booked(cluster, before)).found


def changed_bookings(cluster: Cluster, before: Booked) -> Iterable[str]:
    """Nodes whose bookings are not what they were."""
    now = booked(cluster)
    return () if now is before else cluster.notes.once("rebooked", (now, before), lambda _old: _differ(now, before))


def used_devices(all_booked: Booked, node: str, by_others_than: str) -> frozenset[str]:
    """Devices of a node that other jobs hold."""
    jobs = all_booked.get(node)
    return frozenset(d for uid, devices in jobs if uid != by_others_than for d in devices) if jobs else frozenset()


def _booked(cluster: Cluster, before: _AllHeld | None) -> _AllHeld:
    """Of a job whose generation, and whose nodes, are what they were, the bookings are too."""
    news = changed(cluster, before.seen) if before is not None else None
    if before is None or news is None:
        jobs = {uid: _Held(job.generation, _of(cluster, job)) for uid, job in cluster.jobs.items()}
        return _AllHeld(seen(cluster), jobs, _together(jobs.values()))
    jobs, found = {}, dict(before.found)
    touched = False
    for uid, job in cluster.jobs.items():
        last = before.jobs.get(uid)
        if last is not None and last.generation is job.generation and not _anywhere(job.generation, news):
            jobs[uid] = last
            continue
        held = _of(cluster, job)
        old = last.held if last is not None else {}
        jobs[uid] = _Held(job.generation, held)
        touched |= _rebook(found, uid, old, held)
    for uid in before.jobs.keys() - cluster.jobs.keys():
        touched |= _rebook(found, uid, before.jobs[uid].held, {})
    return _AllHeld(seen(cluster), jobs, found if touched else before.found)


def _anywhere(generation: Generation | None, nodes: frozenset[str]) -> bool:
    return generation is not None and any(n in generation.members or n in generation.holders for n in nodes)


def _of(cluster: Cluster, job: JobRecord) -> dict[str, tuple[Booking, ...]]:
    generation = job.generation
    if generation is None:
        return {}
    held: dict[str, tuple[Booking, ...]] = {}
    for node, member in generation.members.items() if generation.state != "ended" else ():
        # a node that is back in another life: the store keeps the booking until the job re-forms
        if cluster.live(node) or not cluster.gone(node, member.life):
            held[node] = ((job.uid, member.devices),)
    for node, holder in generation.holders.items():
        if not cluster.gone(node, holder.life):
            held[node] = (*held.get(node, ()), (job.uid, holder.devices))
    return held


def _together(jobs: Iterable[_Held]) -> dict[str, Sequence[Booking]]:
    found: dict[str, Sequence[Booking]] = {}
    for job in jobs:
        for node, bookings in job.held.items():
            found[node] = (*found.get(node, ()), *bookings)
    return found


def _rebook(
    found: dict[str, Sequence[Booking]], uid: str, old: Mapping[str, object], new: Mapping[str, tuple[Booking, ...]]
) -> bool:
    """Put what a job holds now in the place of what it held; false if that is the same."""
    nodes = [n for n in {**old, **new} if old.get(n) != new.get(n)]
    for node in nodes:
        others = tuple(b for b in found.get(node, ()) if b[0] != uid)
        bookings = (*others, *new.get(node, ()))
        if bookings:
            found[node] = bookings
        else:
            found.pop(node, None)
    return bool(nodes)


def _differ(now: Booked, before: Booked) -> list[str]:
    return [n for n, b in now.items() if before.get(n) is not b] + [n for n in before if n not in now]


def pick(free: Sequence[Gpu], count: int, held: Collection[str] = ()) -> tuple[str, ...]:
    """UUIDs of so many of these, by index. ``held``: those that the job has now, which it keeps."""
    if len(free) <= count:
        return tuple(gpu.uuid for gpu in sorted(free, key=_index))
    chosen = [gpu for gpu in sorted(free, key=_index) if gpu.uuid in held][:count]
    rest = [gpu for gpu in sorted(free, key=_index) if gpu.uuid not in held]
    near: dict[int | None, list[Gpu]] = {}
    for gpu in rest:
        near.setdefault(gpu.numa, []).append(gpu)
    begun = {gpu.numa for gpu in chosen}
    while near and len(chosen) < count:
        lack = count - len(chosen)
        # Where it is already; else where all have room, with the fewest left over; else where most are.
        numa = min(
            near, key=lambda n: (n not in begun, len(near[n]) < lack, abs(len(near[n]) - lack), near[n][0].index)
        )
        chosen += near.pop(numa)[:lack]
        begun.add(numa)
    return tuple(gpu.uuid for gpu in sorted(chosen, key=_index))


def _index(gpu: Gpu) -> int:
    return gpu.index
