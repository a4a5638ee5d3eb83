"""A gang with elastic roles on a cluster: it shrinks when a node is lost, and grows when there is room again."""

from __future__ import annotations

from dataclasses import replace

from nodeagent.model.job import JobRecord, Scale
from nodeagent.model.node import NodeRecord
from nodeagent.model.queue import Amount, Queue, Queues
from nodeagent.plan.fairshare.resources import least
from nodeagent.plan.job.gang import decide
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.steps import Decision, End, Propose
from tests.unit.plan.build import NOW, PREPARING, UID, WALL, make_cluster, make_generation, make_job, make_node
from tests.unit.plan.placing.ofroles import BOTH, roles_spec


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
