"""What a node does for an active generation: start, release, report, stop what has failed."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.world import Generation, Place, PodReport, WorkerExit
from nodeagent.plan.pods.actions import ReportPod, Start, Stop, asks_the_store
from nodeagent.plan.pods.running import MOST_STANDING, standing
from nodeagent.pods.base import PodStatus
from tests.unit.plan.build import SUCCEEDED, UID, failed, life, make_cluster, make_exit, make_generation, make_job
from tests.unit.plan.pods.podstates import ENDED, NEW, OLD, RUNNING, act, active, acts, forming, status


def test_a_stuck_pod_of_an_active_generation_is_reported_once() -> None:
    """What its shim saw counts, if it saw the end of its workers; else they are lost with it."""
    orphan = status("stuck", reason="the shim died, and processes 7 do not end, even with SIGKILL")
    report = act(active(), orphan)
    assert isinstance(report, ReportPod)
    assert (report.report.state, report.report.reason) == ("lost", orphan.reason)
    assert act(active({"n1": report.report}), orphan) == Stop(UID, None, "what runs here does not end")
    fenced = act(active(), status("stuck", generation=NEW, highest=NEW, fenced=True))
    assert isinstance(fenced, ReportPod)
    assert fenced.report.state == "fenced"


def test_it_starts_when_active_and_promised() -> None:
    assert act(active(), status("ready", highest=NEW)) == Start(UID, NEW, "generation 2 is active")
    assert act(active(), status("exited", generation=OLD, highest=NEW)) == Start(UID, NEW, "generation 2 is active")


def test_without_a_promise_it_refuses() -> None:
    shown = act(active(), status("ready", highest=OLD))
    assert isinstance(shown, ReportPod)
    assert shown.report.state == "refused"


def test_what_runs_of_an_older_generation_is_killed_first() -> None:
    assert act(active(), status("running", generation=OLD, highest=NEW, workers=RUNNING)) == Stop(
        UID, None, "generation 2 is active"
    )
    unknown = status("stuck", highest=NEW)
    assert isinstance(act(active(), unknown), ReportPod), "nothing is started beside what lives, whatever it is"


def test_an_agent_that_comes_back_leaves_running_workers_alone() -> None:
    for phase in ("starting", "running"):
        assert act(active(), status(phase, generation=NEW, highest=NEW, workers=RUNNING)) is None


def test_it_reports_what_changes_once() -> None:
    crashed = status("exited", generation=NEW, highest=NEW, workers=ENDED, exits=(make_exit(code=7),))
    shown = act(active(), crashed)
    assert isinstance(shown, ReportPod)
    assert (shown.report, shown.why) == (failed(make_exit(code=7), seq=0), "rank 0 failed: exit code 7")
    assert act(active({"n1": failed(make_exit(code=7), seq=4)}), crashed) is None
    more = crashed.model_copy(update={"exits": (make_exit(code=7), make_exit(1, signal=9, order=1))})
    assert isinstance(act(active({"n1": failed(make_exit(code=7), seq=4)}, workers=2), more), ReportPod)


def test_a_shim_that_is_gone_took_its_workers_with_it() -> None:
    shown = act(active(), None)
    assert isinstance(shown, ReportPod)
    assert shown.report == PodReport(state="lost", reason="its shim is gone, and its workers with it")
    shown = act(active(), status("gone", reason="the shim was killed"))
    assert isinstance(shown, ReportPod)
    assert shown.why == "the shim was killed"
    assert act(active({"n1": shown.report}), status("gone", reason="the shim was killed")) is None


def test_a_shim_that_goes_after_its_workers_had_ended_changes_nothing() -> None:
    for sent in (SUCCEEDED, failed(make_exit(code=7))):
        assert act(active({"n1": sent}), status("gone")) is None
        assert act(active({"n1": sent}), None) is None


def test_workers_that_were_stopped_under_an_active_generation_are_reported() -> None:
    """Found by the simulation: whoever stopped them left, the goodbye was lost, and the next start came within the
    lease: nobody ever noticed that nothing ran."""
    killed = make_exit(0, signal=9, stopped=True)
    stopped = status("exited", generation=NEW, highest=NEW, workers=ENDED, exits=(killed,))
    reported = act(active(), stopped)
    assert isinstance(reported, ReportPod)
    assert (reported.report.state, reported.report.reason) == (
        "fenced",
        "an agent that left this node stopped its workers",
    )
    ended = stopped.model_copy(update={"generation": OLD})
    assert not isinstance(act(forming(), ended), ReportPod), "stopped as planned"


# --- a worker has failed by itself


def running_at(generation: Generation, *exits: WorkerExit) -> PodStatus:
    return status("running", generation=generation.token, highest=generation.token, workers=RUNNING, exits=exits)


def test_who_has_a_worker_that_failed_stops_the_others_and_tells_the_store_meanwhile() -> None:
    generation = make_generation(["n1", "n2"], number=2, workers=2)
    crash = make_exit(1, code=7)
    first, second = acts(make_job("running", generation), running_at(generation, crash))
    assert first == Stop(UID, None, "rank 1 on n1 failed first: exit code 7")
    assert isinstance(second, ReportPod)
    assert second.report == PodReport(state="failed", exits=(crash,))
    assert (asks_the_store(first), asks_the_store(second)) == (False, True)


def test_who_hears_of_it_does_not_wait_for_the_next_generation_either() -> None:
    crash = make_exit(1, code=7)
    generation = make_generation(["n1", "n2"], number=2, reports={"n2": failed(crash)})
    job = make_job("running", generation)
    assert acts(job, running_at(generation)) == (Stop(UID, None, "rank 1 on n2 failed first: exit code 7"),)
    killed = make_exit(0, signal=9, stopped=True)
    over = running_at(generation, killed).model_copy(update={"phase": "exited", "workers": ENDED})
    assert act(job, over) is None, "not reported as workers that somebody else stopped"
    late = running_at(generation, make_exit(0, code=3))
    assert [type(action) for action in acts(job, late)] == [Stop, ReportPod], "it failed too, which is told"
    assert act(job, status("ready", highest=generation.token)) is None, "not started any more"


def test_victims_do_not_doom_a_generation() -> None:
    """The one that failed first shall end by itself, or nobody would know of what."""
    victim = make_exit(1, code=1, error="RuntimeError: Connection closed by peer [127.0.0.1]:5")
    generation = make_generation(["n1", "n2"], number=2, reports={"n2": failed(victim)})
    assert act(make_job("running", generation), running_at(generation)) is None
    both = make_generation(["n1", "n2"], number=2, workers=2)
    mine = act(make_job("running", both), running_at(generation, victim))
    assert isinstance(mine, ReportPod)


def test_a_failure_is_reported_once_however_many_are_stopped_after_it() -> None:
    crash, killed = make_exit(1, code=7), make_exit(0, signal=9, stopped=True)
    generation = make_generation(["n1", "n2"], number=2, reports={"n1": failed(crash)})
    job = make_job("running", generation)
    dying = running_at(generation, crash, killed)
    assert acts(job, dying) == (Stop(UID, None, "rank 1 on n1 failed first: exit code 7"),)
    assert act(job, dying.model_copy(update={"phase": "exited"})) is None


def test_a_shim_that_names_roles_that_its_job_has_not_stops_no_agent() -> None:
    """The rule looked the name up: a KeyError that ended root's agent, and the next one, and the next."""
    generation = make_generation(["n1"], number=2)
    odd = running_at(generation).model_copy(
        update={"waiting": ("none",), "ready": ("none.7", ""), "rounds": {"none": 3, "": -1}, "down": ("none", "")}
    )
    assert acts(make_job("running", generation), odd) == (), "nothing of it is reported either"


