"""Which records of ended jobs go."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord, Phase
from nodeagent.plan.retention import AT_ONCE, outlived
from tests.unit.plan.build import WALL, make_cluster, make_head, make_job, make_spec

DAY = 86_400.0


def ended(i: int, ago: float, phase: Phase = "succeeded", **more: object) -> JobRecord:
    job = make_job(phase, uid=f"u-{i}", spec=make_spec(name=f"j{i}"), order=i, **more)  # type: ignore[arg-type]
    return job.model_copy(update={"ended": WALL - ago})


def gone(*jobs: JobRecord, keep_for: float = 7 * DAY, keep: int = 200) -> list[str]:
    return [job.name for job in outlived(make_cluster(["n1"], *jobs), WALL, keep_for, keep)]


@pytest.mark.parametrize("phase", ["succeeded", "failed", "stopped"])
def test_what_ended_longer_ago_than_is_kept_goes(phase: Phase) -> None:
    assert gone(ended(1, 8 * DAY, phase), ended(2, 6 * DAY, phase)) == ["j1"]
    assert gone(ended(1, 8 * DAY, phase), keep_for=30 * DAY) == []


def test_only_the_newest_stay_and_the_oldest_go_first_a_few_at_a_time() -> None:
    jobs = [ended(i, i) for i in range(1, 31)]
    assert gone(*jobs, keep=28) == ["j30", "j29"]
    assert gone(*jobs, keep=0) == [f"j{i}" for i in range(30, 30 - AT_ONCE, -1)]


def test_what_has_not_ended_or_may_still_run_somewhere_stays() -> None:
    live = make_job("running", make_head(["n1"]), uid="u-r")
    stops = ended(2, 8 * DAY, "stopped", head=make_head(["n1"], state="ended", holders=["n1"]))
    assert gone(live, stops, keep=0) == []
