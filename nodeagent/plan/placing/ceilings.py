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


def _together_within(
    cluster: Cluster,
    job: JobRecord,
    limit: Ceiling,
    able: Mapping[str, Candidate],
    arranged_nodes: Sequence[str],
    target: int,
) -> tuple[list[str], str]:
    """Of a gang that is arranged those nodes that the job's queues let it have, and why some are left out. Fewer are
    arranged anew: a smaller gang may be closer together. Where it comes to too few so, those that take least."""
    gang, uses = gang_of(cluster, job.spec), {node: of_devices(one.devices) for node, one in able.items()}
    held = held_of(limit, gang.segment, arranged_nodes, uses)
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


def held_of(limit: Ceiling, segment: int, names: Sequence[str], uses: Mapping[str, Resources]) -> list[str]:
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
        more = has.and_(_use_of(group, uses))
        if len(chosen) + len(group) <= want and limit.holds(more):
            chosen += group
            has = more
    return chosen


def _use_of(nodes: Iterable[str], uses: Mapping[str, Resources]) -> Resources:
    return together(uses[node] for node in nodes)


def _cost(use: Resources) -> tuple[int, Resources]:
    return use.gpus + use.slots, use
