"""Which records of ended jobs go."""

from __future__ import annotations

import pytest

from nodeagent.model.job import Control, JobRecord, Phase
from nodeagent.plan.queueing.dependencies import (
    AFTER,
    AT_ONCE,
    IN_VIEW,
    SHELVED_AT_ONCE,
    SKEW,
    believed,
    due_for_history,
    history_room,
    keeps_history,
    outlived,
)
from tests.unit.plan.build import NOW, WALL, make_cluster, make_generation, make_job, make_node, make_spec

DAY = 86_400.0


def ended(i: int, ago: float, phase: Phase = "succeeded", **more: object) -> JobRecord:
    job = make_job(phase, uid=f"u-{i}", spec=make_spec(name=f"j{i}"), order=i, since=NOW - int(1000 * ago), **more)  # type: ignore[arg-type]
    return job.model_copy(update={"ended": WALL - ago})


def gone(*jobs: JobRecord, keep_for: float = 7 * DAY, keep: int = 200) -> list[str]:
    return [job.name for job in outlived(make_cluster(["n1"], *jobs), WALL, keep_for, keep)]


def test_a_clock_that_is_far_ahead_makes_nothing_old() -> None:
    """It removed the record of every ended job of the cluster, and the history."""
    cluster = make_cluster(["n1"], ended(1, 8 * DAY), ended(2, 600))
    for ahead in (SKEW - 1000, 8 * DAY, 365 * DAY):
        assert [job.name for job in outlived(cluster, WALL + ahead, 7 * DAY, 200)] == ["j1"]
    assert believed(cluster, WALL + 365 * DAY) == WALL
    assert believed(cluster, WALL + SKEW) == WALL + SKEW, "the store may have stood still for a while"
    assert believed(cluster, WALL - 365 * DAY) == WALL - 365 * DAY, "one that is behind keeps all for longer"


def test_a_job_that_started_later_shows_what_time_it_is() -> None:
    """The store may have been away for long; of a clock that nothing confirms nothing is old."""
    started = make_job("running", make_generation(["n1"]), uid="u-r")
    started = started.model_copy(update={"started": WALL + DAY - 60, "first_active": NOW - 60_000})
    assert believed(make_cluster(["n1"], ended(1, 600), started), WALL + DAY) == WALL + DAY
    assert believed(make_cluster(["n1"]), 1e9) == 0.0


@pytest.mark.parametrize("phase", ["succeeded", "failed", "stopped"])
def test_what_ended_longer_ago_than_is_kept_goes(phase: Phase) -> None:
    assert gone(ended(1, 8 * DAY, phase), ended(2, 6 * DAY, phase)) == ["j1"]
    assert gone(ended(1, 8 * DAY, phase), keep_for=30 * DAY) == []


def test_only_the_newest_stay_and_the_oldest_go_first_a_few_at_a_time() -> None:
    jobs = [ended(i, i) for i in range(1, 31)]
    assert gone(*jobs, keep=28) == ["j30", "j29"]
    assert gone(*jobs, keep=0) == [f"j{i}" for i in range(30, 30 - AT_ONCE, -1)]


def test_a_user_with_many_jobs_removes_no_others() -> None:
    """However many a user submits and stops, and however old the others' are."""
    failed = [ended(i, DAY + i, "failed", owner=0) for i in range(3)]
    flood = [ended(100 + i, i, "stopped", owner=1000) for i in range(50)]
    assert gone(*failed, *flood, keep=45) == ["j149", "j148", "j147", "j146", "j145"]


def test_of_all_users_together_ten_times_as_many_stay_and_who_has_most_gives_way() -> None:
    few = [ended(1000 + i, DAY, owner=i) for i in range(30)]
    some = [ended(i, i, owner=99) for i in range(1, 5)]
    assert gone(*few, *some, keep=4) == []
    assert gone(*few, *(ended(2000 + i, i, owner=98) for i in range(1, 8)), keep=4) == ["j2007", "j2006", "j2005"]
    assert gone(*few, *some, *(ended(3000 + i, DAY, owner=50 + i) for i in range(8)), keep=4) == ["j4", "j3"]


def test_what_never_ran_goes_before_what_did() -> None:
    ran = [ended(i, 1000 + i).model_copy(update={"first_active": 5}) for i in range(3)]
    assert gone(*ran, *(ended(10 + i, i) for i in range(3)), keep=3) == ["j12", "j11", "j10"]


def test_what_has_not_ended_or_may_still_run_somewhere_stays() -> None:
    live = make_job("running", make_generation(["n1"]), uid="u-r")
    stops = ended(2, 8 * DAY, "stopped", generation=make_generation(["n1"], state="ended", holders=["n1"]))
    assert gone(live, stops, keep=0) == []


def test_what_a_failsafe_member_may_lend_time_to_stays_and_keeps_no_other_back() -> None:
    lent = [ended(i, 1000 + i).model_copy(update={"failsafe_members": {"n9": "l9"}}) for i in range(4 * AT_ONCE)]
    assert gone(*lent, ended(99, 500), keep=0) == ["j99"]
    assert shelved(*lent) == []


def shelved(*jobs: JobRecord) -> list[str]:
    return [job.name for job in due_for_history(make_cluster(["n1"], *jobs), WALL)]


def test_the_newest_stay_in_the_view_and_the_oldest_go_to_the_history_a_step_at_a_time() -> None:
    jobs = [ended(i, 1000 + i) for i in range(IN_VIEW + 2)]
    assert shelved(*jobs) == [f"j{IN_VIEW + 1}", f"j{IN_VIEW}"]
    assert shelved(*jobs[:IN_VIEW]) == []
    many = [ended(i, 1000 + i) for i in range(IN_VIEW + 2 * SHELVED_AT_ONCE)]
    assert len(shelved(*many)) == SHELVED_AT_ONCE


def test_what_has_just_ended_runs_somewhere_or_is_to_be_deleted_does_not_go_there() -> None:
    newest = [ended(i, i) for i in range(IN_VIEW)]
    assert shelved(*newest, ended(98, AFTER - 1)) == []
    assert shelved(*newest, ended(98, AFTER + 1)) == ["j98"]
    stops = ended(98, 9000, "stopped", generation=make_generation(["n1"], state="ended", holders=["n1"]))
    deleted = ended(98, 9000).model_copy(update={"control": Control(rev=1, target=1, delete=True)})
    live = make_job("running", make_generation(["n1"]), uid="u-r")
    for job in (stops, deleted, live):
        assert shelved(*newest, job) == []


def test_both_together_are_as_many_as_are_kept() -> None:
    assert [history_room(keep) for keep in (0, IN_VIEW, IN_VIEW + 1, 200)] == [0, 0, 1, 200 - IN_VIEW]


def test_one_node_keeps_the_history() -> None:
    cluster = make_cluster(["n2", "n10", "n1"])
    assert [n for n in cluster.nodes if keeps_history(cluster, n)] == ["n1"]
    lapsed = make_cluster(["n2", "n10", "n1"], lapsed=["n1"])
    assert [n for n in lapsed.nodes if keeps_history(lapsed, n)] == ["n2"]


def test_a_node_whose_agent_is_silent_keeps_no_history() -> None:
    """While its lease lives on nobody moved records there."""
    cluster = make_cluster([make_node("n1", mute=True), "n2", "n3"])
    assert [n for n in cluster.nodes if keeps_history(cluster, n)] == ["n2"]
    alone = make_cluster([make_node("n1", mute=True), make_node("n2", mute=True)])
    assert [n for n in alone.nodes if keeps_history(alone, n)] == ["n1"], "whoever reads that speaks"
