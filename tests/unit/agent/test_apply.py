"""A step that the store refuses again and again is reported once; neither it nor a message that cannot be made holds up
another job."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from nodeagent.agent.apply import REFUSED_LONG, Applier
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.snapshot import Snapshot
from nodeagent.agent.undecided import Undecided
from nodeagent.model.job import JobRecord
from nodeagent.model.timing import Timing
from nodeagent.model.world import Token
from nodeagent.plan.pods.actions import Release
from nodeagent.plan.steps import Activate, Decision, Remove, Settle
from nodeagent.store.base import StepFailedError, StoreRefusedError, StoreUnavailableError
from tests.unit.plan.build import make_job

STALE = StoreRefusedError("stale", "the control has another revision")
BUSY = StoreRefusedError("busy", "device 0 belongs to job other")
FAILED = StepFailedError("the store cannot serve now (ERR user_script:1: no number)")


class Refusing:
    """A store that refuses the steps of which it has the error."""

    def __init__(self) -> None:
        self.activate_error: Exception | None = None
        self.remove_error: Exception | None = None
        self.removed_by: list[str] = []
        self.compared = 0

    async def differs(self, _job: JobRecord, _era: str) -> bool:
        self.compared += 1
        return False

    async def activate(self, uid: str, token: Token) -> JobRecord:
        if self.activate_error is not None:
            raise self.activate_error
        return make_job(uid=uid)

    async def remove(self, uid: str, by: str = "") -> None:
        if self.remove_error is not None:
            raise self.remove_error
        self.removed_by.append(by)


class Me:
    node = "n1"
    beats = 0
    error: Exception | None = None
    brings: Callable[[], None] = staticmethod(lambda: None)

    async def beat(self) -> None:
        self.beats += 1
        self.brings()
        if self.error is not None:
            raise self.error


class Scene:
    def __init__(self) -> None:
        self.now, self.store, self.me, self.metrics = 100.0, Refusing(), Me(), Metrics()
        self.snapshot = snapshot = Snapshot(Timing())
        self.rev = 1
        snapshot.absorb_job(make_job().model_copy(update={"rev": self.rev}))
        context = SimpleNamespace(
            store=self.store, host=None, clock=SimpleNamespace(now=lambda: self.now), snapshot=snapshot,
            random_id=lambda: "g", undecided=Undecided("n1", self.metrics.left_undecided),
        )  # fmt: skip
        none = cast(Any, None)
        self.applier = Applier(
            cast(Any, context), cast(Any, self.me), seal=none, verifier=none, stopwatch=none, reach=none
        )

    def changes(self) -> None:
        """Another agent's step of the job has gone through."""
        self.rev += 1
        self.snapshot.absorb_job(make_job().model_copy(update={"rev": self.rev}))

    async def tries(self, seconds: float, error: Exception | None, *, remove: bool = False) -> list[EventDict]:
        """The warnings of trying each half second, the last time after so many."""
        if remove:
            self.store.remove_error, step = error, cast(Activate | Remove, Remove())
        else:
            self.store.activate_error, step = error, Activate(Token(number=1, id="g"))
        end = self.now + seconds
        with capture_logs() as logs:
            while True:
                await self.applier.job(make_job(), Decision(step, ("why",)), 1)
                if self.now >= end:
                    return [entry for entry in logs if entry["log_level"] == "warning"]
                self.now += 0.5


async def test_a_step_that_is_refused_for_long_is_reported_once_until_its_job_has_changed() -> None:
    scene = Scene()
    assert await scene.tries(REFUSED_LONG / 2, BUSY) == []
    assert await scene.tries(REFUSED_LONG / 2 - 1.0, STALE) == [], "another reason is no step forward"
    (warning,) = await scene.tries(REFUSED_LONG, STALE)
    expected = {"job": make_job().name, "step": "activate", "code": "stale", "why": str(STALE)}
    assert expected.items() <= warning.items()
    scene.changes()
    assert await scene.tries(REFUSED_LONG - 0.5, BUSY) == []
    (warning,) = await scene.tries(1.0, BUSY)
    assert warning["code"] == "busy"


async def test_one_that_is_tried_once_a_minute_is_reported_too() -> None:
    scene = Scene()
    assert await scene.tries(0.0, STALE, remove=True) == []
    scene.now += 60.0
    assert len(await scene.tries(0.0, STALE, remove=True)) == 1


