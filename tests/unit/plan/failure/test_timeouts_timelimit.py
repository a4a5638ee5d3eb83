"""Time limits: what counts, and what happens at the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.job import Desired, JobRecord, Outcome, Phase
from nodeagent.plan.failure.timeouts import spoken
from nodeagent.plan.job.gang import decide
from nodeagent.plan.steps import End
from tests.unit.plan.build import NOW, REPEATABLE, SUCCEEDED, WALL, make_cluster, make_generation, make_job, make_spec

LIMIT = 7200.0
LIMITED = make_spec(size=(2, 2), time_limit=LIMIT)


def a_job(
    phase: Phase = "running", *, ran: int = 0, since: int = NOW, first: int = 0, desired: Desired = "run"
) -> JobRecord:
    generation = make_generation(["n1", "n2"], state="ended" if phase in ("holding", "paused") else "active")
    job = make_job(phase, generation, spec=LIMITED, since=since, desired=desired, active=1)
    return job.model_copy(update={"ran": ran, "first_active": first})


@pytest.mark.parametrize("phase", ["running", "holding"])
def test_a_job_whose_time_is_over_is_stopped_in_order(phase: Phase) -> None:
    job = a_job(phase, ran=7_200_000)
    text = "its time limit of 2 h is reached"
    end = End("failed", text, (), Outcome(code=124, text=text), planned=True)
    assert decide(make_cluster(["n1", "n2"], job), job, WALL).step == end


def test_a_millisecond_before_it_runs_on_and_is_looked_at_again_then() -> None:
    job = a_job(ran=7_100_000)
    before = decide(make_cluster(["n1", "n2"], job, served=NOW + 99_999), job, WALL)
    assert (before.step, before.at, before.steady) == (None, NOW + 100_000, True)
    assert isinstance(decide(make_cluster(["n1", "n2"], job, served=NOW + 100_000), job, WALL).step, End)


def test_what_came_before_its_first_start_does_not_count() -> None:
    job = a_job(since=NOW - 9_000_000, first=NOW)
    assert job.time_left(NOW + 1000) == LIMIT - 1
    queued = make_job("queued", spec=LIMITED, since=0)
    assert queued.time_left(NOW) == LIMIT


@pytest.mark.parametrize("phase", ["queued", "holding", "paused"])
def test_it_stands_still_while_others_may_have_the_nodes(phase: Phase) -> None:
    job = a_job(phase, ran=1000, since=0)
    assert job.time_left(NOW) == job.time_left(10 * NOW) == LIMIT - 1


def test_who_has_finished_has_succeeded_and_who_is_to_be_paused_is_paused() -> None:
    job = a_job(ran=7_200_000)
    generation = make_generation(["n1", "n2"], reports={"n1": SUCCEEDED, "n2": SUCCEEDED})
    done = job.model_copy(update={"generation": generation})
    step = decide(make_cluster(["n1", "n2"], done), done, WALL).step
    assert isinstance(step, End)
    assert step.phase == "succeeded"
    paused = a_job(ran=7_200_000, desired="pause")
    step = decide(make_cluster(["n1", "n2"], paused), paused, WALL).step
    assert isinstance(step, End)
    assert step.phase == "pausing"


@REPEATABLE
@given(st.integers(0, 8_000_000), st.integers(0, 8_000_000))
def test_it_ends_exactly_when_nothing_is_left(ran: int, more: int) -> None:
    job = a_job(ran=ran)
    cluster = make_cluster(["n1", "n2"], job, served=NOW + more)
    ends = isinstance(decide(cluster, job, WALL).step, End)
    assert ends == (job.time_left(cluster.served) == 0.0) == (ran + more >= 7_200_000)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7200, "2 h"), (5400, "1 h 30 min"), (90, "90 s"), (60, "1 min"), (150, "2 min 30 s"), (0.5, "0.5 s"),
     (86400, "1 d"), (90000, "1 d 1 h"), (3601, "3601 s")],
)  # fmt: skip
def test_durations_for_people(seconds: float, text: str) -> None:
    assert spoken(seconds) == text
