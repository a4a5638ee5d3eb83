"""Places of elastic roles beside others: as many as fit, and never fewer than their fewest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.plan.fairshare.resources import devices_for
from nodeagent.plan.placing.places import lay_out
from tests.unit.plan.build import REPEATABLE
from tests.unit.plan.placing.ofroles import BOTH, role
from tests.unit.plan.placing.test_places import names, site


def had(*places: str) -> frozenset[str]:
    return frozenset(places)


def test_all_places_where_there_is_room_for_all() -> None:
    found = lay_out(BOTH, [site(f"n{i}") for i in (1, 2, 3, 4)])
    assert (found.count, found.left, found.lack) == (6, "", "")


def test_an_elastic_role_has_as_many_as_fit() -> None:
    found = lay_out(BOTH, [site(f"n{i}") for i in (1, 2, 3)])
    assert (found.count, found.left) == (5, "no node has room for trainer.3 (1 worker)")
    assert sorted(name for here in names(found).values() for name in here if "trainer" in name) == [
        "trainer.0", "trainer.1", "trainer.2",
    ]  # fmt: skip
    assert lay_out(BOTH, [site("n1")]).lack == "no node has room for trainer.1 (1 worker)"


def test_a_lost_place_leaves_the_others_where_they_are_without_a_gap() -> None:
    """The last one takes the number of the one that is missing; the servers stay."""
    sites = [
        site("n1", had=had("server.0", "trainer.0")), site("n3", had=had("trainer.2")),
        site("n4", had=had("server.1", "trainer.3")),
    ]  # fmt: skip
    assert names(lay_out(BOTH, sites)) == {
        "n1": ["server.0", "trainer.0"], "n3": ["trainer.2"], "n4": ["server.1", "trainer.1"],
    }  # fmt: skip


def test_a_place_that_has_to_be_goes_before_one_that_may() -> None:
    """The server that was lost needs the room of a trainer."""
    roles = (role("server", replicas=2, workers=2), role("trainer", nodes=2, workers=2, least=1))
    sites = [site("n1", slots=4, had=had("server.0", "trainer.0")), site("n2", slots=2, had=had("trainer.1"))]
    assert names(lay_out(roles, sites)) == {"n1": ["server.0", "trainer.0"], "n2": ["server.1"]}


def test_what_is_left_goes_where_least_of_what_is_wanted_is() -> None:
    roles = (role("a", replicas=4, least=1), role("b", replicas=8, least=1))
    found = lay_out(roles, [site("n1", slots=6)])
    assert names(found)["n1"] == ["a.0", "a.1", "b.0", "b.1", "b.2", "b.3"]


SOME = st.lists(
    st.tuples(st.booleans(), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3)), min_size=2, max_size=3
)
THERE = st.lists(st.tuples(st.integers(0, 6), st.sampled_from([(), ("r0.0",), ("r0.3", "r1.0"), ("r1.1", "r2.0")])))


@REPEATABLE
@given(SOME, THERE)
def test_every_layout_has_at_least_the_fewest(
    some: list[tuple[bool, int, int, int]], there: list[tuple[int, tuple[str, ...]]]
) -> None:
    roles = tuple(
        role(f"r{i}", **{"nodes" if spread else "replicas": size}, workers=workers, least=max(1, size - less))
        for i, (spread, size, less, workers) in enumerate(some)
    )
    sites = [site(f"n{i}", slots=slots, had=frozenset(places)) for i, (slots, places) in enumerate(there)]
    found = lay_out(roles, sites)
    assert found == lay_out(roles, sites)
    if found.lack:
        assert not found.places
        return
    placed = [place for places in found.places.values() for place in places]
    for one in roles:
        indexes = sorted(place.index for place in placed if place.role == one.name)
        assert indexes == [*range(len(indexes))] and one.least <= len(indexes) <= one.places
    assert bool(found.left) == (len(placed) < sum(one.places for one in roles))
    by_name = {one.name: one for one in roles}
    for node in sites:
        here = found.places.get(node.node, ())
        devices = [device for place in here for device in place.devices]
        assert len(set(devices)) == len(devices) and set(devices) <= set(node.devices)
        assert all(len(place.devices) == sum(devices_for(by_name[place.role], 0)) for place in here)
        alone = [place.role for place in here if by_name[place.role].replicas is None]
        assert len(set(alone)) == len(alone)
