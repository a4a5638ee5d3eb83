"""The next world: which nodes, in which order, with which ranks. Ranks are a pure function of the last world and the
choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nodeagent.model.jobspec import Role
from nodeagent.model.node import NodeFacts
from nodeagent.model.world import Head, Member, Place
from nodeagent.plan.membership import Candidate, gpus_per_worker


def order_nodes(last: Head | None, chosen: Sequence[str]) -> list[str]:
    """The chosen nodes by new group rank. Survivors keep their order, and their very rank where the size allows;
    newcomers fill the holes.

    ``chosen`` names survivors and newcomers; newcomers are taken in the order given.
    """
    old = {m.node: m.group_rank for m in last.ordered()} if last is not None else {}
    stay = sorted((n for n in chosen if n in old), key=lambda n: old[n])
    new = [n for n in chosen if n not in old]
    out: list[str] = []
    size = len(chosen)
    for position in range(size):
        must = len(stay) == size - position  # no newcomer is left to fill a hole with
        if stay and (must or not new or old[stay[0]] <= position):
            out.append(stay.pop(0))
        else:
            out.append(new.pop(0))
    return out


def make_world(
    last: Head | None,
    chosen: Sequence[Candidate],
    role: Role,
    facts: Mapping[str, NodeFacts],
    places: Mapping[str, tuple[Place, ...]],
) -> dict[str, Member]:
    """Members of the next generation by node. ``places``: of a job of several roles, by node. Raises KeyError for a
    chosen node without facts."""
    by_node = {c.node: c for c in chosen}
    members: dict[str, Member] = {}
    first = 0
    for rank, node in enumerate(order_nodes(last, [c.node for c in chosen])):
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
