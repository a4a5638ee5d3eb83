"""Sums of what was used: what the store wrote, what runs since, and what counts less the older it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.model.job import JobRecord
from nodeagent.model.usage import DAYS_KEPT, Held, UsageDay, UsageRow, UsedTime
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.usage import (
    DAY_MS,
    HALF_LIFE,
    SLOT,
    Decayed,
    UsageLine,
    add,
    all_lines,
    by_key,
    decayed,
    of_job,
    since_written,
    total,
)
from tests.unit.plan.build import NOW, REPEATABLE, make_job

DAY = 20_000
NOON = DAY * DAY_MS + DAY_MS // 2
HOUR = 3_600_000


def job(uid: str = "u-a", **more: object) -> JobRecord:
    return make_job("running").model_copy(update={"uid": uid, "submitted": NOON / 1000} | more)


def past(day: int, **rows: UsageRow) -> UsageDay:
    return UsageDay(day=day, rows={name.replace("_", " "): row for name, row in rows.items()}, rev=1)


def view(*jobs: JobRecord, usage: tuple[UsageDay, ...] = (), served: int = NOW) -> Cluster:
    return Cluster(served=served, jobs={j.uid: j for j in jobs}, usage={str(d.day): d for d in usage})


def test_what_runs_is_counted_since_the_record_was_written() -> None:
    one = job(held=Held(at=NOW - 1000, gpus=8, slots=2))
    assert since_written(one, NOW, NOON) == {DAY: UsedTime(gpu_ms=8000, slot_ms=2000)}
    standing = job(held=Held(at=NOW - 1000, gpus=8, stands=5))
    assert since_written(standing, NOW, NOON) == {DAY: UsedTime(gpu_ms=8000, lost_gpu_ms=8000)}
    idle = job(held=Held(at=NOW - 1000, gpus=8, idle=5))
    assert since_written(idle, NOW, NOON) == {DAY: UsedTime(gpu_ms=8000, overhead_gpu_ms=8000)}
    both = job(held=Held(at=NOW - 1000, gpus=8, stands=5, idle=5))
    assert since_written(both, NOW, NOON) == {DAY: UsedTime(gpu_ms=8000, lost_gpu_ms=8000)}, "not twice"
    assert since_written(job(held=Held(at=NOW - 1000)), NOW, NOON) == {}
    assert since_written(job(held=Held(at=NOW + 5, gpus=1)), NOW, NOON) == {}, "the view's time is an estimate"
    assert since_written(job(phase="queued", since=NOW - 700), NOW, NOON) == {DAY: UsedTime(waited_ms=700)}
    assert since_written(job(phase="paused", since=NOW - 700), NOW, NOON) == {}
    both = job(phase="holding", since=NOW - 700, held=Held(at=NOW - 100, slots=3))
    assert since_written(both, NOW, NOON) == {DAY: UsedTime(slot_ms=300, waited_ms=700)}


@REPEATABLE
@given(st.integers(1, 3 * DAYS_KEPT * DAY_MS), st.integers(0, DAY_MS))
def test_midnight_parts_the_days_and_nothing_is_lost(ms: int, into: int) -> None:
    found = since_written(job(held=Held(at=0, gpus=3)), ms, DAY * DAY_MS + into)
    assert sum(use.gpu_ms for use in found.values()) == 3 * ms
    assert max(found) == (DAY if into else DAY - 1)
    assert len(found) <= DAYS_KEPT
    newest, *_ = (use for _, use in sorted(found.items(), reverse=True))
    assert newest.gpu_ms <= 3 * (into or DAY_MS)
    assert all(use.gpu_ms <= 3 * DAY_MS for day, use in found.items() if day > min(found))


def test_sums_by_user_queue_and_job() -> None:
    used = {str(DAY - 1): UsedTime(gpu_ms=500, lost_gpu_ms=100, restarts=2)}
    jobs = (
        job("a", used=used, owner=7), job("b", owner=8, held=Held(at=NOW - 10, slots=5)), job("c", owner=7),
    )  # fmt: skip
    known = past(DAY - 1, **{"7_default": UsageRow(gpu_ms=1, jobs=3), "9_other": UsageRow(slot_ms=4)})
    lines = list(all_lines(view(*jobs, usage=(known,)), NOON))
    users = {key: total(of) for key, of in by_key(lines, "user").items()}
    assert set(users) == {"7", "8", "9"}
    assert (users["7"].use, users["7"].jobs) == (UsedTime(gpu_ms=501, lost_gpu_ms=100, restarts=2), 5)
    assert (users["8"].use.slot_ms, users["8"].jobs) == (50, 1)
    queues = {key: total(of).use for key, of in by_key(lines, "queue").items()}
    assert queues["other"] == UsedTime(slot_ms=4)
    assert add(queues.values()) == add(line.use for line in lines)
    by_job = {key: total(of).use for key, of in by_key(lines, "job").items()}
    assert by_job == {
        "a": UsedTime(gpu_ms=500, lost_gpu_ms=100, restarts=2),
        "b": UsedTime(slot_ms=50),
        "c": UsedTime(),
    }


@pytest.mark.parametrize(("use", "goodput"), [
    (UsedTime(), None), (UsedTime(waited_ms=5), None),
    (UsedTime(gpu_ms=100), 1.0), (UsedTime(gpu_ms=100, lost_gpu_ms=25), 0.75),
    (UsedTime(slot_ms=10, lost_slot_ms=1), 0.9), (UsedTime(gpu_ms=100, slot_ms=10, lost_slot_ms=10), 1.0),
    (UsedTime(gpu_ms=5, lost_gpu_ms=6), 0.0), (UsedTime(gpu_ms=100, lost_gpu_ms=25, overhead_gpu_ms=5), 0.7),
    (UsedTime(slot_ms=10, overhead_slot_ms=1), 0.9),
])  # fmt: skip
def test_goodput(use: UsedTime, goodput: float | None) -> None:
    assert total([UsageLine(DAY, 1, "q", use)]).goodput == goodput


def started(uid: str, ago_days: float, **more: object) -> JobRecord:
    """A job that began so long before the view's time, which is noon."""
    ago = int(ago_days * DAY_MS)
    times: dict[str, object] = {
        "started": (NOON - ago) / 1000,
        "first_active": 100 * DAY_MS - ago,
        "held": Held(at=NOW),
    }
    return job(uid, **times | more)


