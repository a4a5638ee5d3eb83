"""What ``usage`` answers: sums by user, queue and job."""

from __future__ import annotations

import pytest

from nodeagent.api.accounting import date_of, day_of, job_use, shares_json, usage_json
from nodeagent.api.errors import ApiError
from nodeagent.model.usage import OTHERS, Held, UsageDay, UsageRow, UsedTime
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.fairshare.usage import UsageLine
from tests.unit.ctl import samples
from tests.unit.plan.build import make_node

HOUR = 3_600_000
DAY = 20_780


def names(uid: int) -> str:
    return {1000: "ann", 1001: "bob"}.get(uid, str(uid))


LINES = [
    UsageLine(
        DAY, 1000, "default", UsageRow(gpu_ms=8 * HOUR, lost_gpu_ms=2 * HOUR, waited_ms=HOUR, jobs=2, restarts=3), 2
    ),
    UsageLine(DAY - 1, 1000, "prod", UsedTime(gpu_ms=HOUR, overhead_gpu_ms=HOUR // 2)),
    UsageLine(DAY, 1001, "default", UsedTime(slot_ms=4 * HOUR)),
    UsageLine(DAY, OTHERS, "default", UsedTime(gpu_ms=10 * HOUR, slot_ms=1)),
]


def test_by_user_the_largest_first() -> None:
    found = usage_json(LINES, "user", names)
    assert [(r["name"], r["user"], r["queue"], r["gpu_hours"]) for r in found["items"]] == [
        ("others", "others", "default", 10.0), ("ann", "ann", None, 9.0), ("bob", "bob", "default", 0.0),
    ]  # fmt: skip
    ann = found["items"][1]
    assert (ann["lost_gpu_hours"], ann["lost"], ann["goodput"]) == (2.0, round(2 / 9, 6), round(6.5 / 9, 6))
    assert (ann["overhead_gpu_hours"], ann["overhead_slot_hours"]) == (0.5, 0.0)
    assert (ann["waited_hours"], ann["jobs"], ann["restarts"]) == (1.0, 2, 3)
    assert ann["days"] == [
        {"day": date_of(DAY - 1), "gpu_hours": 1.0, "slot_hours": 0.0},
        {"day": date_of(DAY), "gpu_hours": 8.0, "slot_hours": 0.0},
    ]
    assert (found["total"]["gpu_hours"], found["total"]["slot_hours"]) == (19.0, 4.0)


def test_by_queue() -> None:
    rows = usage_json(LINES, "queue", names)["items"]
    assert [(r["name"], r["user"], r["queue"]) for r in rows] == [
        ("default", None, "default"), ("prod", "ann", "prod"),
    ]  # fmt: skip


def test_by_job_and_in_describe() -> None:
    job = samples.job(
        used={str(DAY): UsedTime(gpu_ms=HOUR)}, held=Held(at=samples.cluster(samples.job()).served - HOUR, gpus=2)
    )
    lines = [*LINES, UsageLine(DAY, job.owner, "default", UsedTime(gpu_ms=3 * HOUR), 1, job)]
    found = usage_json(lines, "job", names)
    assert [(r["name"], r["uid"], r["gpu_hours"]) for r in found["items"]] == [(job.name, job.uid, 3.0)]
    assert found["total"]["gpu_hours"] == 3.0, "of what is listed"
    assert job_use(job, samples.cluster(job), samples.NOW)["gpu_hours"] == 3.0, "what runs counts"


def cluster(*rows: tuple[int, str, UsageRow], gpus: int = 0) -> Cluster:
    days = {str(day): UsageDay(day=day, rows={}, rev=1) for day, _, _ in rows}
    for day, key, row in rows:
        days[str(day)].rows[key] = row
    return Cluster(served=0, nodes={"n1": make_node("n1", gpus=gpus)}, usage=days)


def test_the_picture_has_the_last_days_and_the_largest_queues() -> None:
    assert shares_json(cluster(), samples.NOW) is None
    today, small = int(samples.NOW // 86400), UsageRow(gpu_ms=HOUR, slot_ms=HOUR)
    rows = [(today - 1, f"1000 q{n}", small) for n in range(8)]
    rows += [(today, "1001 large", UsageRow(gpu_ms=5 * HOUR, lost_gpu_ms=HOUR)), (today - 14, "1001 large", small)]
    rows += [(today, "1000 idle", UsageRow(waited_ms=HOUR, jobs=1))]
    found = shares_json(cluster(*rows, gpus=8), samples.NOW)
    assert found is not None
    assert (found["device"], found["capacity"], len(found["days"]), found["days"][-1]) == (
        "gpu", 8 * 24, 14, date_of(today),
    )  # fmt: skip
    assert [queue["name"] for queue in found["queues"]] == ["large", "q0", "q1", "q2", "q3", "q4", "others"]
    assert found["queues"][0] == {"name": "large", "hours": [0.0] * 13 + [5.0], "goodput": 0.8}
    assert found["queues"][-1]["hours"][-2:] == [3.0, 0.0]
    slots = shares_json(cluster((today, "1000 q", UsageRow(slot_ms=HOUR))), samples.NOW)
    assert slots is not None
    assert (slots["device"], slots["capacity"]) == ("slot", 4 * 24)


def test_days() -> None:
    assert day_of("since", "2026-11-23", 0) == DAY
    assert date_of(DAY) == "2026-11-23"
    assert (day_of("since", "7d", DAY), day_of("until", "0d", DAY)) == (DAY - 7, DAY)
    assert day_of("since", "9999d", 5) == 0
    for wrong in ("", "7", "yesterday", "2026-13-01", "99999d", "-1d"):
        with pytest.raises(ApiError, match="neither a date nor a number of days"):
            day_of("since", wrong, DAY)