async def test_each_kind_of_step_has_its_own_time() -> None:
    scene = Scene()
    for _ in range(int(REFUSED_LONG) - 1):
        assert await scene.tries(0.5, STALE) == []
        assert await scene.tries(0.5, STALE, remove=True) == []
    found = [*await scene.tries(1.5, STALE), *await scene.tries(1.5, STALE, remove=True)]
    assert [warning["step"] for warning in found] == ["activate", "remove"]


@pytest.mark.parametrize("remove", [False, True])
async def test_a_step_that_goes_through_makes_what_was_before_forgotten(remove: bool) -> None:
    scene = Scene()
    assert await scene.tries(REFUSED_LONG - 0.5, STALE) == []
    assert await scene.tries(0.0, None, remove=remove) == []
    assert await scene.tries(REFUSED_LONG - 0.5, STALE) == []


async def test_a_job_is_removed_by_who_asked_for_it_and_else_by_retention() -> None:
    scene = Scene()
    for job in (make_job("stopped", delete=True), make_job("stopped")):
        await scene.applier.job(job, Decision(Remove(), ("why",)), 1)
    assert scene.store.removed_by == ["ann", "retention"]


async def test_lost_races_are_nothing_to_report_as_long_as_others_move_the_job_on() -> None:
    scene = Scene()
    for _ in range(3):
        assert await scene.tries(1.0, STALE) == []
        scene.changes()
        scene.now += REFUSED_LONG


async def test_a_record_is_compared_where_a_step_is_refused_and_nobody_moves_the_job_on() -> None:
    """Who has lost a race has another record by then, and need not ask."""
    scene = Scene()
    scene.me.brings = scene.changes
    await scene.tries(3.0, STALE)
    assert scene.store.compared == 0
    scene.me.brings = lambda: None
    await scene.tries(3.0, STALE)
    assert scene.store.compared == 1


async def test_a_release_that_is_ordered_again_is_logged_once() -> None:
    scene, released = Scene(), list[tuple[str, ...]]()
    host = SimpleNamespace(release=lambda uid, token, roles: released.append(roles))
    scene.applier._host = cast(Any, host)
    scene.applier._verifier = cast(Any, SimpleNamespace(refusal=lambda job, now: None))
    scene.applier._clock = cast(Any, SimpleNamespace(wall=lambda: 0.0))
    action = Release(make_job().uid, Token(number=1, id="g"), ("trainer",), "all places of server are ready")
    with capture_logs() as logs:
        for _ in range(3):
            await scene.applier.pod(action)
    assert released == [("trainer",)] * 3
    assert [entry["event"] for entry in logs if entry["log_level"] == "info"] == ["release"]


@pytest.mark.parametrize("remove", [False, True])
async def test_a_step_that_fails_in_the_store_is_as_one_that_it_refuses(remove: bool) -> None:
    scene = Scene()
    (warning,) = await scene.tries(REFUSED_LONG, FAILED, remove=remove)
    assert (warning["code"], warning["why"]) == ("failed", str(FAILED))


async def test_a_step_that_fails_is_no_lost_race() -> None:
    scene = Scene()
    assert await scene.tries(REFUSED_LONG / 2, FAILED) == []
    scene.changes()
    assert len(await scene.tries(REFUSED_LONG / 2 + 1.0, FAILED)) == 1


async def test_a_store_that_does_not_answer_is_an_error_at_once() -> None:
    scene = Scene()
    with pytest.raises(StoreUnavailableError):
        await scene.tries(0.0, StoreUnavailableError("no answer"))
    scene.me.error = StoreUnavailableError("no answer")
    with pytest.raises(StoreUnavailableError):
        await scene.tries(0.0, FAILED)
    assert scene.me.beats == 1


async def test_a_message_that_cannot_be_made_concerns_its_job_alone() -> None:
    """Here there is no seal for a new control: whatever raises, the agent goes on."""
    scene = Scene()
    settle = Settle(make_job().control, "scaled", "to 4 nodes")
    with capture_logs() as logs:
        for _ in range(3):
            assert not await scene.applier.job(make_job(), Decision(settle, ("why",)), 1)
        assert await scene.applier.job(make_job(uid="u-2"), Decision(Activate(Token(number=1, id="g")), ("why",)), 1)
    (failed,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert (failed["uid"], failed["decision"]) == (make_job().uid, "message")
    assert scene.metrics.registry.get_sample_value("nodeagent_undecided_total", {"decision": "message"}) == 1
