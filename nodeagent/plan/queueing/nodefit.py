"""What jobs have on each node, and what a node has room for once one of them has gone: what the planner of transfers
looks up again and again. What a generation leaves counts as free.

Each answer is kept: the very same is asked of every job in line. Decides nothing about who gets a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Role
from nodeagent.model.world import Member
from nodeagent.plan.cluster import Cluster, in_order
from nodeagent.plan.fairshare.resources import Resources, of_devices, together
from nodeagent.plan.nodes.availability import takes, too_long
from nodeagent.plan.nodes.candidates import NodeKind, fits, kind_of, ruled_out, shape_of
from nodeagent.plan.nodes.devices import booked
from nodeagent.plan.nodes.health import takes_work
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.queueing.room import kinds


class NodeFit:
    """Of one view."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.used = _devices_used(cluster)
        """Node to the jobs (uids) whose newest generation has it, and the devices they have there."""
        works = kinds(cluster)
        self.nodes = [n for n in in_order(cluster) if n in works]
        """Those that take work, in natural order."""
        self._fit: dict[tuple[object, ...], bool] = {}
        self._kinds: dict[tuple[object, ...], int] = {}
        self._kind_of: dict[str, int] = {}
        """By job (uid): a number that jobs have in common that ask the same of a node."""
        self._suitable: dict[tuple[int, str, str], bool] = {}
        self._idle_kinds: Mapping[str, NodeKind] | None = None
        self._room: dict[tuple[object, ...], list[str]] = {}
        self._uses: dict[tuple[str, str], Resources] = {}
        """By job (uid) and node."""
        self._whole: dict[str, Resources] = {}
        """By job (uid): what it has on all of its nodes that are live."""

    def with_room(self, job: JobRecord) -> Sequence[str]:
        """Nodes that have room for one of the job's places as they are."""
        shapes, roles = tuple(shape_of(role) for role in job.spec.roles), job.spec.roles
        if shapes not in self._room:
            now = self._kinds_now()
            able = {kind: any(fits(role, kind) for role in roles) for kind in {*now.values()}}
            self._room[shapes] = [n for n, kind in now.items() if able[kind]]
        return self._room[shapes]

    def suits(self, job: JobRecord, node: str, donor: str) -> bool:
        """It may be one of the job's and has room for it, once the donor (uid), if there is one, has gone: all that is
        the same for jobs that ask the same."""
        kind = self._kind_of.get(job.uid)
        if kind is None:
            spec = job.spec
            shapes = tuple(shape_of(role) for role in spec.roles)
            asks = shapes, spec.within, takes(spec), spec.elastic or spec.spot
            kind = self._kind_of[job.uid] = self._kinds.setdefault(asks, len(self._kinds))
        key = kind, node, donor
        if key not in self._suitable:
            record = self._cluster.nodes[node]
            may = takes_work(self._cluster, node) and not ruled_out(job.spec, record)
            may = may and not too_long(job.spec, record)
            self._suitable[key] = may and any(self._has_room(role, node, donor) for role in job.spec.roles)
        return self._suitable[key]

    def _has_room(self, role: Role, node: str, donor: str) -> bool:
        key = shape_of(role), node, donor
        if key not in self._fit:
            self._fit[key] = fits(role, self._kind(node, donor))
        return self._fit[key]

    def _kinds_now(self) -> Mapping[str, NodeKind]:
        """What each node is like, without what generations leave there."""
        if self._idle_kinds is None:
            bookings, known, none = booked(self._cluster), kinds(self._cluster), dict[str, tuple[str, ...]]()
            self._idle_kinds = {
                n: known[n] if self.used.get(n, none) == dict(bookings.get(n, ())) else self._kind(n, "")
                for n in self.nodes
            }
        return self._idle_kinds

    def _kind(self, node: str, donor: str) -> NodeKind:
        """What the node is like once the donor (uid), if there is one, has gone."""
        taken = {d for uid, devices in self.used.get(node, {}).items() if uid != donor for d in devices}
        return kind_of(self._cluster.nodes[node], taken)

    def use_on(self, donor: JobRecord, node: str) -> Resources:
        """What a member of its gang has there."""
        assert donor.generation is not None
        key = donor.uid, node
        if key not in self._uses:
            self._uses[key] = of_devices(donor.generation.members[node].devices)
        return self._uses[key]

    def use_of_all(self, donor: JobRecord, members: Sequence[Member]) -> Resources:
        """What several members of its gang have."""
        if len(members) != len(survivors(self._cluster, donor)):
            return together(self.use_on(donor, m.node) for m in members)
        if donor.uid not in self._whole:
            self._whole[donor.uid] = together(self.use_on(donor, m.node) for m in members)
        return self._whole[donor.uid]


def _devices_used(cluster: Cluster) -> dict[str, dict[str, tuple[str, ...]]]:
    """Node to the jobs (uids) whose newest generation has it, and the devices they have there."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for job in cluster.jobs.values():
        if job.generation is not None and job.generation.state != "ended":
            for node, member in job.generation.members.items():
                found.setdefault(node, {})[job.uid] = member.devices
    return found
