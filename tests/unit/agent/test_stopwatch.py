"""The phases of a recovery: what is measured from where to where, told once, by one agent."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nodeagent.agent.stopwatch import REPORT_AFTER, STEP_BOUND, Recovery, Stopwatch
from nodeagent.model.job import JobRecord
from nodeagent.model.pod import PodPhase
from nodeagent.model.world import Ack, PodReport, Token
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import UID, failed, life, make_exit, make_generation, make_job

OLD, NEW = Token(number=1, id="g1"), Token(number=2, id="g2")
FAULT = failed(make_exit(signal=9)).model_copy(update={"detected": 0.004})


class Watched:
    """One agent's stopwatch and its clock."""

    def __init__(self, node: str = "n1") -> None:
        self.watch, self.now = Stopwatch(node), 100.0

    def see(
        self, after: float, job: JobRecord, phase: PodPhase, generation: Token = OLD, stepped: float | None = None
    ) -> None:
        self.now += after
        status = PodStatus(uid=UID, phase=phase, generation=generation, stepped=stepped)
        self.watch.look({job.uid: job}, {job.uid: status}, self.now)

    def reported(self, job: JobRecord) -> list[Recovery]:
        return self.watch.finished({job.uid: job}, self.now)

    def counted(self, job: JobRecord) -> list[Recovery]:
        return self.watch.over({job.uid: job})


def running(
    number: int = 1, *, restarts: int = 1, took: tuple[float, float] = (0.0, 0.0), **more: PodReport
) -> JobRecord:
    """``took``: the longest until quiet, and then until acknowledged."""
    generation = make_generation(("n1", "n2"), number=number, cause="worker_failed", reports=more)
    return make_job("running", generation.model_copy(update={"stopped": took[0], "ready": took[1]}), restarts=restarts)


def forming(number: int = 2, last: Mapping[str, PodReport] | None = None) -> JobRecord:
    generation = make_generation(
        ("n1", "n2"), state="forming", number=number, holders=("n1", "n2"), cause="worker_failed"
    )
    return make_job("forming", generation, active=1, last_reports=last)


def phases(recovery: Recovery) -> dict[str, float]:
    return {name: round(seconds, 6) for name, seconds in recovery.phases.items()}


def recover(seen: Watched, restarts: int = 1) -> JobRecord:
    """A worker of n2 dies; n1 knows after 4 ms, and 10, 20, 3, 5 and 7 ms later the next thing."""
    seen.see(0.0, running(), "running")
    seen.see(5.0, running(n2=FAULT), "running")
    seen.see(0.010, forming(), "stopping")
    seen.see(0.020, forming(), "exited")
    seen.now += 0.003
    mine = seen.watch.stamp(UID, NEW, Ack(life=life("n1")), seen.now)
    assert (mine.stopped, mine.ready) == (0.02, 0.003)
    again = running(2, restarts=restarts, took=(0.025, mine.ready))
    seen.see(0.005, again, "exited")
    seen.see(0.0, again, "starting", NEW)
    seen.see(0.007, again, "running", NEW)
    return again


def test_each_phase_from_the_fault_to_the_start() -> None:
    seen = Watched()
    job = recover(seen)
    assert seen.reported(job) == [], "the first steps come first"
    seen.now += REPORT_AFTER
    (recovery,) = seen.reported(job)
    assert (recovery.uid, recovery.token, recovery.cause) == (UID, NEW, "worker_failed")
    assert phases(recovery) == {
        "detected": 0.004, "stopped": 0.025, "acknowledged": 0.003, "formed": 0.038, "started": 0.007, "whole": 0.049,
    }  # fmt: skip
    assert recovery.text == (
        "workers run again after 0.049 s: "
        "detected 0.004, stopped 0.025, acknowledged 0.003, formed 0.038, started 0.007"
    )
    assert seen.reported(job) == [], "once"


