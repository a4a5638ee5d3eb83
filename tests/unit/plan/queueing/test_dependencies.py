"""Jobs that wait for a time, for other jobs, or for their turn in an array."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.job import USES_TIME, Desired, JobRecord, Outcome, Phase
from nodeagent.model.jobspec import After, Array, Need
from nodeagent.model.world import Token
from nodeagent.plan.cluster import Cluster, Notes
from nodeagent.plan.job.gang import decide
from nodeagent.plan.job.waiting import explain
from nodeagent.plan.queueing import queue
from nodeagent.plan.queueing.dependencies import blocked, due_for_history, outlived
from nodeagent.plan.steps import End, Propose, Remove, Settle
from tests.unit.plan.build import (
    NOW,
    READY,
    REPEATABLE,
    WALL,
    make_cluster,
    make_generation,
    make_job,
    make_node,
    make_spec,
)

NODES = ("n1", "n2", "n3")


def a_cluster(*jobs: JobRecord, slots: int = 4, served: int = NOW) -> Cluster:
    ready = {job.uid: READY for job in jobs}
    return make_cluster([make_node(n, slots=slots, ready=ready) for n in NODES], *jobs, served=served)


def prepared(phase: Phase, uid: str = "u-prepare") -> JobRecord:
    """The job that another comes after."""
    generation = (
        None if phase == "queued" else make_generation(["n1"], state="active" if phase == "running" else "ended")
    )
    job = make_job(phase, generation, uid=uid, spec=make_spec(size=(1, 1), name="prepare"), order=1)
    return job.model_copy(update={"ended": WALL}) if phase in ("succeeded", "failed", "stopped") else job


def train(need: Need = "ok", *, met: Iterable[str] = (), desired: Desired = "run") -> JobRecord:
    spec = make_spec(size=(1, 1), name="train", after=(After(uid="u-prepare", name="prepare", need=need),))
    job = make_job(spec=spec, uid="u-train", order=2, desired=desired)
    return job.model_copy(update={"control": job.control.model_copy(update={"met": tuple(met)})})


# --- begin


def test_a_job_waits_for_its_time_and_holds_up_nobody() -> None:
    later = make_job(
        spec=make_spec(size=(3, 3), name="later", begin=90_000.0), uid="u-later", not_before=NOW + 5, order=1,
        reason="begins then",
    )  # fmt: skip
    other = make_job(spec=make_spec(size=(3, 3), name="other"), uid="u-other", order=2)
    cluster = a_cluster(later, other)
    decision = decide(cluster, later, WALL)
    assert (decision.step, decision.why) == (None, ("begins then",))
    assert (decision.at, decision.steady) == (NOW + 5, True)
    assert isinstance(decide(cluster, other, WALL).step, Propose)
    then = replace(cluster, served=NOW + 5, notes=Notes())
    assert isinstance(decide(then, later, WALL).step, Propose)


# --- after


@pytest.mark.parametrize("phase", ["queued", "running"])
@pytest.mark.parametrize("need", ["ok", "any"])
def test_it_waits_for_the_end_of_another_and_holds_up_nobody(phase: Phase, need: Need) -> None:
    job, other = train(need), make_job(spec=make_spec(size=(1, 1), name="x"), uid="u-x", order=3)
    cluster = a_cluster(prepared(phase), job, other)
    decision = decide(cluster, job, WALL)
    verb = "succeed" if need == "ok" else "end"
    assert (decision.step, decision.why) == (None, (f"waits for job prepare to {verb} ({phase})",))
    assert decision.steady
    assert job.uid not in queue.places(cluster)
    assert explain(cluster, job, WALL) == ()
    assert isinstance(decide(cluster, other, WALL).step, Propose) == (phase == "running"), "prepare itself goes first"


@pytest.mark.parametrize(
    ("phase", "need"), [("succeeded", "ok"), ("succeeded", "any"), ("failed", "any"), ("stopped", "any")]
)
def test_it_notes_the_end_and_then_starts_however_long_the_record_is_kept(phase: Phase, need: Need) -> None:
    job = train(need)
    step = decide(a_cluster(prepared(phase), job), job, WALL).step
    assert isinstance(step, Settle)
    assert (step.control.met, step.event) == (("u-prepare",), "JobAfterMet")
    noted = train(need, met=["u-prepare"])
    assert isinstance(decide(a_cluster(noted), noted, WALL).step, Propose)


@pytest.mark.parametrize("phase", ["failed", "stopped"])
@pytest.mark.parametrize("desired", ["run", "pause"])
def test_it_never_runs_where_the_other_did_not_succeed(phase: Phase, desired: Desired) -> None:
    job = train(desired=desired)
    text = f"never ran: job prepare has {'been stopped' if phase == 'stopped' else phase}"
    expected = End("failed", text, (), Outcome(code=125, text=text))
    assert decide(a_cluster(prepared(phase), job), job, WALL).step == expected


def test_a_record_that_is_gone() -> None:
    job = train()
    step = decide(a_cluster(job), job, WALL).step
    assert isinstance(step, End)
    assert step.reason == "never ran: job prepare (uid u-prepare) was removed before it was known to have succeeded"
    anyhow = train("any")
    assert isinstance(decide(a_cluster(anyhow), anyhow, WALL).step, Settle)


def test_nothing_is_gone_while_a_part_of_the_view_is_still_to_be_read() -> None:
    job = train()
    assert decide(replace(a_cluster(job), partial=True), job, WALL).step is None
    anyhow = train("any")
    assert decide(replace(a_cluster(anyhow), partial=True), anyhow, WALL).step is None
    assert decide(replace(a_cluster(job), unread=frozenset({"u-prepare"})), job, WALL).step is None


@pytest.mark.parametrize("need", ["ok", "any"])
def test_nor_a_member_of_an_array_while_some_record_cannot_be_read(need: Need) -> None:
    """It may be the member's. One that did not succeed is enough to know, whatever the other did."""
    job, one = after_array(need), member(0, "succeeded", count=2)
    view = replace(a_cluster(one, job), unread=frozenset({"u-x"}))
    assert (decide(view, job, WALL).step, blocked(view, job)) == (
        None,
        "waits for array sweep, of which a record may be one that cannot be read",
    )
    assert decide(replace(view, unread=frozenset({one.uid}), notes=Notes()), job, WALL).step is not None
    failed = replace(a_cluster(member(0, "failed", count=2), job), unread=frozenset({"u-x"}))
    assert isinstance(decide(failed, job, WALL).step, End) is (need == "ok")
    both = replace(a_cluster(one, member(1, "succeeded", count=2), job), unread=frozenset({"u-x"}))
    assert isinstance(decide(both, job, WALL).step, Settle), "it is another job's"


