"""What the ceiling of a job's queues leaves of nodes that would do, where it matters how they lie to each other. Who
would do is ``membership.py``'s, how a gang lies best ``topology.py``'s, and what a ceiling is ``share.py``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nodeagent.plan.demand import NOTHING, Resources, together
from nodeagent.plan.share import Ceiling
from nodeagent.plan.topology import GangLayout, parts


def held_of(limit: Ceiling, segment: int, names: Sequence[str], uses: Mapping[str, Resources]) -> list[str]:
    """Those of an arranged gang that the ceiling allows, in its order; whole segments only."""
    size = max(segment, 1)
    return _greedy(limit, (names[i : i + size] for i in range(0, len(names), size)), uses, len(names))


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
        groups.sort(key=lambda group: _cost(_of(group, uses)))
        held = _greedy(limit, groups, uses, want)
        if len(held) > len(best):
            best = held
        least_of = [node for group in groups for node in group][:least]
        if len(least_of) == least and (needs is None or _cost(_of(least_of, uses)) < _cost(needs)):
            needs = _of(least_of, uses)
    return Cheapest(frozenset(best), needs if len(best) < least else None)


def _greedy(limit: Ceiling, groups: Iterable[Sequence[str]], uses: Mapping[str, Resources], want: int) -> list[str]:
    """All of a group, or nothing of it."""
    chosen: list[str] = []
    has = NOTHING
    for group in groups:
        more = has.and_(_of(group, uses))
        if len(chosen) + len(group) <= want and limit.holds(more):
            chosen += group
            has = more
    return chosen


def _of(nodes: Iterable[str], uses: Mapping[str, Resources]) -> Resources:
    return together(uses[node] for node in nodes)


def _cost(use: Resources) -> tuple[int, Resources]:
    return use.gpus + use.slots, use
