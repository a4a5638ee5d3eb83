"""Elastic roles beside others: they shrink where a place has no room, and grow when there is room again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.job import JobRecord, Scale
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.fairshare.resources import devices_for, least
from nodeagent.plan.job.gang import decide
from nodeagent.plan.placing.places import lay_out
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.steps import Decision, End, Propose
from tests.unit.plan.build import (
    NOW,
    PREPARING,
    REPEATABLE,
    UID,
    WALL,
    make_cluster,
    make_generation,
    make_job,
    make_node,
)
from tests.unit.plan.placing.test_places import names, role, roles_spec, site

SERVERS = role("server", replicas=2)
TRAINERS = role("trainer", nodes=4, least=2)
BOTH = (SERVERS, TRAINERS)


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


# --- the gang -----------------------------------------------------------------------------------------


def gang(*nodes: str, since: int = NOW - 600_000) -> JobRecord:
    """It runs on these nodes, with as many trainers as there are nodes."""
    waits = make_job(spec=roles_spec(*BOTH))
    step = decide(make_cluster([*nodes], waits), waits, WALL).step
    assert isinstance(step, Propose)
    generation = make_generation([*nodes], since=since).model_copy(update={"members": step.members})
    return make_job(spec=waits.spec, phase="running", generation=generation)


def placed(found: Decision) -> dict[str, list[str]]:
    assert isinstance(found.step, Propose), found
    return {node: [place.name for place in member.places] for node, member in found.step.members.items()}


def trainers(found: Decision) -> int:
    return sum(name.startswith("trainer") for here in placed(found).values() for name in here)


def test_it_starts_with_fewer_and_waits_for_who_gets_ready() -> None:
    job = make_job(spec=roles_spec(*BOTH), since=NOW - 1000)
    nodes: list[NodeRecord | str] = ["n1", "n2", make_node("n3", ready={UID: PREPARING})]
    assert decide(make_cluster(nodes, job), job, WALL).why == ("waits for n3 to get ready",)
    late = make_job(spec=job.spec)
    assert trainers(decide(make_cluster(nodes, late), late, WALL)) == 2
    one = decide(make_cluster(["n1", make_node("n2", cordon=True)], late), late, WALL)
    assert (one.step, one.why) == (None, ("no node has room for trainer.1 (1 worker): n2 is cordoned (disk)",))


def test_it_shrinks_when_a_node_is_lost_and_none_is_free() -> None:
    job = gang("n1", "n2", "n3", "n4")
    before = {node: [place.name for place in m.places] for node, m in job.generation.members.items()}  # type: ignore[union-attr]
    lost = next(node for node in before if not any(name.startswith("server") for name in before[node]))
    nodes = [make_node(n, lost=n == lost) for n in before]
    found = placed(decide(make_cluster(nodes, job), job, WALL))
    assert {n: [p for p in here if p.startswith("server")] for n, here in found.items()} == {
        n: [p for p in here if p.startswith("server")] for n, here in before.items() if n != lost
    }
    assert sorted(p for here in found.values() for p in here if "trainer" in p) == [
        "trainer.0", "trainer.1", "trainer.2",
    ]  # fmt: skip
    spare = placed(decide(make_cluster([*nodes, "n5"], job), job, WALL))
    assert sum(map(len, spare.values())) == 6 and lost not in spare


def test_it_holds_whole_below_its_fewest() -> None:
    job = gang("n1", "n2")
    found = decide(make_cluster(["n1", make_node("n2", lost=True)], job), job, WALL).step
    assert isinstance(found, End) and found.phase == "holding"


def test_it_grows_after_the_cool_down_when_there_is_room_again() -> None:
    job = gang("n1", "n2", "n3")
    assert decide(make_cluster(["n1", "n2", "n3"], job), job, WALL).why == (
        "runs with 3 of 4 places of trainer: no node has room for trainer.3 (1 worker)",
    )
    back = decide(make_cluster(["n1", "n2", "n3", "n4"], job), job, WALL)
    assert trainers(back) == 4 and isinstance(back.step, Propose) and back.step.planned
    assert (back.step.cause.kind, back.step.cause.text) == (
        "join", "there is room for more places: trainer from 3 to 4",
    )  # fmt: skip
    fresh = gang("n1", "n2", "n3", since=NOW - 1000)
    soon = decide(make_cluster(["n1", "n2", "n3", "n4"], fresh), fresh, WALL)
    assert soon.step is None and soon.at > NOW and "after the cool-down" in soon.why[0]
    assert should_prepare(make_cluster(["n1", "n2", "n3", make_node("n4", ready={})], job), job, "n4")


def test_a_scale_of_it_is_all_or_nothing_and_no_other_role_shrinks_for_it() -> None:
    job = gang("n1", "n2", "n3")
    scale = Scale(request="r", want=3, before=2, role="server", deadline=NOW + 1000)
    control = job.control.model_copy(update={"scale": scale, "sizes": {"server": 3}})
    grows = job.model_copy(update={"control": control})
    tight = [make_node(n, slots=2) for n in ("n1", "n2", "n3")]
    room = decide(make_cluster(tight, grows), grows, WALL)
    assert trainers(room) == 3
    full = grows.model_copy(
        update={"control": control.model_copy(
            update={"scale": scale.model_copy(update={"want": 4}), "sizes": {"server": 4}}
        )}
    )  # fmt: skip
    found = decide(make_cluster(tight, full), full, WALL)
    assert (found.step, found.at) == (None, NOW + 1000)
    assert found.why == (
        "runs with 2 of 4 places of server, 3 of 4 places of trainer: its nodes would not do for more",
    )


def test_a_node_that_is_drained_is_left_with_fewer_places() -> None:
    job = gang("n1", "n2", "n3")
    nodes: list[NodeRecord | str] = ["n1", "n2", make_node("n3", drain=True)]
    found = decide(make_cluster(nodes, job), job, WALL)
    assert trainers(found) == 2 and isinstance(found.step, Propose) and found.step.planned


def test_a_queue_that_may_not_have_all_gets_it_with_fewer() -> None:
    spec = roles_spec(*BOTH, queue="q")
    job = make_job(spec=spec)
    queues = Queues(queues=(Queue(name="q", capability=Amount(slots=5)),))
    cluster = replace(make_cluster(["n1", "n2", "n3", "n4"], job), queues=queues)
    assert least(cluster, spec).slots == 4
    assert trainers(decide(cluster, job, WALL)) == 3
