"""Which nodes a job gets: the gang as a whole or nothing. Survivors first, then those ready, up to the target; no more
than the ceiling of its queues allows (``ceilings.py``), as they should lie (``arranging.py``), and of several roles a
node for each place (``roles.py``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from nodeagent.model.job import JobRecord
from nodeagent.model.world import Place
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import NO_CEILING, ceiling, full, holdings
from nodeagent.plan.fairshare.resources import of_places
from nodeagent.plan.nodes.candidates import Candidate, candidates, ranked
from nodeagent.plan.nodes.members import survivors
from nodeagent.plan.placing.arranging import arrange, arranged, looked_at
from nodeagent.plan.placing.ceilings import allowed, allowed_together
from nodeagent.plan.placing.places import Layout
from nodeagent.plan.placing.roles import lay, sizes_of, without_places
from nodeagent.plan.placing.topology import gang_of, most


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
    """Of a job of several roles: which place has no node. Then no node is chosen. Of nodes that have to be together:
    how many could be."""
    left: str = ""
    """Of a job of several roles: the first place of an elastic role that has no node, where others have."""
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

    def out_of_reach(self, lack: str = "") -> str:
        """Likewise where all that could get ready would be too few: none of them checks the job, and it does not wait
        for that. ``lack``: of a job of several roles, which place has no node even then."""
        if not lack and not self.pending:
            return self.missing
        text = lack or f"{self.lack or needs(self.minimum, len(self.chosen))}, {len(self.pending)} could get ready"
        return text + (f": {self.wrong}" if self.wrong else "")

    @property
    def wrong(self) -> str:
        """What is wrong with nodes that could not even get ready, and what caps the job; empty if nothing."""
        return self._named(c for c in self.others if c.standing != "pending")

    @property
    def short(self) -> str:
        """One phrase: how far it is from the target, and what is wrong with the nodes that are left out."""
        text = self.lack or self.left or f"{len(self.chosen)} of {self.target} nodes fit"
        return text + (self._reasons() or ("" if self.lack or self.left else ", and there are no others"))

    def _reasons(self) -> str:
        named = self._named(self.others)
        return f": {named}" if named else ""

    def _named(self, others: Iterable[Candidate]) -> str:
        ordered = sorted(others, key=lambda c: c.ruled_out)  # stable: what can be changed goes first
        reasons = [text for text in (self.capped, *(c.why for c in ordered)) if text]
        more = f"; and {len(reasons) - 8} more" if len(reasons) > 8 else ""
        return "; ".join(reasons[:8]) + more


def needs(minimum: int, fit: int) -> str:
    """How many nodes a job needs, and how many there are."""
    return f"needs {minimum} node{'s' if minimum > 1 else ''}, {fit} fit"


def choose(cluster: Cluster, job: JobRecord, target: int, without: Collection[str] = ()) -> Placement:
    """Choose up to ``target`` nodes, those scaled in by name last.

    A member that is live keeps its place even while its fork server is being rebuilt: its pod is checked when it
    acknowledges. Of a job of several roles ``target`` counts places: those that are wanted, or those before a
    scale-out.
    """
    if without:
        return _choose(cluster, job, target, without)
    of = looked_at(cluster, job)
    if ceiling(cluster, job) is not NO_CEILING:
        of = (*of, cluster.queues, holdings(cluster))
    what = f"choose:{job.uid}:{target}"
    return cluster.notes.once(what, of, lambda _before: _choose(cluster, job, target, ()), len(cluster.nodes) // 8)


def _choose(cluster: Cluster, job: JobRecord, target: int, without: Collection[str]) -> Placement:
    members = {m.node for m in survivors(cluster, job)}
    everyone = {c.node: c for c in candidates(cluster, job)}
    limit, together = ceiling(cluster, job), arranged(cluster, job.spec)
    limited = limit is not NO_CEILING
    able, others = dict[str, Candidate](), list[Candidate]()
    for node in ranked(cluster, job, everyone):
        one = everyone[node]
        if node in members and one.standing == "pending":
            one = Candidate(one.node, one.life, "fit", "", one.devices, 0, one.joined)
        chooses = job.spec.several or together or limited or len(able) < target
        if one.standing == "fit" and node not in without and chooses:
            able[node] = one
        elif node in members or node not in without:
            others.append(one)
    if job.spec.several:
        return _share_out(cluster, job, [*able.values()], others, target)
    names, lack, capped, least = [*able], "", "", job.spec.nodes.min
    if together:
        names = arrange(cluster, job, names, target)
        if limited:
            names, capped = allowed_together(cluster, job, limit, able, names, target)
        want = least if len(names) < least else target
        if not capped and len(names) < min(want, len(able)):
            lack = _scattered(cluster, job, able, want)
    elif limited:
        names, capped = allowed(cluster, job, limit, able, target)
    chosen = tuple(able.pop(node) for node in names)
    return Placement(chosen, (*able.values(), *others), least, target, lack=lack, capped=capped)


def _scattered(cluster: Cluster, job: JobRecord, able: Collection[str], want: int) -> str:
    """What a gang lacks that would have more nodes, were they together."""
    gang, spec = gang_of(cluster, job.spec), job.spec
    if spec.segments and not gang.levels:
        return "needs a topology in the agents' config to have segments"
    where = f" in one {spec.within}" if spec.within else ""
    where += f" in segments of {spec.segments}" if spec.segments else ""
    return f"needs {want} nodes{where}, {len(able)} fit, of which {most(able, gang)} are together"


def _share_out(
    cluster: Cluster, job: JobRecord, able: list[Candidate], others: list[Candidate], target: int
) -> Placement:
    """Every place of every role on those that are able, or none; of elastic roles as many as fit, and as the job's
    queues let it have."""
    spec = sizes_of(job, target)
    least, tried = spec.nodes.min, dict[int, tuple[Layout, str]]()

    def fits(fewer: int) -> bool:
        found = lay(cluster, job, without_places(spec, fewer), able)
        tried[fewer] = found, full(cluster, job, of_places(found.places))
        return not tried[fewer][1]

    most = sum(role.places - role.least for role in spec.roles)
    fewer = 0 if fits(0) or not most else bisect_left(range(most), True, key=fits)
    if fewer not in tried:
        fits(fewer)
    found, capped = tried[fewer]
    if capped:
        return Placement((), (*able, *others), least, target, capped=capped)
    chosen = [
        replace(one, devices=tuple(d for place in found.places[one.node] for d in place.devices))
        for one in able
        if one.node in found.places
    ]
    rest = [one for one in able if one.node not in found.places]
    left, limit = found.left, tried[0][1] if fewer else ""
    return Placement(tuple(chosen), (*rest, *others), least, target, found.places, found.lack, left, limit)