def test_it_is_counted_at_once_and_once() -> None:
    seen = Watched()
    job = recover(seen)
    (recovery,) = seen.counted(job)
    assert phases(recovery)["whole"] == 0.049
    seen.see(0.3, running(2, n2=FAULT), "running", NEW)  # the next fault comes before it could be told
    seen.see(0.01, forming(3), "stopping", NEW)
    assert seen.counted(job) == seen.reported(job) == []


def test_the_first_step_of_those_who_tell_it() -> None:
    seen = Watched()
    job = recover(seen)
    seen.see(0.3, job, "running", NEW, stepped=seen.now + 0.125)
    seen.now += REPORT_AFTER
    (recovery,) = seen.reported(job)
    assert phases(recovery)["stepped"] == 0.125
    assert phases(recovery)["whole"] == 0.049, "to the start, as ever"
    assert recovery.text.endswith("started 0.007, stepped 0.125")


def test_a_late_first_step_is_waited_for_where_one_was_reported_before() -> None:
    seen = Watched()
    seen.see(0.0, running(), "running", OLD, stepped=seen.now)
    job = recover(seen)
    seen.now += STEP_BOUND / 2
    assert seen.reported(job) == []
    seen.see(0.0, job, "running", NEW, stepped=seen.now)
    assert phases(seen.reported(job)[0])["stepped"] == STEP_BOUND / 2

    seen = Watched()
    seen.see(0.0, running(), "running", OLD, stepped=seen.now)
    job = recover(seen)
    seen.now += STEP_BOUND
    assert "stepped" not in phases(seen.reported(job)[0]), "it may have stopped telling"


def test_only_group_rank_0_tells() -> None:
    seen = Watched("n2")
    job = recover(seen)
    assert seen.counted(job) == []
    seen.now += REPORT_AFTER
    assert seen.reported(job) == []


def first_start(seen: Watched) -> JobRecord:
    """Formed in 50 ms; the workers run after another 400 ms."""
    seen.see(0.0, forming(1), "ready")
    job = running(1, restarts=0)
    seen.see(0.05, job, "starting")
    seen.see(0.4, job, "running")
    return job


def test_a_first_start_lasts_until_the_first_step() -> None:
    """Imports and loading take the time that they take, and are no recovery."""
    seen = Watched()
    job = first_start(seen)
    seen.now += STEP_BOUND - 1
    assert seen.reported(job) == [] == seen.counted(job)
    seen.see(0.5, job, "running", stepped=seen.now - 90.0)
    (start,) = seen.reported(job)
    assert start.first and start.at == seen.now - 90.5
    assert start.text == (
        "workers run after 0.450 s: stopped 0.000, acknowledged 0.000, formed 0.050, started 0.400, stepped 509.000"
    )
    assert seen.reported(job) == [], "once"


@pytest.mark.parametrize(("reported", "stepped"), [(-1e12, 0.0), (1e12, 600.1)])
def test_a_first_step_before_the_start_or_still_to_come_is_none_of_any_shim(reported: float, stepped: float) -> None:
    seen = Watched()
    job = first_start(seen)
    seen.now += STEP_BOUND
    seen.see(0.1, job, "running", stepped=reported)
    (start,) = seen.reported(job)
    assert start.phases["stepped"] == pytest.approx(stepped)


def test_of_a_first_start_without_steps_nothing_is_known() -> None:
    seen = Watched()
    job = first_start(seen)
    seen.now += STEP_BOUND
    assert seen.reported(job) == []
    seen.see(0.0, job, "running", stepped=seen.now)
    assert seen.reported(job) == []


def test_others_than_group_rank_0_do_not_wait_for_a_first_step() -> None:
    seen = Watched("n2")
    job = first_start(seen)
    seen.now += REPORT_AFTER
    assert seen.reported(job) == []
    seen.see(0.0, job, "running", stepped=seen.now)
    assert seen.reported(job) == []


