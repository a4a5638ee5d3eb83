"""Which of the nodes that fit a job gets where its queues may not use as much as all of them take (a ceiling).

What the ceiling is, is ``fairshare/queues.py``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nodeagent.model.job import JobRecord
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.queues import Ceiling, full
from nodeagent.plan.fairshare.resources import NOTHING, Resources, of_devices, times, together
from nodeagent.plan.nodes.candidates import Candidate
from nodeagent.plan.placing.arranging import arrange
from nodeagent.plan.placing.topology import GangLayout, gang_of, parts


def allowed(
    cluster: Cluster, job: JobRecord, limit: Ceiling, able: Mapping[str, Candidate], target: int
) -> tuple[list[str], str]:
    """Of nodes that fit, the first preferred, those that the job's queues let it have, and why some are left out. Where
    it comes to too few so, those that take least."""
    uses, least = _uses(able), job.spec.nodes.min
    held = _in_groups(limit, ([node] for node in uses), uses, target)
    if len(held) < least:
        cheap = sorted(uses, key=lambda node: _cost(uses[node])[0])
        held = _in_groups(limit, ([node] for node in cheap), uses, target)
    left = uses.keys() - set(held)
    if len(held) >= target or not left:
        return held, ""
    more = times(min((uses[node] for node in left), key=_cost), max(1, least - len(held)))
    return held, full(cluster, job, _use_of(held, uses).and_(more))


def allowed_together(
    cluster: Cluster,
    job: JobRecord,
    limit: Ceiling,
    able: Mapping[str, Candidate],
    arranged_nodes: Sequence[str],
    target: int,
) -> tuple[list[str], str]:
    """Of a gang that is arranged those nodes that the job's queues let it have, and why some are left out. Fewer are
    arranged anew: a smaller gang may be closer together. Where it comes to too few so, those that take least."""
    gang, uses = gang_of(cluster, job.spec), _uses(able)
    held = _held_of(limit, gang.segment, arranged_nodes, uses)
    if len(held) == len(arranged_nodes) or len(arranged_nodes) < job.spec.nodes.min:
        return held, ""
    if len(held) >= job.spec.nodes.min:
        smaller = arrange(cluster, job, list(able), len(held))
        if len(smaller) == len(held) and limit.holds(together(uses[node] for node in smaller)):
            held = smaller
        return held, full(cluster, job, together(uses[node] for node in arranged_nodes))
    found = cheapest(limit, gang, uses, target, job.spec.nodes.min)
    if found.needs is not None:
        return held, full(cluster, job, found.needs)
    names = arrange(cluster, job, [node for node in able if node in found.nodes], len(found.nodes))
    more = "" if len(names) == target else full(cluster, job, together(uses[node] for node in arranged_nodes))
    return names, more


def _held_of(limit: Ceiling, segment: int, names: Sequence[str], uses: Mapping[str, Resources]) -> list[str]:
    """Those of an arranged gang that the ceiling allows, in its order; whole segments only."""
    size = max(segment, 1)
    return _in_groups(limit, (names[i : i + size] for i in range(0, len(names), size)), uses, len(names))


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The nodes on which a gang takes least."""

    nodes: frozenset[str]
    needs: Resources | None
    """What the smallest gang would take at least, where the ceiling allows none; None if it allows one, or there are
    too few nodes for one."""


def cheapest(limit: Ceiling, gang: GangLayout, uses: Mapping[str, Resources], want: int, least: int) -> Cheapest:
    """The largest gang of up to ``want`` of these nodes that the ceiling allows, those first that take least; in each
    domain that may hold it."""
    best: list[str] = []
    needs: Resources | None = None
    for groups in parts(sorted(uses, key=lambda n: _cost(uses[n])), gang):
        groups.sort(key=lambda group: _cost(_use_of(group, uses)))
        held = _in_groups(limit, groups, uses, want)
        if len(held) > len(best):
            best = held
        least_of = [node for group in groups for node in group][:least]
        if len(least_of) == least and (needs is None or _cost(_use_of(least_of, uses)) < _cost(needs)):
            needs = _use_of(least_of, uses)
    return Cheapest(frozenset(best), needs if len(best) < least else None)


def _in_groups(limit: Ceiling, groups: Iterable[Sequence[str]], uses: Mapping[str, Resources], want: int) -> list[str]:
    """All of a group, or nothing of it."""
    chosen: list[str] = []
    has = NOTHING
    for group in groups:
        if len(chosen) == want:
            break
        more = has.and_(_use_of(group, uses))
        if len(chosen) + len(group) <= want and limit.holds(more):
            chosen += group
            has = more
    return chosen


def _uses(able: Mapping[str, Candidate]) -> dict[str, Resources]:
    return {node: of_devices(one.devices) for node, one in able.items()}


def _use_of(nodes: Iterable[str], uses: Mapping[str, Resources]) -> Resources:
    return together(uses[node] for node in nodes)


def _cost(use: Resources) -> tuple[int, Resources]:
    return use.gpus + use.slots, use
