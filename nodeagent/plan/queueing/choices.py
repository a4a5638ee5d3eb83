"""Which nodes a gang could have by some time, from what is free then: what a reservation is chosen from. Which job gets
one, and who has to leave it its nodes, is decided in ``reservations.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.nodes.candidates import Candidate, NodeKind, asked, kind_of, ruled_out
from nodeagent.plan.nodes.devices import booked
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.placing.roles import could_lay, count_on, lay
from nodeagent.plan.placing.topology import PastPlaces, gang_of, gather, most
from nodeagent.plan.queueing.departures import UNKNOWN, alike_for, departures, free_at, working_nodes
from nodeagent.plan.queueing.room import shut_for

MOST_TIMES = 8
"""Of so many times what is free by then is kept: one search looks at about as many, and the next at the same ones."""

PickFree = Callable[[int], Sequence[str]]
"""The nodes for a gang among those that are free by a served time; none where these are too few."""
Choices = tuple[Mapping[str, int], Callable[[int], bool], PickFree]
"""The served time at which each node is free; whether those that are free by a served time are enough; and which are
taken then."""


def of_one_role(cluster: Cluster, job: JobRecord, nodes: Sequence[str], taken: Collection[str]) -> Choices:
    spec, least = job.spec, job.spec.nodes.min
    times = free_at(cluster, job)
    free = {n: UNKNOWN if n in taken else times[n] for n in nodes if n in times}
    gang = gang_of(cluster, spec) if spec.placement is not None else None
    begun = asked(cluster).get(job.uid, {})

    def pick(until: int) -> Sequence[str]:
        able = [n for n, at in free.items() if at <= until]
        if (most(able, gang) if gang is not None else len(able)) < least:
            return ()
        # With a known start take the nodes that are free last; with an unknown one those that are free first, since
        # they are kept already.
        sign = 1 if until == UNKNOWN else -1
        able.sort(key=lambda n: (sign * free[n], n not in begun))
        if gang is None:
            return able[:least]
        border = UNKNOWN if until == UNKNOWN else 1
        groups = [[n for n in able if free[n] < border], [n for n in able if free[n] >= border]]
        return gather(groups[::sign], least, least, gang, PastPlaces(warm=frozenset(begun)))

    return free, lambda until: bool(pick(until)), pick


def of_places(cluster: Cluster, job: JobRecord, nodes: Sequence[str], taken: Collection[str]) -> Choices:
    """As ``of_one_role``, for a job of several roles. Each time at which devices of a node become free has a key of
    its own in the mapping."""
    leave, all_booked = departures(cluster, job), booked(cluster)
    left = {f"{n}/{uid}": leave[uid].at(n) for n in nodes for uid, _ in all_booked.get(n, ())}

    def able(until: int) -> list[_Free]:
        free = _free_by(cluster, job, until)
        return [free[n] for n in nodes if until == UNKNOWN or n not in taken]

    def pick(until: int) -> Sequence[str]:
        return tuple(lay(cluster, job, job.sized_before, [one.node for one in able(until)]).places)

    def enough(until: int) -> bool:
        if survivors(cluster, job):
            return bool(pick(until))
        found = able(until)
        room = count_on(cluster, job.sized_before, [(one.node.node, one.kind) for one in found]).room
        return could_lay(cluster, job, job.sized_before, [one.node for one in found]) if room is None else room

    return {"": 0, " ": UNKNOWN} | left, enough, pick


@dataclass(frozen=True, slots=True)
class _Free:
    """A node with what is free there at some time."""

    node: Candidate
    kind: NodeKind


def _free_by(cluster: Cluster, job: JobRecord, until: int) -> Mapping[str, _Free]:
    """Each node that takes work, with what is free there by then; the same for most jobs that wait."""
    own = job.uid if job.generation is not None else ""
    known: dict[int, dict[str, _Free]] = cluster.once(
        f"free by:{alike_for(cluster, job)}:{own}", lambda _before: {}, size=len(cluster.nodes)
    )
    if until not in known:
        if len(known) >= MOST_TIMES:
            known.clear()
        leave, all_booked, found = departures(cluster, job), booked(cluster), dict[str, _Free]()
        for name in working_nodes(cluster):
            node, bookings = cluster.nodes[name], all_booked.get(name, ())
            stay = [devices for uid, devices in bookings if uid != own and leave[uid].at(name) > until]
            used = {device for devices in stay for device in devices}
            devices = node.facts.devices()
            if used:
                devices = tuple(d for d in devices if d not in used)
            found[name] = _Free(Candidate(name, node.incarnation.life, "fit", "", devices), kind_of(node, used))
        known[until] = found
    return known[until]


def would_do(cluster: Cluster, job: JobRecord) -> Sequence[str]:
    """Nodes that would do if they were free."""
    spec = job.spec
    asks = spec.placement is not None or any(role.placement is not None for role in spec.roles)
    names: Sequence[str] = working_nodes(cluster)
    if shut := shut_for(cluster, spec):
        names = [n for n in names if n not in shut]
    return [n for n in names if not ruled_out(spec, cluster.nodes[n])] if asks else names
