"""How long the workers that a node stops may take: the gang's grace, a role's own, or none; and what they write."""

from __future__ import annotations

import pytest

from nodeagent.model.job import Checkpoint, JobRecord
from nodeagent.model.world import Place, PodReport
from nodeagent.plan.pods.actions import SendAck, Stop
from nodeagent.pods.base import GivenUp
from tests.unit.plan.build import make_exit, make_generation, make_job, make_spec
from tests.unit.plan.pods.podstates import OLD, RUNNING, act, ended_generation, forming, status


def test_first_it_stops_what_is_older_with_grace_only_if_planned() -> None:
    old = status("running", generation=OLD, highest=OLD, workers=RUNNING)
    at_once = act(forming(), old)
    assert isinstance(at_once, Stop)
    assert (at_once.grace, at_once.why) == (None, "generation 2 is forming: because of restart")
    planned = act(forming(planned=True), old)
    assert isinstance(planned, Stop)
    assert planned.grace == 30.0
    for of_generation, grace in ((7.0, 7.0), (0.0, 0.0), (None, 30.0)):
        generation = make_generation(
            ["n1"], state="forming", number=2, holders=["n1", "n2"], planned=True, grace=of_generation
        )
        for node in ("n1", "n2"):  # one stays, one leaves: a scale-in's own time is for both
            reported = act(make_job("forming", generation, active=1), old, node=node)
            assert isinstance(reported, Stop)
            assert reported.grace == grace
    stopping = act(forming(), status("stopping", generation=OLD, highest=OLD))
    assert isinstance(stopping, Stop), "asked again until it is seen: a shorter grace overrides a longer one"


def broken(job: JobRecord) -> bool:
    stop = act(job, status("running", generation=OLD, highest=OLD, workers=RUNNING))
    assert isinstance(stop, Stop)
    assert stop.grace == (30.0 if job.generation is not None and job.generation.planned else None)
    return stop.broken


@pytest.mark.parametrize(
    ("own", "of_generation", "grace", "sooner"),
    [
        ((None, None), None, 30.0, {}),
        ((5.0, None), None, 30.0, {"server": 5.0}),
        ((5.0, 60.0), None, 60.0, {"server": 5.0}),
        ((5.0, None), 90.0, 90.0, {"server": 5.0}),
        ((5.0, 60.0), 2.0, 2.0, {}),
        ((5.0, 6.0), None, 6.0, {"server": 5.0}),
    ],
)
def test_each_role_has_its_own_grace(
    own: tuple[float | None, float | None], of_generation: float | None, grace: float, sooner: dict[str, float]
) -> None:
    spec = make_spec()
    named = zip(("server", "trainer"), own, strict=True)
    roles = tuple(spec.role.model_copy(update={"name": name, "grace": seconds}) for name, seconds in named)
    generation = make_generation(["n1"], state="ended", number=2, holders=["n1"], planned=True, grace=of_generation)
    places = tuple(Place(role=role.name, index=0, workers=1, devices=("cpu0",)) for role in roles)
    held = {"n1": generation.holders["n1"].model_copy(update={"places": places})}
    job = make_job(
        "holding", generation.model_copy(update={"holders": held}), spec=spec.model_copy(update={"roles": roles})
    )
    stop = act(job, status("running", generation=OLD, highest=OLD, workers=RUNNING))
    assert isinstance(stop, Stop)
    assert (stop.grace, stop.sooner) == (grace, sooner)


def test_who_waits_for_a_rank_that_died_as_it_left_is_not_left_to_its_grace() -> None:
    missed = PodReport(state="left", exits=(make_exit(1, signal=9, stopped=True).model_copy(update={"missed": True}),))
    died = PodReport(state="failed", exits=(make_exit(1, signal=9),))  # before its node had heard that they leave
    well = PodReport(state="left", exits=(make_exit(1, code=0, stopped=True),))
    for report in (None, PodReport(state="left"), well, missed, died):
        for planned in (True, False):
            job = forming(planned=planned).model_copy(update={"last_reports": {"n2": report} if report else {}})
            assert broken(job) == (report in (missed, died) and planned)


def test_nor_is_who_waits_for_a_node_that_was_lost_as_it_left() -> None:
    lost = make_generation(["n1"], state="forming", number=2, cause="node_lost", holders=["n1"], planned=True)
    assert broken(make_job("forming", lost, active=1))
    before = make_generation(["n1"], state="ended", cause="node_lost", holders=["n1"], planned=True)
    assert not broken(make_job("pausing", before, active=1)), "that was why it had formed"


@pytest.mark.parametrize(
    ("holders", "members", "given_up"),
    [
        (("n1", "n2"), ("n1", "n2"), None),
        (("n1", "n2"), ("n1", "n2", "n3"), None),
        (("n1", "n2"), ("n1", "n3"), GivenUp(stays=True, world=2, since=(1, 40))),
        (("n1", "n2"), ("n1",), GivenUp(stays=True, world=1, since=(1, 40))),
        (("n1",), ("n2",), GivenUp(stays=False, world=1, since=(1, 40))),
    ],
)
def test_snapshots_are_written_out_where_a_node_of_the_gang_is_given_up(
    holders: tuple[str, ...], members: tuple[str, ...], given_up: GivenUp | None
) -> None:
    checkpoint = Checkpoint(name="c", step=40, number=1, order=2)
    old = status("running", generation=OLD, highest=OLD, workers=RUNNING)
    for planned in (True, False):
        job = forming(holders, members=members, planned=planned).model_copy(update={"checkpoint": checkpoint})
        for node in holders:  # also those that stay: their parts may be needed
            stop = act(job, old, node=node, nodes=("n1", "n2", "n3"))
            assert isinstance(stop, Stop)
            assert stop.given_up == (given_up if planned else None)


def test_a_node_in_another_life_does_not_stay() -> None:
    job = forming(planned=True)
    assert job.generation is not None
    reborn = {**job.generation.members, "n2": job.generation.members["n2"].model_copy(update={"life": "another"})}
    job = job.model_copy(update={"generation": job.generation.model_copy(update={"members": reborn})})
    stop = act(job, status("running", generation=OLD, highest=OLD, workers=RUNNING))
    assert isinstance(stop, Stop)
    assert stop.given_up == GivenUp(stays=True, world=2)


def test_when_the_whole_gang_is_stopped_all_of_it_is_written_and_that_is_reported() -> None:
    job = make_job("pausing", ended_generation("n1", "n2"), active=1)
    stop = act(job, status("running", generation=OLD, highest=OLD, workers=RUNNING))
    assert isinstance(stop, Stop)
    assert stop.given_up == GivenUp(stays=False, world=0)
    last = job.model_copy(update={"last_number": 1})
    ack = act(last, status("exited", generation=OLD, highest=OLD, written="snapshot of step 7 written out in 0.10 s"))
    assert isinstance(ack, SendAck)
    assert ack.last == PodReport(state="left", reason="snapshot of step 7 written out in 0.10 s")