def test_a_record_is_kept_until_those_that_come_after_have_noted_its_end() -> None:
    gone = prepared("failed")
    gone = gone.model_copy(update={"generation": None, "control": gone.control.model_copy(update={"delete": True})})
    job = train()
    cluster = a_cluster(gone, job)
    assert decide(cluster, gone, WALL).step is None
    assert outlived(cluster, 10 * WALL, 1.0, 0) == []
    noted = a_cluster(gone, train(met=["u-prepare"]))
    assert decide(noted, gone, WALL).step == Remove()
    assert outlived(noted, 10 * WALL, 1.0, 0) == [gone]
    crowd = [prepared("succeeded", uid=f"u-{i}") for i in range(30)]
    kept = prepared("succeeded")
    assert kept in due_for_history(a_cluster(kept, *crowd, train(met=["u-prepare"])), 10 * WALL)
    assert kept not in due_for_history(a_cluster(kept, *crowd, train()), 10 * WALL)


# --- ttl


def test_a_record_goes_when_its_own_time_is_over_and_not_later_than_others() -> None:
    def ended(ttl: float | None) -> JobRecord:
        job = make_job("succeeded", spec=make_spec(ttl=ttl))
        return job.model_copy(update={"ended": WALL})

    for ttl, after, gone in [(10.0, 9.0, False), (10.0, 11.0, True), (500.0, 101.0, True), (None, 99.0, False)]:
        job = ended(ttl)
        assert outlived(a_cluster(job), WALL + after, 100.0, 50) == ([job] if gone else [])


# --- arrays