def test_nobody_has_to_look_while_a_first_step_is_awaited() -> None:
    """It comes with the pod's status: an agent at rest stays at rest."""
    seen, looks = Watched(), list[bool]()
    seen.see(0.0, forming(1), "ready")
    looks.append(seen.watch.running)
    job = first_start(seen)
    looks.append(seen.watch.running)
    seen.see(0.1, job, "running", stepped=seen.now)
    looks.append(seen.watch.running)
    seen.now += REPORT_AFTER
    assert len(seen.reported(job)) == 1
    assert [*looks, seen.watch.running] == [True, False, True, False], "while it forms, and once it has stepped"


def test_who_has_no_part_in_a_gang_does_not_wait_for_it() -> None:
    """Every agent of a large cluster went on looking each heartbeat, for good, once it had seen some job form."""
    for node in ("n3", "n2"):
        seen, spare = Watched(node), node == "n3"
        seen.see(0.0, forming(1), "ready")
        assert seen.watch.running is not spare
        seen.see(0.1, running(), "ready")
        assert seen.watch.running is not spare
    without = make_job("forming", make_generation(("n1", "n3"), state="forming", number=2), active=1)
    seen.see(0.1, without, "exited")
    assert not seen.watch.running, "the next generation has no place for it"


@pytest.mark.parametrize("whole", [False, True])
def test_nobody_waits_for_the_start_of_a_gang_that_has_ended(whole: bool) -> None:
    seen, looks = Watched(), list[bool]()

    def see(after: float, job: JobRecord, generation: Token = OLD) -> None:
        seen.see(after, job, "running" if generation.number == 3 else "exited", generation)
        looks.append(seen.watch.running)

    see(0.0, forming())
    if whole:
        see(0.1, running(2))
    see(0.1, make_job("holding", make_generation(("n1", "n2"), state="ended", number=2), active=1))
    see(5.0, forming(3))
    see(0.2, running(3))
    assert looks == [True] * (1 + whole) + [False, True, True]
    see(0.0, running(3), Token(number=3, id="g3"))
    (recovery,) = seen.counted(running(3))
    assert phases(recovery)["formed"] == (0.2 if whole else 5.3), "from what had led to it"


def test_a_fault_that_comes_with_the_proposal_and_a_second_one_while_forming() -> None:
    """The time runs from the first of them."""
    seen = Watched()
    seen.see(0.0, running(), "running")
    seen.see(1.0, forming(2, {"n2": FAULT}), "stopping")
    seen.see(0.5, forming(3, {"n2": FAULT}), "exited")
    seen.see(0.25, running(3), "exited")
    seen.see(0.0, running(3), "running", Token(number=3, id="g3"))
    seen.now += REPORT_AFTER
    (recovery,) = seen.reported(running(3))
    assert phases(recovery)["detected"] == 0.004
    assert phases(recovery)["formed"] == 0.75


def test_one_that_is_broken_again_before_it_is_reported_is_not_counted_for_the_next() -> None:
    seen = Watched()
    recover(seen)
    seen.see(0.1, running(2, n1=FAULT), "stopping", NEW)
    again = forming(3).model_copy(update={"last_number": 2})
    seen.see(0.1, again, "exited", NEW)
    seen.now += REPORT_AFTER
    assert seen.reported(again) == []


def test_an_agent_that_was_not_there_stamps_and_tells_nothing() -> None:
    seen = Watched()
    ack = Ack(life=life("n1"))
    assert seen.watch.stamp(UID, NEW, ack, seen.now) == ack
    seen.see(0.0, running(2), "running", NEW)
    seen.now += REPORT_AFTER
    assert seen.reported(running(2)) == []


def test_jobs_that_are_gone_are_forgotten() -> None:
    seen = Watched()
    job = recover(seen)
    seen.watch.look({}, {}, seen.now)
    seen.now += REPORT_AFTER
    assert seen.reported(job) == []