def test_what_comes_after_nobody_is_not_released() -> None:
    """A shim that says that it waits was given the order in each round, and each time it was logged."""
    generation = make_generation(["n1"], number=2)
    job = make_job("running", generation)
    role = job.spec.roles[0].name
    place = Place(role=role, index=0, workers=1, devices=("cpu0",))
    member = generation.members["n1"].model_copy(update={"places": (place,)})
    job = make_job("running", generation.model_copy(update={"members": {"n1": member}}))
    assert acts(job, running_at(generation).model_copy(update={"waiting": (role,)})) == ()


# --- its agent cannot read or tell anything


NOT_STARTED = status("exited", generation=OLD, highest=NEW, workers=ENDED, exits=(make_exit(code=0),))
CRASHED = status("exited", generation=NEW, highest=NEW, workers=ENDED, exits=(make_exit(code=7),))
DONE = status("exited", generation=NEW, highest=NEW, workers=ENDED, exits=(make_exit(code=0),))
UP = status("running", generation=NEW, highest=NEW, workers=RUNNING)


@pytest.mark.parametrize(
    ("job", "pod", "barred", "still"),
    [
        (forming(), NOT_STARTED, 0, True),
        (forming(holders=(), acks=("n1",)), NOT_STARTED, 0, True),
        (forming(), None, 0, True),
        (forming(members=("n2",)), NOT_STARTED, 0, False),
        (active(), NOT_STARTED, 0, True),
        (active(), NOT_STARTED, 2, False),
        (active(), UP, 0, False),
        (active(), CRASHED, 0, True),
        (active(), CRASHED, 2, False),
        (active({"n1": failed(make_exit(code=7))}), CRASHED, 0, False),
        (active(), DONE, 0, False),
        (active({"n1": SUCCEEDED}), status("gone"), 0, False),
        (make_job("holding", make_generation(["n1"], state="ended")), NOT_STARTED, 0, False),
    ],
)
def test_what_others_may_wait_for_is_named_whatever_else_runs_on_the_node(
    job: JobRecord, pod: PodStatus | None, barred: int, still: bool
) -> None:
    pods = {UID: pod} if pod is not None else {}
    cluster = make_cluster(["n1", "n2"], job)
    named = {UID: 2} if still else {}
    assert standing(cluster, "n1", life("n1"), pods, lambda _uid: barred) == named
    busy = pods | {"another": UP.model_copy(update={"uid": "another"})}
    assert standing(cluster, "n1", life("n1"), busy, lambda _uid: barred) == named
    assert not standing(cluster, "n1", "reborn", pods, lambda _uid: barred), "a member in another life"


@pytest.mark.parametrize(("pod", "still"), [(NOT_STARTED, True), (DONE, False), (UP, False), (status("ready"), False)])
def test_an_agent_that_has_read_nothing_goes_by_what_its_pods_have_promised(pod: PodStatus, still: bool) -> None:
    pods = {"another": UP.model_copy(update={"uid": "another"}), UID: pod}
    assert standing(make_cluster(["n1"]), "n1", life("n1"), pods, lambda _uid: 1.0) == ({UID: 2} if still else {})
    assert not standing(make_cluster(["n1"]), "n1", life("n1"), pods, lambda _uid: 2.0), "it has been let go"


def test_of_many_jobs_that_stand_still_the_first_are_named_until_they_are_let_go() -> None:
    pods = {f"u{number}": NOT_STARTED for number in range(MOST_STANDING + 1)}
    barred = dict.fromkeys(pods, 0.0)
    first = standing(make_cluster(["n1"]), "n1", life("n1"), pods, barred.__getitem__)
    assert len(first) == MOST_STANDING
    barred |= dict.fromkeys(first, 2.0)
    rest = standing(make_cluster(["n1"]), "n1", life("n1"), pods, barred.__getitem__)
    assert first.keys() | rest.keys() == pods.keys()
