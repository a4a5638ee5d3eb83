"""Whether the places of a job of several roles have room, by a count of what is free, and what they take. Of hundreds
of jobs that wait hardly any needs more: the layout itself (``places.py``) costs as much as there are places and nodes.

Answers only what is certain for whatever layout: where it is not, the places have to be laid out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nodeagent.model.jobspec import Role
from nodeagent.plan.fairshare.resources import Resources, devices_for
from nodeagent.plan.nodes.candidates import Kinds, NodeKind


class _Amount(NamedTuple):
    """Of one resource, GPUs or CPU slots."""

    fewest: int
    """That a place takes, on the node on which it takes the fewest."""
    most: int
    spare: tuple[tuple[int, int], ...]
    """How much others have to take of a node before it has no room for a place, and how many such nodes there are;
    ascending. Of those on which a place takes this resource."""


@dataclass(frozen=True, slots=True)
class RoleRoom:
    """What the nodes that a role may use have room for, if there was no other role."""

    nodes: int
    """Those with room for a place."""
    places: int
    gpus: _Amount
    slots: _Amount


def room_of(role: Role, kinds: Kinds) -> RoleRoom:
    """``kinds``: of the nodes that it may use."""
    takes, nodes, places = dict[int, tuple[int, int]](), 0, 0
    gpus, slots = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
    for kind, count in kinds.items():
        if kind.gpus not in takes:
            takes[kind.gpus] = devices_for(role, kind.gpus)
        each_gpus, each_slots = takes[kind.gpus]
        if many := _places_on(role, kind, each_gpus, each_slots):
            nodes, places = nodes + count, places + count * many
            own, each, free = (gpus, each_gpus, kind.free_gpus) if each_gpus else (slots, each_slots, kind.free_slots)
            own.append((free - each + 1, count, each))
    return RoleRoom(nodes, places, _amount(gpus, bool(slots)), _amount(slots, bool(gpus)))


def _places_on(role: Role, kind: NodeKind, gpus: int, slots: int) -> int:
    many = kind.free_gpus // gpus if gpus else kind.free_slots // slots
    return many if role.replicas is not None else min(many, 1)


def _amount(own: list[tuple[int, int, int]], other: bool) -> _Amount:
    """``other``: on some nodes a place takes the other resource."""
    each = [one[2] for one in own]
    fewest = 0 if other else min(each, default=0)
    return _Amount(fewest, max(each, default=0), tuple(sorted((spare, count) for spare, count, _ in own)))


class PlacesCount(NamedTuple):
    """What is certain of a job's places."""

    room: bool | None
    """Each role has room for its fewest, or not; None: only a layout can tell."""
    least: Resources
    """What any layout takes at least."""
    most: Resources
    """And at most."""


def count_places(roles: Sequence[Role], rooms: Sequence[RoleRoom], nodes: Kinds) -> PlacesCount:
    """``rooms``: each role's, on some of these nodes."""
    pairs = [*zip(roles, rooms, strict=True)]
    gpus = [(role, room.gpus) for role, room in pairs]
    slots = [(role, room.slots) for role, room in pairs]
    all_gpus, all_slots = Counter[int](), Counter[int]()
    for kind, number in nodes.items():
        all_gpus[kind.free_gpus] += number
        all_slots[kind.free_slots] += number
    least_gpus, least_slots = (sum(role.least * amount.fewest for role, amount in of) for of in (gpus, slots))
    most_gpus, most_slots = (sum(role.places * amount.most for role, amount in of) for of in (gpus, slots))
    alone = max((role.least for role in roles if role.replicas is None), default=1)
    fewest = -(-least_gpus // max((1, *all_gpus))), -(-least_slots // max((1, *all_slots)))
    least = Resources(least_gpus, max(alone, *fewest), least_slots)
    most = Resources(most_gpus, sum(role.places for role in roles), most_slots)
    if (
        any(room.places < role.least for role, room in pairs)
        or _too_many(gpus, all_gpus)
        or _too_many(slots, all_slots)
    ):
        return PlacesCount(False, least, most)
    number = sum(role.least for role in roles)
    taken = [sum(role.least * amount.most for role, amount in of) for of in (gpus, slots)]
    certain = all(
        room.nodes >= number or _is_left(role, room.gpus, taken[0]) or _is_left(role, room.slots, taken[1])
        for role, room in pairs
    )
    return PlacesCount(certain or None, least, most)


def _too_many(roles: Sequence[tuple[Role, _Amount]], free: Mapping[int, int]) -> bool:
    """The fewest places of the roles take more of a resource than there is; or those of them that take so much are more
    than can be side by side. ``free``: how much nodes have, and how many of them have so much."""
    if sum(role.least * amount.fewest for role, amount in roles) > sum(much * nodes for much, nodes in free.items()):
        return True
    return any(
        sum(role.least for role, amount in roles if amount.fewest >= size)
        > sum(much // size * nodes for much, nodes in free.items())
        for size in {amount.fewest for _, amount in roles if amount.fewest > 1}
    )


def _is_left(role: Role, amount: _Amount, taken: int) -> bool:
    """A node is left for the last place of the role, wherever the fewest places of all roles are, which take so much at
    most: it takes more than that to fill all nodes."""
    others, apart = taken - amount.most, 0
    if role.replicas is None:  # its own are on other nodes: at worst on those that it takes most to fill
        others, apart = taken - role.least * amount.most, role.least - 1
    fill, left = 0, sum(nodes for _, nodes in amount.spare) - apart
    for spare, nodes in amount.spare:
        fill += spare * max(0, min(nodes, left))
        left -= nodes
    return fill > others
