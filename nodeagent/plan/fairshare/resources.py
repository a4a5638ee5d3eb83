"""How much of a cluster jobs use, and ask for: GPUs, nodes and CPU slots. Counts only; says nothing about who may have
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nodeagent.model.jobspec import JobSpec, Role
from nodeagent.model.world import Place
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.nodes.candidates import gpus_per_worker, workers_wanted
from nodeagent.plan.nodes.devices import Booked, Booking, booked


class Resources(NamedTuple):
    """Amounts, in the order of ``model.queue.RESOURCES``."""

    gpus: int = 0
    nodes: int = 0
    slots: int = 0

    def and_(self, other: Resources) -> Resources:
        """Both together."""
        gpus, nodes, slots = other
        return _made(Resources, (self[0] + gpus, self[1] + nodes, self[2] + slots))

    def less(self, other: Resources) -> Resources:
        """This without that."""
        gpus, nodes, slots = other
        return _made(Resources, (self[0] - gpus, self[1] - nodes, self[2] - slots))


_made = tuple.__new__
"""Sums are made for each job that waits: without the detour over ``Resources(...)`` one costs half."""
NOTHING = Resources()


def together(uses: Iterable[Resources]) -> Resources:
    """The sum."""
    total = NOTHING
    for use in uses:
        total = total.and_(use)
    return total


def of_devices(devices: Sequence[str]) -> Resources:
    """What a pod with these devices uses."""
    slots = sum(device.startswith("cpu") for device in devices)
    return Resources(len(devices) - slots, 1, slots)


def of_places(places: Mapping[str, Sequence[Place]]) -> Resources:
    """What a gang of several roles uses. ``places``: of each node."""
    return together(of_devices([device for place in here for device in place.devices]) for here in places.values())


@dataclass(frozen=True, slots=True)
class _Used:
    booked: Booked
    by_node: Mapping[str, tuple[tuple[str, Resources], ...]]
    by_job: Mapping[str, Resources]


def used(cluster: Cluster) -> Mapping[str, Resources]:
    """Job (uid) to what it holds, as a member or because it may still run there. The very same object for as long as no
    booking changes."""
    now = booked(cluster)
    return cluster.notes.once("used", (now,), lambda before: _used(now, before), len(now)).by_job


def _used(now: Booked, before: _Used | None) -> _Used:
    """Of a node whose bookings are what they were, the sums are too."""
    by_node: dict[str, tuple[tuple[str, Resources], ...]] = {}
    by_job: dict[str, Resources] = {}
    for node, bookings in now.items():
        if before is not None and before.booked.get(node) is bookings:
            by_node[node] = before.by_node[node]
        else:
            by_node[node] = _on_node(bookings)
        for uid, use in by_node[node]:
            mine = by_job.get(uid)
            by_job[uid] = use if mine is None else mine.and_(use)
    return _Used(now, by_node, by_job)


def _on_node(bookings: Sequence[Booking]) -> tuple[tuple[str, Resources], ...]:
    """A job that is a member and a holder of a node has it once."""
    devices: dict[str, dict[str, None]] = {}
    for uid, held in bookings:
        devices.setdefault(uid, {}).update(dict.fromkeys(held))
    return tuple((uid, of_devices([*held])) for uid, held in devices.items())


@dataclass(frozen=True, slots=True)
class Size:
    """What live nodes have, all together."""

    total: Resources
    installed: tuple[int, ...]
    """The numbers of GPUs that nodes have, ascending."""
    slots: int
    """The most CPU slots that a node has."""


def size(cluster: Cluster) -> Size:
    """Of the cluster. Sick GPUs and cordoned nodes count: they are a part of what is shared."""

    def look(before: Size | None) -> Size:
        live = [cluster.nodes[name].facts for name in cluster.nodes if cluster.live(name)]
        total = Resources(sum(len(facts.gpus) for facts in live), len(live), sum(facts.cpu_slots for facts in live))
        slots = max((facts.cpu_slots for facts in live), default=0)
        found = Size(total, tuple(sorted({len(facts.gpus) for facts in live})), slots)
        return before if before == found and before is not None else found

    return cluster.notes.once("size", (cluster.nodes, cluster.lapsed), look)


def place_use(role: Role, installed: int) -> Resources:
    """What a place of this role takes on a node with so many GPUs."""
    gpus, slots = devices_for(role, installed)
    return Resources(gpus, 1, slots)


def least(cluster: Cluster, spec: JobSpec) -> Resources:
    """What the job has to have to start, on the nodes of the cluster on which that is least."""
    known = size(cluster)
    counts = known.installed or (0,)
    if spec.several:  # places may share a node
        all_of = together(times(min(place_use(r, n) for n in counts), r.least) for r in spec.roles)
        alone = max((role.least for role in spec.roles if role.replicas is None), default=1)
        fewest = -(-all_of.gpus // max(1, counts[-1])), -(-all_of.slots // max(1, known.slots))
        return all_of._replace(nodes=max(alone, *fewest))
    return times(min(place_use(spec.role, n) for n in counts), spec.nodes.min)


def wanted(cluster: Cluster, spec: JobSpec, target: int) -> Resources:
    """What the job would have on so many nodes, on those with the most GPUs."""
    most = size(cluster).installed[-1:] or (0,)
    if spec.several:
        return together(times(place_use(r, most[0]), r.places) for r in spec.roles)
    return times(place_use(spec.role, most[0]), target)


def times(use: Resources, count: int) -> Resources:
    """So many of them."""
    return Resources(use.gpus * count, use.nodes * count, use.slots * count)


def devices_for(role: Role, installed: int) -> tuple[int, int]:
    """(GPUs, worker slots) that one place of the role takes on a node with so many GPUs."""
    workers, each = workers_wanted(role, installed), gpus_per_worker(role, installed)
    return (workers * each, 0) if each else (0, workers)
