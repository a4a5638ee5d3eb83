"""A record that somebody wrote over is found where a step is refused by it, and nowhere else is it looked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodeagent.agent.comparison import AGAIN, BY_THE_RECORD, Comparison
from nodeagent.agent.membership import Membership
from nodeagent.agent.snapshot import Snapshot
from nodeagent.model.job import JobRecord
from nodeagent.model.timing import Timing
from nodeagent.osutil.clock import SystemClock
from nodeagent.store.base import StepFailedError, StoreRefusedError
from tests.unit.plan.build import UID, make_job

STALE = StoreRefusedError("stale", "read it again")


class Clock(SystemClock):
    """Stands still unless moved."""

    at = 100.0

    def now(self) -> float:
        return self.at


class Shelf:
    """A store whose record may be another one."""

    other, asked = False, 0

    async def differs(self, _job: JobRecord, _era: str) -> bool:
        self.asked += 1
        return self.other


class Me:
    """A lease that keeps which records are distrusted, and its beats."""

    node = "n1"

    def __init__(self) -> None:
        self.records = list[str]()

    def distrust(self, record: str) -> None:
        self.records.append(record)

    async def beat(self) -> None:
        self.records.append("beat")


class Scene:
    def __init__(self) -> None:
        self.store, self.me, self.clock, self.snapshot = Shelf(), Me(), Clock(), Snapshot(Timing())
        self.snapshot.absorb_job(make_job().model_copy(update={"rev": 1}))
        context: Any = SimpleNamespace(store=self.store, snapshot=self.snapshot, clock=self.clock)
        self.comparison = Comparison(context, cast(Membership, self.me))


@pytest.mark.parametrize("code", sorted(BY_THE_RECORD))
async def test_a_record_that_somebody_wrote_over_is_damage(code: str) -> None:
    scene = Scene()
    assert not await scene.comparison.written_over(UID, StoreRefusedError(code, "no"))
    assert (scene.store.asked, scene.me.records) == (1, [])
    scene.store.other = True
    scene.clock.at += AGAIN
    assert await scene.comparison.written_over(UID, StoreRefusedError(code, "no"))
    assert scene.me.records == [f"job:{UID}", "beat"]


async def test_a_record_that_does_not_change_is_compared_now_and_then() -> None:
    """Some are refused each time, for good reasons: a node is cordoned, say."""
    scene = Scene()
    for _ in range(10):
        assert not await scene.comparison.written_over(UID, STALE)
        scene.clock.at += AGAIN / 4
    assert scene.store.asked == 3
    scene.snapshot.absorb_job(make_job().model_copy(update={"rev": 2}))
    assert not await scene.comparison.written_over(UID, STALE)
    assert scene.store.asked == 4


@pytest.mark.parametrize("why", ["no job", "recovering", "rereads", "another code", "a step that failed"])
async def test_nothing_is_compared_where_another_cause_is_known(why: str) -> None:
    scene, refusal = Scene(), cast("StoreRefusedError | StepFailedError", STALE)
    scene.store.other = True
    if why == "no job":
        scene.snapshot.forget_job(UID)
    elif why == "recovering":
        scene.snapshot.recovering = True
    elif why == "rereads":
        scene.snapshot.read_again("e2")
    elif why == "another code":
        refusal = StoreRefusedError("recovering", "wait")
    else:
        refusal = StepFailedError("no number")
    assert not await scene.comparison.written_over(UID, refusal)
    assert (scene.store.asked, scene.me.records) == (0, [])
