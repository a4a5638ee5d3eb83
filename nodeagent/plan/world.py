"""The next world: which nodes, in which order, with which ranks. Ranks are a pure function of the last world and the
choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nodeagent.model.jobspec import Role
from nodeagent.model.node import NodeFacts
from nodeagent.model.world import Head, Member, Place
from nodeagent.plan.membership import Candidate, gpus_per_worker
from nodeagent.plan.topology import Path


def order_nodes(
    last: Head | None, chosen: Sequence[str], paths: Mapping[str, Path] | None = None, segment: int = 0
) -> list[str]:
    """The chosen nodes by new group rank. Survivors keep their order, and their very rank where the size allows;
    newcomers fill the holes.

    ``chosen`` names survivors and newcomers; newcomers are taken in the order given, or with ``paths`` (where nodes are
    in the topology) each beside its neighbours. With ``segment``, ``chosen`` holds groups of so many one after another,
    which stay together.
    """
    old = {m.node: m.group_rank for m in last.ordered()} if last is not None else {}
    if not segment:
        return _fill(old, chosen, paths or {})
    groups = {chosen[i]: chosen[i : i + segment] for i in range(0, len(chosen), segment)}
    inside = {name: {n: old[n] % segment for n in group if n in old} for name, group in groups.items()}
    was = {name: min(old[n] for n in own) // segment for name, own in inside.items() if own}
    return [n for name in _fill(was, list(groups), {}) for n in _fill(inside[name], groups[name], {})]


def _fill(old: Mapping[str, int], chosen: Sequence[str], paths: Mapping[str, Path]) -> list[str]:
    stay = sorted((n for n in chosen if n in old), key=lambda n: old[n])
    new = [n for n in chosen if n not in old]
    out: list[str] = []
    size = len(chosen)
    for position in range(size):
        must = len(stay) == size - position  # no newcomer is left to fill a hole with
        if stay and (must or not new or old[stay[0]] <= position):
            out.append(stay.pop(0))
        else:
            out.append(new.pop(_neighbour(out[-1], new, paths) if out else 0))
    return out


def _neighbour(of: str, new: Sequence[str], paths: Mapping[str, Path]) -> int:
    """Which newcomer is nearest; of equals the first."""
    if len(new) == 1 or not (path := paths.get(of)):
        return 0
    for depth in range(len(path), 0, -1):
        if path[depth - 1]:
            for i, node in enumerate(new):
                if paths[node][:depth] == path[:depth]:
                    return i
    return 0


def make_world(
    last: Head | None,
    chosen: Sequence[Candidate],
    role: Role,
    facts: Mapping[str, NodeFacts],
    places: Mapping[str, tuple[Place, ...]],
    paths: Mapping[str, Path] | None = None,
    segment: int = 0,
) -> dict[str, Member]:
    """Members of the next generation by node. ``places``: of a job of several roles, by node. ``paths``, ``segment``:
    see ``order_nodes``. Raises KeyError for a chosen node without facts."""
    by_node = {c.node: c for c in chosen}
    members: dict[str, Member] = {}
    first = 0
    for rank, node in enumerate(order_nodes(last, [c.node for c in chosen], paths, segment)):
        one = by_node[node]
        here = places.get(node, ())
        per = gpus_per_worker(role, len(facts[node].gpus))
        workers = len(one.devices) // per if per else len(one.devices)
        if here:
            workers = sum(place.workers for place in here)
        members[node] = Member(
            node=node, life=one.life, group_rank=rank, first_rank=first, workers=workers, devices=one.devices,
            places=here,
        )  # fmt: skip
        first += workers
    return members