def at_noon(*jobs: JobRecord, usage: tuple[UsageDay, ...] = ()) -> Cluster:
    return view(*jobs, usage=usage, served=100 * DAY_MS)


def test_what_is_a_half_life_older_counts_half() -> None:
    clock = started("clock", 1.0)
    days = (past(DAY - 14, **{"1_old": UsageRow(gpu_ms=8000)}), past(DAY - 7, **{"2_new": UsageRow(gpu_ms=8000)}))
    found = decayed(at_noon(clock, usage=days)).by_queue
    assert found["old"] * 2 == pytest.approx(found["new"])
    assert found["new"] == pytest.approx(8 * 0.5 ** (7 / 7))
    users = decayed(at_noon(clock, usage=days)).by_user
    assert (users["old", 1], users["new", 2]) == (found["old"], found["new"])
    quick = decayed(at_noon(clock, usage=days), HALF_LIFE / 7).by_queue
    assert quick["old"] * 2**7 == pytest.approx(quick["new"])


def test_a_slot_counts_for_less_than_a_gpu() -> None:
    jobs = (
        started("a", 0.0, used={str(DAY): UsedTime(gpu_ms=1000)}, owner=1),
        job("b", used={str(DAY): UsedTime(slot_ms=1000)}, owner=2),
    )
    users = decayed(at_noon(*jobs)).by_user
    assert users["default", 2] == pytest.approx(SLOT * users["default", 1])


def test_what_runs_counts_too() -> None:
    running = started("a", 3.0, held=Held(at=97 * DAY_MS, gpus=2), owner=1)
    ended = job("b", used={str(day): UsedTime(gpu_ms=2 * DAY_MS) for day in range(DAY - 2, DAY)}, owner=2)
    users = decayed(at_noon(running, ended)).by_user
    assert 1.3 < users["default", 1] / users["default", 2] < 1.6, "three days against two"
    days = {str(day): use for day, use in since_written(running, 100 * DAY_MS, NOON).items()}
    written = started("a", 3.0, used=days, owner=1)
    assert decayed(at_noon(written)).by_user["default", 1] == pytest.approx(users["default", 1], rel=0.01), (
        "written yet or not"
    )


def test_agents_with_the_same_view_get_the_same_whatever_the_order_and_the_minute() -> None:
    dice = random.Random(1)
    jobs = [
        started(f"u{i}", dice.random(), owner=dice.randrange(3), held=Held(at=dice.randrange(100 * DAY_MS), gpus=3),
                used={str(DAY - d): UsedTime(gpu_ms=dice.randrange(10**9)) for d in range(9)})
        for i in range(40)
    ]  # fmt: skip
    days = tuple(
        past(DAY - d, **{f"{n}_q": UsageRow(gpu_ms=dice.randrange(10**9)) for n in range(9)}) for d in range(9)
    )
    one = at_noon(*jobs, usage=days)
    other = view(*reversed(jobs), usage=tuple(reversed(days)), served=one.served + HOUR // 2)
    assert decayed(one) == decayed(other)
    later = view(*jobs, usage=days, served=one.served + HOUR)
    assert decayed(one) != decayed(later)


def test_what_was_worked_out_is_kept_while_the_view_is_the_same() -> None:
    cluster = at_noon(started("a", 1.0, held=Held(at=0, gpus=1)))
    decayed(cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nodeagent.plan.fairshare.usage.queue_of", lambda _: pytest.fail("worked out again"))
        decayed(cluster)


def test_an_unused_cluster() -> None:
    assert decayed(view()) == Decayed()
    assert list(all_lines(view(), NOON)) == []
    assert [line.jobs for line in of_job(job(), NOW, NOON)] == [1]
