"""The places of a gang of several roles on a cluster's nodes: whole or not at all, and each role scaled alone."""

from __future__ import annotations

from nodeagent.model.job import Scale
from nodeagent.model.world import Place
from nodeagent.plan.job.gang import decide
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.steps import Decision, End, Propose, Settle
from tests.unit.plan.build import NOW, PREPARING, UID, WALL, make_cluster, make_generation, make_job, make_node
from tests.unit.plan.placing.ofroles import TWO, role, roles_spec


def test_a_gang_of_roles_is_proposed_whole() -> None:
    job = make_job(spec=roles_spec(*TWO))
    step = decide(make_cluster(["n1", "n2"], job), job, WALL).step
    assert isinstance(step, Propose)
    first, second = step.members["n1"], step.members["n2"]
    assert first.places == (
        Place(role="pserver", index=0, workers=1, devices=("cpu1",)),
        Place(role="trainer", index=0, workers=1, devices=("cpu0",)),
    )
    assert (first.devices, first.workers, first.ports, second.first_rank) == (("cpu1", "cpu0"), 2, 4, 2)
    assert [first.place_of(rank).name for rank in (0, 1)] == ["pserver.0", "trainer.0"]  # type: ignore[union-attr]
    assert second.ranks_of("trainer") == {3}


def test_a_job_of_roles_waits_and_says_which_place_has_no_node() -> None:
    job = make_job(spec=roles_spec(*TWO))
    found = decide(make_cluster(["n1"], job), job, WALL)
    assert (found.step, found.why) == (None, ("role trainer needs 2 nodes, and only 1 is known",))
    found = decide(make_cluster(["n1", make_node("n2", cordon=True)], job), job, WALL)
    assert (found.step, found.why) == (None, ("no node has room for trainer.1 (1 worker): n2 is cordoned (disk)",))


def test_it_waits_for_the_node_that_its_places_would_be_spread_to() -> None:
    job = make_job(spec=roles_spec(*TWO))
    nodes = [make_node("n1"), make_node("n2"), make_node("n3", ready={UID: PREPARING})]
    fresh = make_job(spec=job.spec, since=NOW - 1000)
    assert decide(make_cluster(nodes, fresh), fresh, WALL).why == ("waits for n3 to get ready",)


def test_nodes_get_ready_where_places_fit() -> None:
    """Not the first nodes, if a role needs GPUs that others have."""
    spec = roles_spec(role("pserver", replicas=1), role("trainer", nodes=1, workers=2, gpus=1))
    nodes = [make_node(f"n{i}", gpus=2 if i == 5 else 0, ready={}) for i in range(1, 6)]
    job = make_job(spec=spec)
    cluster = make_cluster(nodes, job)
    assert should_prepare(cluster, job, "n5") and should_prepare(cluster, job, "n1")


def test_a_lost_node_holds_the_gang_whole() -> None:
    job = make_job(spec=roles_spec(*TWO))
    step = decide(make_cluster(["n1", "n2"], job), job, WALL).step
    assert isinstance(step, Propose)
    generation = make_generation(["n1", "n2"]).model_copy(update={"members": step.members})
    running = make_job(spec=job.spec, phase="running", generation=generation)
    found = decide(make_cluster(["n1", make_node("n2", lost=True)], running), running, WALL).step
    assert isinstance(found, End) and found.phase == "holding"
    spread = decide(make_cluster(["n1", make_node("n2", lost=True), "n3"], running), running, WALL).step
    assert isinstance(spread, Propose)
    assert spread.members["n1"].places == step.members["n1"].places


# --- a role is scaled alone ---------------------------------------------------------------------------


def scaled(want: int, *nodes: str, before: int = 2, deadline: int = NOW + 1000) -> tuple[Decision, list[str]]:
    """What is decided of a gang of ``TWO`` on n1 and n2 once there are to be ``want`` trainers, and the places that it
    would be formed with."""
    first = decide(make_cluster(["n1", "n2"], make_job(spec=roles_spec(*TWO))), make_job(spec=roles_spec(*TWO)), WALL)
    assert isinstance(first.step, Propose)
    generation = make_generation(["n1", "n2"]).model_copy(update={"members": first.step.members})
    scale = Scale(
        request="r", want=want, before=before, role="trainer", deadline=deadline if want > before else 0, grace=7.0
    )
    job = make_job(spec=roles_spec(*TWO), phase="running", generation=generation, scale=scale)
    job = job.model_copy(update={"control": job.control.model_copy(update={"sizes": {"trainer": want}})})
    found = decide(make_cluster(list(nodes), job), job, WALL)
    placed = found.step.members.values() if isinstance(found.step, Propose) else ()
    return found, sorted(place.name for member in placed for place in member.places)


def test_a_role_grows_when_all_its_places_fit() -> None:
    found, placed = scaled(3, "n1", "n2", "n3")
    assert isinstance(found.step, Propose) and found.step.planned and found.step.cause.kind == "scale"
    assert found.step.cause.text == "scaled trainer from 2 to 3 places by ann"
    assert placed == ["pserver.0", "pserver.1", "trainer.0", "trainer.1", "trainer.2"]


def test_a_role_that_cannot_grow_goes_on_and_is_rolled_back_in_the_end() -> None:
    found, _ = scaled(3, "n1", "n2")
    assert (found.step, found.at) == (None, NOW + 1000)
    assert found.why == ("runs with 2 of 3 places of trainer: no node has room for trainer.2 (1 worker)",)
    late, _ = scaled(3, "n1", "n2", deadline=NOW)
    assert isinstance(late.step, Settle)
    assert (late.step.control.sizes, late.step.control.target) == ({"trainer": 2}, 4)
    assert late.step.control.scale is not None and late.step.control.scale.state == "rolled_back"


def test_a_role_shrinks_within_the_grace_that_was_asked_for() -> None:
    found, placed = scaled(1, "n1", "n2")
    assert isinstance(found.step, Propose) and found.step.grace == 7.0
    assert placed == ["pserver.0", "pserver.1", "trainer.0"]


def test_a_gang_that_has_lost_a_node_is_formed_again_without_the_scale_out_that_has_no_room() -> None:
    first, _ = scaled(4, "n1", "n2", "n3")
    assert first.step is None
    lost, placed = scaled(4, "n1", "n3")
    assert isinstance(lost.step, Propose), lost.why
    assert placed == ["pserver.0", "pserver.1", "trainer.0", "trainer.1"]


def test_a_newcomer_gets_ready_for_a_role_that_grows() -> None:
    job = make_job(spec=roles_spec(*TWO))
    step = decide(make_cluster(["n1", "n2"], job), job, WALL).step
    assert isinstance(step, Propose)
    generation = make_generation(["n1", "n2"]).model_copy(update={"members": step.members})
    scale = Scale(request="r", want=3, before=2, role="trainer", deadline=NOW + 1000)
    job = make_job(spec=job.spec, phase="running", generation=generation, scale=scale)
    job = job.model_copy(update={"control": job.control.model_copy(update={"sizes": {"trainer": 3}})})
    cluster = make_cluster(["n1", "n2", make_node("n3", ready={})], job)
    assert should_prepare(cluster, job, "n3")
