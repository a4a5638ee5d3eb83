"""Places of several roles on free devices: all of them or none, each once, and where they were if that will do."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.constraints import NODE, Constraints
from nodeagent.model.jobspec import MOST_ROLES, Nodes, Role
from nodeagent.plan.fairshare.resources import devices_for
from nodeagent.plan.placing.places import Layout, Site, lay_out
from tests.unit.plan.build import REPEATABLE, make_node
from tests.unit.plan.placing.ofroles import role


def site(name: str, *, slots: int = 4, gpus: int = 0, had: frozenset[str] = frozenset()) -> Site:
    facts = make_node(name, slots=slots, gpus=gpus).facts
    return Site(name, facts, facts.devices(), had)


def names(layout: Layout) -> dict[str, list[str]]:
    return {node: [place.name for place in places] for node, places in layout.places.items()}


def test_places_are_spread_and_may_share_a_node() -> None:
    roles = (role("pserver", replicas=2), role("trainer", nodes=2))
    four = [site(f"n{i}") for i in (1, 2, 3, 4)]
    assert names(lay_out(roles, four)) == {
        "n1": ["trainer.0"], "n2": ["trainer.1"], "n3": ["pserver.0"], "n4": ["pserver.1"],
    }  # fmt: skip
    assert names(lay_out(roles, four[:2])) == {"n1": ["pserver.0", "trainer.0"], "n2": ["pserver.1", "trainer.1"]}


def test_one_place_of_a_role_with_nodes_on_each_node() -> None:
    found = lay_out((role("pserver", replicas=2), role("trainer", nodes=2)), [site("n1", slots=64)])
    assert found == Layout(lack="no node has room for trainer.1 (1 worker)")


def test_all_or_nothing() -> None:
    roles = (role("pserver", replicas=3), role("trainer", nodes=2, workers=4))
    assert lay_out(roles, [site("n1"), site("n2")]).places == {}
    assert lay_out(roles, [site("n1"), site("n2")]).lack == "no node has room for pserver.0 (1 worker)"
    assert len(lay_out(roles, [site("n1", slots=5), site("n2", slots=6)]).places) == 2


def test_what_needs_most_is_placed_first_and_gets_its_own_devices() -> None:
    roles = (role("small", replicas=4, gpus=1), role("large", nodes=1, workers=4, gpus=1))
    found = lay_out(roles, [site("n1", gpus=4), site("n2", gpus=4)])
    assert names(found) == {"n1": ["large.0"], "n2": ["small.0", "small.1", "small.2", "small.3"]}
    assert [p.devices for p in found.places["n2"]] == [(f"GPU-n2-{i}",) for i in range(4)]


def test_a_place_stays_where_it_was_unless_that_keeps_another_out() -> None:
    roles = (role("pserver", replicas=1), role("trainer", nodes=1))
    stay = [site("n1", had=frozenset({"pserver.0"})), site("n2", had=frozenset({"trainer.0"}))]
    assert names(lay_out(roles, stay)) == {"n1": ["pserver.0"], "n2": ["trainer.0"]}
    one_gpu = (role("a", replicas=1), role("b", nodes=2))
    tight = [site("n1", slots=2), site("n2", slots=1, had=frozenset({"a.0"}))]
    assert names(lay_out(one_gpu, tight)) == {"n1": ["a.0", "b.0"], "n2": ["b.1"]}


ROLES = st.lists(
    st.tuples(st.booleans(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=4
)
SITES = st.lists(st.tuples(st.integers(0, 6), st.sampled_from((0, 2, 4))), max_size=5)


@REPEATABLE
@given(ROLES, SITES)
def test_every_layout_is_whole(some: list[tuple[bool, int, int, int]], there: list[tuple[int, int]]) -> None:
    roles = tuple(
        role(f"r{i}", **{"nodes" if spread else "replicas": size}, workers=workers, gpus=gpus)
        for i, (spread, size, workers, gpus) in enumerate(some)
    )
    sites = [site(f"n{i}", slots=slots, gpus=gpus) for i, (slots, gpus) in enumerate(there)]
    found = lay_out(roles, sites)
    assert found == lay_out(roles, sites)
    assert bool(found.lack) == (not found.places)
    if found.lack:
        return
    placed = [place.name for places in found.places.values() for place in places]
    assert sorted(placed) == sorted(f"{r.name}.{i}" for r in roles for i in range(r.places))
    by_name = {r.name: r for r in roles}
    for one in sites:
        here = found.places.get(one.node, ())
        devices = [device for place in here for device in place.devices]
        assert len(set(devices)) == len(devices) and set(devices) <= set(one.devices)
        for place in here:
            gpus, slots = devices_for(by_name[place.role], len(one.facts.gpus))
            assert len(place.devices) == gpus + slots
            assert by_name[place.role].replicas is not None or sum(p.role == place.role for p in here) == 1


def calls_for(nodes: int, way: dict[str, str], had: bool = False) -> int:
    """Python's calls while two roles get a place on each of so many nodes."""
    asked = Constraints(**way) if way else None
    roles = [role(name, replicas=nodes).model_copy(update={"placement": asked}) for name in ("a", "b")]
    sites = [site(f"n{i}", had=frozenset({f"a.{i}"} if had else ())) for i in range(nodes)]
    found, calls = calls_of(roles, sites)
    assert found.count == 2 * nodes
    return calls


def calls_of(roles: Sequence[Role], sites: Sequence[Site]) -> tuple[Layout, int]:
    """The layout, and Python's calls while it is looked for."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        found = lay_out(roles, sites)
    finally:
        sys.setprofile(before)
    return found, calls


@pytest.mark.parametrize("way", [{"spread": NODE}, {"pack": NODE}, {"spread": "rack"}, {}])
@pytest.mark.parametrize("had", [False, True])
def test_a_user_who_asks_for_many_places_cannot_hold_up_the_agents(way: dict[str, str], had: bool) -> None:
    """Every agent lays every waiting job out: what twice as many places cost must not grow with their square."""
    assert calls_for(160, way, had) < 3 * calls_for(80, way, had)


def test_nor_with_elastic_roles_of_which_more_are_wanted_than_fit() -> None:
    """Each role was looked at anew for each place, in four ways, three of them alike: 100 nodes took seconds."""
    roles = [Role(name=f"r{i}", command=("x",), nodes=Nodes(min=1, max=27, target=27)) for i in range(MOST_ROLES)]
    found, calls = calls_of(roles, [site(f"n{i}", slots=4) for i in range(100)])
    assert found.left
    assert found.count == 400, "one for each slot"
    assert calls < 30 * 400 * MOST_ROLES, "some for each place and role"