def member(
    i: int, phase: Phase = "queued", *, at_once: int = 2, count: int = 4, name: str = "sweep", desired: Desired = "run"
) -> JobRecord:
    array = Array(name=name, id=f"a-{name}", index=i, count=count, first=0, last=count - 1, at_once=at_once)
    spec = make_spec(size=(1, 1), name=f"{name}-{i}", array=array)
    generation = make_generation(["n1"], state="active") if phase in USES_TIME else None
    return make_job(phase, generation, spec=spec, uid=f"u-{name}-{i}", order=i, desired=desired)


def starts(cluster: Cluster) -> list[str]:
    return [job.name for job in cluster.jobs.values() if isinstance(decide(cluster, job, WALL).step, Propose)]


def test_as_many_members_run_as_may_and_the_first_go_first() -> None:
    cluster = a_cluster(member(0, "running"), member(1), member(2), member(3), slots=8)
    assert starts(cluster) == ["sweep-1"]
    why = decide(cluster, cluster.jobs["u-sweep-2"], WALL).why
    assert why == ("waits for its turn: of array sweep 2 run at once, and 1 do",)
    assert set(queue.places(cluster)) == {"u-sweep-1"}


def test_who_is_paused_or_has_ended_has_no_turn_and_another_array_is_not_counted() -> None:
    jobs = [member(0, "paused", desired="pause"), member(1, "succeeded"), member(2, "running"), member(3)]
    assert starts(a_cluster(*jobs, member(0, "running", name="other"), slots=8)) == ["sweep-3"]
    resumed = [member(0, "paused"), *jobs[1:]]
    cluster = a_cluster(*resumed, slots=8)
    assert starts(cluster) == ["sweep-0"]
    full = a_cluster(member(0, "paused"), member(2, "running"), member(3, "running"), slots=8)
    assert decide(full, full.jobs["u-sweep-0"], WALL).step is None, "it stays paused, and does not hold"


def test_without_a_bound_all_may_run() -> None:
    first, *others = [member(i, at_once=0) for i in range(4)]
    assert starts(a_cluster(first, *others, slots=8)) == ["sweep-0"]
    assert len(queue.queue(a_cluster(first, *others))) == 4


@REPEATABLE
@given(
    st.lists(st.sampled_from(["queued", "holding", "paused", "forming", "running", "pausing", "succeeded", "failed"])),
    st.integers(1, 4),
)
def test_never_more_than_may_run_at_once(phases: list[Phase], most: int) -> None:
    jobs = [member(i, phase, at_once=most, count=max(1, len(phases))) for i, phase in enumerate(phases)]
    cluster = a_cluster(*jobs, slots=64)
    running = sum(phase in USES_TIME for phase in phases)
    free = [job for job in jobs if job.phase in ("queued", "holding", "paused") and not blocked(cluster, job)]
    assert len(free) == min(max(0, most - running), sum(p in ("queued", "holding", "paused") for p in phases))


def test_whose_turn_it_is_takes_no_look_at_the_others_for_each() -> None:
    jobs = [member(i, at_once=300, count=400) for i in range(400)]
    cluster = a_cluster(*jobs)
    blocked(cluster, jobs[0])  # the arrays are looked at once
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    turns = [not blocked(cluster, job) for job in jobs]
    sys.setprofile(None)
    assert turns == [True] * 300 + [False] * 100
    assert calls < 20 * len(jobs)


def after_array(need: Need, count: int = 2) -> JobRecord:
    after = (After(uid="a-sweep", name="sweep", need=need, array=count),)
    return make_job(spec=make_spec(size=(1, 1), name="collect", after=after), uid="u-collect", order=9)


@pytest.mark.parametrize(
    ("phases", "need", "expected"),
    [
        (["succeeded", "succeeded"], "ok", Settle),
        (["succeeded", "failed"], "any", Settle),
        (["succeeded", "failed"], "ok", End),
        (["queued", "failed"], "ok", End),
        (["queued", "failed"], "any", type(None)),
        (["succeeded", "queued"], "ok", type(None)),
        (["succeeded"], "ok", End),
        (["succeeded"], "any", Settle),
    ],
)
def test_after_a_whole_array(phases: list[Phase], need: Need, expected: type) -> None:
    job = after_array(need)
    cluster = a_cluster(*(member(i, phase, count=2) for i, phase in enumerate(phases)), job)
    assert type(decide(cluster, job, WALL).step) is expected


