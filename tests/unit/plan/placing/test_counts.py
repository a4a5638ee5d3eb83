"""What a count says of places is so in whatever layout."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from nodeagent.model.constraints import Constraints
from nodeagent.model.jobspec import Role
from nodeagent.plan.fairshare.resources import of_devices, together
from nodeagent.plan.nodes.candidates import NodeKind, free_gpus
from nodeagent.plan.placing.counts import PlacesCount, count_places, room_of
from nodeagent.plan.placing.places import Ground, Site
from tests.unit.plan.build import make_node
from tests.unit.plan.placing.ofroles import role
from tests.unit.plan.placing.test_places_domains import some_role, some_site


def kinds(sites: Sequence[Site], asked: Constraints | None = None) -> Counter[NodeKind]:
    found = Counter[NodeKind]()
    for one in sites:
        if asked is None or not asked.unmet(one.node, one.facts.labels):
            gpus = free_gpus(one.facts, one.devices)
            found[NodeKind(len(one.facts.gpus), gpus, len(one.devices) - gpus)] += 1
    return found


def counted(roles: Sequence[Role], sites: Sequence[Site]) -> PlacesCount:
    return count_places(roles, [room_of(one, kinds(sites, one.placement)) for one in roles], kinds(sites))


def some_case(seed: int) -> tuple[list[Role], list[Site]]:
    """Jobs that just fit, or just do not: most of what is drawn for one node is the same as for the others."""
    draw = random.Random(seed)
    roles = [some_role(draw, name) for name in "abcd"[: draw.choice([2, 3, 4])]]
    if draw.random() < 0.7:
        return roles, [some_site(draw, i) for i in range(draw.choice([1, 4, 9, 14, 30]))]
    facts = make_node("n", slots=draw.choice([2, 4, 8]), gpus=draw.choice([0, 4, 8])).facts
    return roles, [Site(f"n{i}", facts, facts.devices()) for i in range(draw.choice([2, 5, 9, 20]))]


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_what_is_certain_is_so(first: int) -> None:
    answers = Counter[bool | None]()
    for seed in range(first, first + 100):
        roles, sites = some_case(seed)
        found, ground = counted(roles, sites), Ground(roles, sites)
        answers[found.room] += 1
        layout = ground.lay_out()
        assert ground.holds((), "") == (not layout.lack)
        if found.room is not None:
            assert found.room == (not layout.lack), (seed, found, layout.lack)
        if not layout.lack:
            use = together(of_devices([d for one in here for d in one.devices]) for here in layout.places.values())
            assert all(low <= amount <= high for low, amount, high in zip(found.least, use, found.most, strict=True))
    assert min(answers[True], answers[False]) > 10, answers
    assert answers[None] < 25, "a layout is seldom needed"


@pytest.mark.parametrize(
    ("nodes", "gpus", "wants", "room"),
    [
        (4, 8, [(4, 8)], True),
        (3, 8, [(4, 8)], False),
        (20, 8, [(21, 5)], False),  # as many GPUs as there are, and one such place on each node
        (4, 8, [(2, 8), (17, 1)], False),
        (4, 8, [(2, 8), (8, 1)], None),  # it depends on where the small ones go
        (20, 8, [(2, 8), (8, 1)], True),  # wherever they go
        (2, 8, [(16, 1)], True),
        (2, 8, [(17, 1)], False),
    ],
)
def test_places_of_one_size_and_of_several(
    nodes: int, gpus: int, wants: list[tuple[int, int]], room: bool | None
) -> None:
    facts = make_node("n", slots=0, gpus=gpus).facts
    roles = [
        role(f"r{i}", replicas=count, workers=each).model_copy(update={"gpus_per_worker": 1})
        for i, (count, each) in enumerate(wants)
    ]
    assert counted(roles, [Site(f"n{i}", facts, facts.devices()) for i in range(nodes)]).room is room
