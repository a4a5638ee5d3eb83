"""Places of several roles: all of them or none, each once, on free devices, and where they were if that will do."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.constraints import NODE, Constraints
from nodeagent.model.job import Scale
from nodeagent.model.jobspec import MOST_ROLES, JobSpec, Nodes, Role
from nodeagent.model.node import Incarnation
from nodeagent.model.pod import WorkerState
from nodeagent.model.world import Place, PodReport
from nodeagent.plan.fairshare.resources import devices_for
from nodeagent.plan.job.gang import decide
from nodeagent.plan.placing.places import Layout, Site, lay_out
from nodeagent.plan.pods.actions import PodAction, Release, ReportPod
from nodeagent.plan.pods.prepare import should_prepare
from nodeagent.plan.steps import Decision, End, Propose, Settle
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import (
    NOW,
    PREPARING,
    REPEATABLE,
    UID,
    WALL,
    failed,
    make_cluster,
    make_exit,
    make_generation,
    make_job,
    make_node,
    make_spec,
)
from tests.unit.plan.planning import plan_node


def role(name: str, *, nodes: int = 0, replicas: int = 0, workers: int = 1, gpus: int = 0, least: int = 0) -> Role:
    """Elastic with ``least``."""
    size = nodes or replicas
    places = Nodes(min=least or size, max=size, target=size)
    return Role(
        name=name, command=("x",), nodes=places if nodes else Nodes(min=1, max=size, target=size),
        replicas=None if nodes else places, workers_per_node=workers, gpus_per_worker=gpus,
    )  # fmt: skip


def site(name: str, *, slots: int = 4, gpus: int = 0, had: frozenset[str] = frozenset()) -> Site:
    facts = make_node(name, slots=slots, gpus=gpus).facts
    return Site(name, facts, facts.devices(), had)


def names(layout: Layout) -> dict[str, list[str]]:
    return {node: [place.name for place in places] for node, places in layout.places.items()}


def roles_spec(*roles: Role, **more: object) -> JobSpec:
    return make_spec().model_copy(update={"roles": roles, **more})


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


# --- the gang ---------------------------------------------------------------------------------------

TWO = (role("pserver", replicas=2), role("trainer", nodes=2))


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


# --- one role after another ---------------------------------------------------------------------------

AFTER = (TWO[0], TWO[1].model_copy(update={"after": ("pserver",)}))


def next_action(reports: dict[str, PodReport], *, ready: tuple[str, ...] = ()) -> PodAction | None:
    """Of n1, which runs pserver.0 and where trainer.0 waits."""
    job = make_job(spec=roles_spec(*AFTER))
    step = decide(make_cluster(["n1", "n2"], job), job, WALL).step
    assert isinstance(step, Propose)
    generation = make_generation(["n1", "n2"], reports=reports).model_copy(update={"members": step.members})
    running = make_job(spec=job.spec, phase="running", generation=generation)
    status = PodStatus(
        uid=UID, phase="running", generation=generation.token, highest=generation.token, ready=ready,
        waiting=("trainer",),
        workers=(WorkerState(rank=0, local_rank=0, pid=7, state="running"),),
    )  # fmt: skip
    found = plan_node(make_cluster(["n1", "n2"], running), "n1", Incarnation(life="life-n1", start=1), {UID: status}, 1)
    return found[0] if found else None


def test_a_restart_alone_is_reported_once() -> None:
    """With what was told before; also by an agent that has just begun."""
    job = make_job(spec=roles_spec(*TWO))
    step = decide(make_cluster(["n1", "n2"], job), job, WALL).step
    assert isinstance(step, Propose)
    sent: PodReport | None = None
    looks: list[tuple[list[int], str]] = [([], ""), ([0], "pserver.0"), ([0], ""), ([0, 1], "trainer.0")]
    for exits, name in looks:
        reports = {} if sent is None else {"n1": sent}
        generation = make_generation(["n1", "n2"], reports=reports).model_copy(update={"members": step.members})
        running = make_job(spec=job.spec, phase="running", generation=generation)
        workers = tuple(WorkerState(rank=r, local_rank=r, pid=7, state="running") for r in (0, 1))
        restarted = tuple(make_exit(rank=rank, signal=9, order=rank) for rank in exits)
        status = PodStatus(
            uid=UID,
            phase="running",
            generation=generation.token,
            highest=generation.token,
            workers=workers,
            restarted=restarted,
        )
        cluster = make_cluster(["n1", "n2"], running)
        found = plan_node(cluster, "n1", Incarnation(life="life-n1", start=1), {UID: status}, 1)
        if not name:
            assert found == ()
            continue
        assert isinstance(found[0], ReportPod)
        sent = found[0].report
        assert [one.rank for one in sent.alone] == exits
        assert (
            found[0].why
            == f"{name}, rank {exits[-1]}, failed: SIGKILL (9); it is to be started again while the gang goes on"
        )


def reported(*ready: str) -> PodReport:
    return PodReport(state="running", ready=ready)


def test_what_is_ready_is_reported_once() -> None:
    action = next_action({}, ready=("pserver.0",))
    assert isinstance(action, ReportPod) and action.report == reported("pserver.0")
    assert next_action({"n1": reported("pserver.0")}, ready=("pserver.0",)) is None


def test_a_role_starts_when_all_places_before_it_are_ready() -> None:
    assert next_action({"n1": reported("pserver.0"), "n2": reported()}, ready=("pserver.0",)) is None
    both = {"n1": reported("pserver.0"), "n2": reported("pserver.1")}
    action = next_action(both, ready=("pserver.0",))
    assert isinstance(action, Release)
    assert (action.roles, action.why) == (("trainer",), "all places of pserver are ready")


def test_a_pod_has_not_succeeded_if_some_of_its_workers_never_started() -> None:
    """They waited for another role when an agent that left had the pod stopped."""
    job = make_job(spec=roles_spec(*AFTER))
    step = decide(make_cluster(["n1", "n2"], job), job, WALL).step
    assert isinstance(step, Propose)
    generation = make_generation(["n1", "n2"]).model_copy(update={"members": step.members})
    running = make_job(spec=job.spec, phase="running", generation=generation)
    status = PodStatus(
        uid=UID, phase="exited", generation=generation.token, highest=generation.token, exits=(make_exit(0, code=0),),
        workers=(WorkerState(rank=0, local_rank=0, pid=7, state="exited", exit=0),),
    )  # fmt: skip
    found = plan_node(make_cluster(["n1", "n2"], running), "n1", Incarnation(life="life-n1", start=1), {UID: status}, 1)
    assert isinstance(found[0], ReportPod)
    assert found[0].report.state == "fenced"


def test_a_place_whose_workers_have_ended_well_keeps_nobody_waiting() -> None:
    """Its pod says nothing of what is ready any more, and may have ended before it was seen to be."""
    both = {"n1": reported("pserver.0"), "n2": PodReport(state="succeeded")}
    assert isinstance(next_action(both, ready=("pserver.0",)), Release)
    left = {"n1": reported("pserver.0"), "n2": PodReport(state="left")}
    assert not isinstance(next_action(left, ready=("pserver.0",)), Release)


def test_a_doomed_generation_starts_nobody() -> None:
    both = {
        "n1": reported("pserver.0"),
        "n2": failed(make_exit(2, code=7)).model_copy(update={"ready": ("pserver.1",)}),
    }
    assert not isinstance(next_action(both, ready=("pserver.0",)), Release)


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
