"""Which nodes a job gets: the gang as a whole or nothing. Survivors first, then those ready, up to the target."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from nodeagent.model.job import JobRecord
from nodeagent.model.world import Place
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.demand import NOTHING, of_devices, times, together
from nodeagent.plan.health import worn_nodes
from nodeagent.plan.membership import Candidate, candidates, ranked, survivors
from nodeagent.plan.places import Layout, Site, had_places, lay_out
from nodeagent.plan.share import NO_CEILING, Ceiling, ceiling, full, holdings


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice, and what was left out of it and why."""

    chosen: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    minimum: int
    target: int
    places: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)
    """Of a job of several roles: node to the places it gets."""
    lack: str = ""
    """Of a job of several roles: which place has no node. Then no node is chosen."""
    capped: str = ""
    """Why nodes that fit are left out: its queue, or one above it, may not use more."""

    @property
    def fits(self) -> bool:
        return len(self.chosen) >= self.minimum

    @property
    def pending(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.others if c.standing == "pending")

    @property
    def missing(self) -> str:
        """One sentence: how many are needed, how many fit, what is wrong with the rest."""
        text = self.lack or needs(self.minimum, len(self.chosen))
        if not self.others and not self.chosen and not self.capped:
            return text + ": no node has joined"
        return text + self._reasons()

    @property
    def short(self) -> str:
        """One phrase: how far it is from the target, and what is wrong with the nodes that are left out."""
        text = self.lack or f"{len(self.chosen)} of {self.target} nodes fit"
        return text + (self._reasons() or ", and there are no others")

    def _reasons(self) -> str:
        reasons = [text for text in (self.capped, *(c.why for c in self.others)) if text]
        more = f"; and {len(reasons) - 8} more" if len(reasons) > 8 else ""
        return ": " + "; ".join(reasons[:8]) + more if reasons else ""

    def outside(self) -> dict[str, str]:
        """Nodes left out for a reason, for the workers to know."""
        return {c.node: c.why for c in self.others if c.why}


def needs(minimum: int, fit: int) -> str:
    """How many nodes a job needs, and how many there are."""
    return f"needs {minimum} node{'s' if minimum > 1 else ''}, {fit} fit"


def choose(cluster: Cluster, job: JobRecord, target: int, without: Collection[str] = ()) -> Placement:
    """Choose up to ``target`` nodes, those scaled in by name last.

    A member that is live keeps its place even while its standby is being rebuilt: its pod is checked when it
    acknowledges.
    """
    if without:
        return _choose(cluster, job, target, without)
    of: tuple[object, ...] = (
        candidates(cluster, job), survivors(cluster, job), worn_nodes(cluster), job.control, job.spec,
    )  # fmt: skip
    if ceiling(cluster, job) is not NO_CEILING:
        of = (*of, cluster.queues, holdings(cluster))
    what = f"choose:{job.uid}:{target}"
    return cluster.notes.once(what, of, lambda _before: _choose(cluster, job, target, ()), len(cluster.nodes) // 8)


def _choose(cluster: Cluster, job: JobRecord, target: int, without: Collection[str]) -> Placement:
    members = {m.node for m in survivors(cluster, job)}
    everyone = {c.node: c for c in candidates(cluster, job)}
    limit = ceiling(cluster, job)
    limited = limit is not NO_CEILING
    chosen: list[Candidate] = []
    others: list[Candidate] = []
    for node in ranked(cluster, job, everyone):
        one = everyone[node]
        if node in members and one.standing == "pending":
            one = Candidate(one.node, one.life, "fit", "", one.devices, 0, one.joined)
        if one.standing == "fit" and node not in without and (job.spec.several or limited or len(chosen) < target):
            chosen.append(one)
        elif node in members or node not in without:
            others.append(one)
    if job.spec.several:
        return _share_out(cluster, job, chosen, others, target)
    capped = ""
    if limited:
        chosen, left, capped = _within(cluster, job, limit, chosen, target)
        others = [*left, *others]
    return Placement(tuple(chosen), tuple(others), job.spec.nodes.min, target, capped=capped)


def _within(
    cluster: Cluster, job: JobRecord, limit: Ceiling, able: list[Candidate], target: int
) -> tuple[list[Candidate], list[Candidate], str]:
    """Of nodes that fit, the first preferred, those that the job's queues let it have; the others; and why some of them
    are left out. Where it comes to too few so, those that take least."""
    chosen = _greedy(limit, able, target)
    if len(chosen) < job.spec.nodes.min:
        chosen = _greedy(limit, sorted(able, key=lambda one: len(one.devices)), target)
    names = {one.node for one in chosen}
    left = [one for one in able if one.node not in names]
    if len(chosen) >= target or not left:
        return chosen, left, ""
    has = together(of_devices(one.devices) for one in chosen)
    least = min((of_devices(one.devices) for one in left), key=lambda use: (use.gpus + use.slots, use))
    short = max(1, job.spec.nodes.min - len(chosen))
    return chosen, left, full(cluster, job, has.and_(times(least, short)))


def _greedy(limit: Ceiling, able: Iterable[Candidate], target: int) -> list[Candidate]:
    chosen: list[Candidate] = []
    has = NOTHING
    for one in able:
        more = has.and_(of_devices(one.devices))
        if len(chosen) < target and limit.holds(more):
            chosen.append(one)
            has = more
    return chosen


def lay(cluster: Cluster, job: JobRecord, able: Collection[Candidate]) -> Layout:
    """The places of a job of several roles on these candidates, the first preferred."""
    members = {m.node: m for m in survivors(cluster, job)}
    sites = [Site(c.node, cluster.nodes[c.node].facts, c.devices, had_places(members.get(c.node))) for c in able]
    return lay_out(job.spec.roles, sites)


def soon(cluster: Cluster, job: JobRecord) -> Layout:
    """Likewise on all that could take part as soon as they have got ready."""
    everyone = {c.node: c for c in candidates(cluster, job) if c.standing in ("fit", "pending")}
    return lay(cluster, job, [everyone[node] for node in ranked(cluster, job, everyone) if node in everyone])


def _share_out(
    cluster: Cluster, job: JobRecord, able: list[Candidate], others: list[Candidate], target: int
) -> Placement:
    """Every place of every role on those that are able, or none."""
    found = lay(cluster, job, able)
    chosen = [
        replace(one, devices=tuple(d for place in found.places[one.node] for d in place.devices))
        for one in able
        if one.node in found.places
    ]
    rest = [one for one in able if one.node not in found.places]
    total = together(of_devices(one.devices) for one in chosen)
    if capped := full(cluster, job, total):
        return Placement((), (*able, *others), job.spec.nodes.min, target, capped=capped)
    return Placement(tuple(chosen), (*rest, *others), job.spec.nodes.min, target, found.places, found.lack)