def test_members_that_have_ended_are_kept_for_who_comes_after_the_array() -> None:
    jobs = [member(i, "succeeded", count=2).model_copy(update={"ended": WALL}) for i in range(2)]
    assert outlived(a_cluster(*jobs, after_array("ok")), 10 * WALL, 1.0, 0) == []
    assert outlived(a_cluster(*jobs), 10 * WALL, 1.0, 0) == jobs


def test_records_of_an_array_stay_together_while_one_lives() -> None:
    jobs = [member(i, "succeeded").model_copy(update={"ended": WALL}) for i in range(30)]
    assert due_for_history(a_cluster(*jobs), 10 * WALL) == jobs[:10]
    assert due_for_history(a_cluster(*jobs, member(30)), 10 * WALL) == []
    assert outlived(a_cluster(*jobs, member(30)), 10 * WALL, 1.0, 0) == []


def held(i: int, since: int = NOW - 4000) -> JobRecord:
    """A member that ran, lost its nodes and may hold for 5 s."""
    job = member(i, "holding", at_once=1)
    spec = job.spec.model_copy(update={"hold_timeout": 5.0})
    return job.model_copy(update={"spec": spec, "since": since, "active": Token(number=1, id="g1")})


def test_who_waits_for_a_turn_does_not_hold() -> None:
    holding = held(0, since=NOW - 9000)
    waits = decide(a_cluster(holding, member(1, "running", at_once=1)), holding, WALL)
    assert (waits.step, waits.at, waits.why) == (
        None, 0, ("waits for its turn: of array sweep 1 run at once, and 1 do",),
    )  # fmt: skip
    step = decide(a_cluster(holding, slots=0), holding, WALL).step
    assert isinstance(step, End)
    assert step.reason.startswith("held for longer than its hold_timeout of 5 s: needs 1 node")


def test_who_ran_and_lost_its_nodes_has_its_turn_before_those_who_wait() -> None:
    """Else a member that somebody resumes would take the turn, while the other's time to hold runs."""
    cluster = a_cluster(member(0, "paused", at_once=1), held(1), member(2, at_once=1), slots=8)
    assert starts(cluster) == ["sweep-1"]


PHASES: tuple[Phase, ...] = (
    "queued",
    "forming",
    "running",
    "holding",
    "pausing",
    "paused",
    "succeeded",
    "failed",
    "stopped",
)


@REPEATABLE
@given(
    st.lists(st.tuples(st.sampled_from(PHASES), st.sampled_from(["ok", "any"]), st.booleans()), min_size=1, max_size=5)
)
def test_who_comes_after_others_starts_only_when_all_their_ends_are_noted(
    others: list[tuple[Phase, Need, bool]],
) -> None:
    names = [f"o{i}" for i in range(len(others))]
    after = tuple(After(uid=f"u-{n}", name=n, need=o[1]) for n, o in zip(names, others, strict=True))
    made = []
    for name, (phase, _, _) in zip(names, others, strict=True):
        generation = make_generation(["n1"]) if phase in USES_TIME else None
        made.append(make_job(phase, generation, uid=f"u-{name}", spec=make_spec(size=(9, 9), name=name), desired="run"))
    job = make_job(spec=make_spec(size=(1, 1), name="last", after=after), uid="u-last", order=9)
    met = tuple(one.uid for one, other in zip(after, others, strict=True) if other[2])
    job = job.model_copy(update={"control": job.control.model_copy(update={"met": met})})
    decision = decide(a_cluster(*made, job, slots=64), job, WALL)
    ends = [(phase, need) for phase, need, noted in others if not noted]
    never = [phase for phase, need in ends if need == "ok" and phase in ("failed", "stopped")]
    over = [phase for phase, need in ends if phase == "succeeded" or (need == "any" and phase in ("failed", "stopped"))]
    if never:
        assert isinstance(decision.step, End)
    elif over:
        assert isinstance(decision.step, Settle)
        assert len(decision.step.control.met) == len(met) + len(over)
    else:
        assert isinstance(decision.step, Propose) == (not ends)
