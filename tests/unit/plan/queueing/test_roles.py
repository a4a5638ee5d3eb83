"""Jobs of several roles: what is given up for one that waits, and when one of them is stopped for another job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.jobspec import Nodes, Role
from nodeagent.model.queue import Amount, Queue
from nodeagent.model.world import Member, Place
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.fairshare.resources import Resources, least
from nodeagent.plan.job.gang import decide
from nodeagent.plan.queueing.elastic import MOST_OF_ROLES, transfers
from nodeagent.plan.queueing.transfers import Transfers
from nodeagent.plan.steps import End
from tests.unit.plan.build import NOW, READY, WALL, make_generation, make_job, make_node, make_spec, spend
from tests.unit.plan.fairshare.ofqueues import TEAM, A, auto, cluster, formed, in_roles, job

PROMISED = Queue(name="b", weight=0.01, guarantee=Amount(nodes=3))


def servers(name: str, least: int, *, order: int = 0) -> JobRecord:
    """A job that waits, of one place of a role on a node and the others of another; none fits beside another."""
    return in_roles(job(name, least, order=order))


def test_nodes_come_back_for_all_places_of_a_job() -> None:
    elastic = job("a1", 1, range(1, 6))
    assert transfers(cluster(6, [A, PROMISED], elastic, servers("b1", 3))).gives == {
        "u-a1": {"n5": "u-b1", "n4": "u-b1"}
    }
    assert transfers(cluster(6, [A, PROMISED], elastic, servers("b1", 6))) == Transfers(), "not for a part of them"


def test_what_was_borrowed_comes_back_in_a_cluster_of_one_queue_too() -> None:
    lender = auto("a1", [1, 2, 3])
    assert transfers(cluster(4, [A], lender, servers("a2", 3))).gives == {"u-a1": {"n3": "u-a2", "n2": "u-a2"}}
    assert transfers(cluster(4, [A], lender, servers("a2", 4))) == Transfers(takes={"u-a1": ("n4",)}), (
        "it holds up nobody"
    )


def test_nobody_borrows_what_its_places_need() -> None:
    lender = auto("a1", [1])
    assert transfers(cluster(4, [A], lender, servers("a2", 2))).takes == {"u-a1": ("n4",)}


def test_whole_jobs_make_room_for_it() -> None:
    jobs = job("a1", 2, [1, 2]), job("a2", 2, [3, 4], order=1), job("a3", 2, [5, 6], order=2)
    assert transfers(cluster(6, [A, PROMISED], *jobs, servers("b1", 3))).stops == {"u-a3": "u-b1", "u-a2": "u-b1"}
    assert transfers(cluster(6, [A, PROMISED], *jobs, servers("b1", 2))).stops == {"u-a3": "u-b1"}


def test_it_makes_room_as_a_whole() -> None:
    gang = formed(in_roles(job("a1", 3, range(1, 4))), 0)
    view = cluster(4, [A, PROMISED], gang, job("b1", 2))
    assert transfers(view) == Transfers(stops={"u-a1": "u-b1"})
    step = decide(view, view.jobs["u-a1"], WALL).step
    assert isinstance(step, End)
    assert (step.phase, step.planned) == ("holding", True)
    assert step.spend is not None
    assert (step.spend.counts, step.spend.room_for) == (False, ("u-b1",))


def test_under_a_capability_only_those_below_it_give() -> None:
    c1 = job("c1", 1, range(5, 9))
    view = cluster(8, [*TEAM, Queue(name="c")], job("a1", 1, range(1, 5)), c1, servers("b1", 2))
    assert transfers(view).gives == {"u-a1": {"n4": "u-b1", "n3": "u-b1"}}


def test_only_for_the_first_few_nodes_are_looked_for() -> None:
    lender, late = auto("a0", range(1, 10)), servers("a9", 3, order=99)
    too_large = [servers(f"a{i}", 11, order=i) for i in range(1, MOST_OF_ROLES + 1)]
    assert set(transfers(cluster(10, [A], lender, *too_large[1:], late)).gives["u-a0"].values()) == {"u-a9"}
    assert transfers(cluster(10, [A], lender, *too_large, late)).gives == {}


def of_places(name: str, *roles: tuple[str, int, int]) -> JobRecord:
    """A job that waits: names of roles with how many places, each with so many workers."""
    made = tuple(
        Role(
            name=role, command=("x",), nodes=Nodes(min=1, max=count, target=count),
            replicas=Nodes(min=count, max=count, target=count), workers_per_node=workers, gpus_per_worker=0,
        )
        for role, count, workers in roles
    )  # fmt: skip
    spec = make_spec(name=name).model_copy(update={"roles": made, "queue": name[:1]})
    return make_job(spec=spec, uid=f"u-{name}")


def wide(view: Cluster, slots: int) -> Cluster:
    nodes = {n: make_node(n, slots=slots, ready=dict.fromkeys(view.jobs, READY)) for n in view.nodes}
    return replace(view, nodes=nodes, notes=Notes())


@pytest.mark.parametrize(("workers", "given"), [(3, 0), (4, 2)])
def test_places_share_nodes_with_what_stays_there(workers: int, given: int) -> None:
    """Three slots of each of three nodes are free. That is enough for places of three workers."""
    view = wide(cluster(3, [A], auto("a1", [1, 2, 3]), of_places("a2", ("x", 2, workers), ("y", 1, 3))), 4)
    assert len(transfers(view).gives.get("u-a1", {})) == given


def test_of_a_gang_of_roles_a_place_counts_with_its_devices() -> None:
    """It has two slots on one node: that is what others can have when it is stopped."""
    gang = in_roles(job("a1", 2, [1, 2]))
    assert gang.generation is not None
    members = {
        name: Member.model_validate(
            {**member.model_dump(), "devices": ("cpu0", "cpu1"), "workers": 2,
             "places": (Place(role="x", index=i, workers=2, devices=("cpu0", "cpu1")),)}
        )
        for i, (name, member) in enumerate(gang.generation.members.items())
    }  # fmt: skip
    gang = gang.model_copy(update={"generation": gang.generation.model_copy(update={"members": members})})
    owned = Queue(name="b", weight=0.01, guarantee=Amount(slots=2))
    needs = make_spec(name="b1", size=(1, 1), workers=2).model_copy(update={"queue": "b"})
    waits = make_job(spec=needs, uid="u-b1")
    assert transfers(wide(cluster(2, [A, owned], gang, waits), 3)).stops == {"u-a1": "u-b1"}
    assert transfers(wide(cluster(2, [A, owned], gang, waits), 4)) == Transfers(), "two slots of each node are free"


def test_the_fewest_nodes_that_a_gang_of_roles_could_be_on() -> None:
    """A role with ``nodes`` has each place on a node of its own; places of roles with ``replicas`` share nodes."""
    view = wide(cluster(4, [A]), 4)
    assert least(view, in_roles(job("a1", 3)).spec) == Resources(nodes=2, slots=3)
    assert least(view, of_places("a1", ("x", 2, 1), ("y", 2, 1)).spec) == Resources(nodes=1, slots=4)
    assert least(view, of_places("a1", ("x", 2, 1), ("y", 1, 3)).spec) == Resources(nodes=2, slots=5)
    assert least(cluster(4, [A]), in_roles(job("a1", 3)).spec) == Resources(nodes=3, slots=3)


def test_all_that_a_gang_of_roles_needs_is_kept_of_a_capability() -> None:
    """a1 has made room for b1 and would be back before others have: p keeps both nodes that b1 needs."""
    entry = spend("share", counts=False).model_copy(update={"room_for": ("u-b1",)})
    ended = make_generation(["n1"], state="ended", since=NOW - 1000)
    donor = job("a1", 1).model_copy(
        update={"phase": "holding", "since": NOW - 1000, "last_number": 1, "generation": ended, "budget": {"1": entry}}
    )
    small = TEAM[0].model_copy(update={"capability": Amount(nodes=2)})
    promised = Queue(name="b", parent="p", weight=0.01, guarantee=Amount(nodes=2))
    view = cluster(3, [small, TEAM[1], promised], donor, formed(job("a2", 1, [2], order=1), NOW), servers("b1", 2))
    assert transfers(view).stops == {"u-a2": "u-b1"}
    assert decide(view, donor, WALL).step is None
