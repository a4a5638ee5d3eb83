"""What an event costs an agent: however many somebody writes into the store, and however long one is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import cast

from nodeagent.agent.context import AgentContext
from nodeagent.agent.membership import Membership
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.pace import WakePace
from nodeagent.agent.snapshot import Snapshot
from nodeagent.agent.undecided import Undecided
from nodeagent.agent.watch import AT_ONCE, LONGEST_REST, PER_SECOND, EventWatch
from nodeagent.model.timing import Timing
from nodeagent.pods.base import PodHost
from nodeagent.store.base import Store, StoreRefusedError, StoreUnavailableError, TooMuchError
from nodeagent.store.messages import Woken
from tests.inprocess.lease import Words
from tests.sim.virtual import SimClock, run_virtual

TIMING = Timing()


class Lease:
    """Whose beats have read up to some event."""

    joined = True
    newest_event = "0-0"


class Host:
    def __init__(self) -> None:
        self.changed = asyncio.Event()


class Events:
    """A store of which only the waits are asked: each takes ``every`` seconds and then brings the next event, or the
    error that ``fails`` gives for that wait."""

    def __init__(self, every: float, fails: Callable[[int], Exception | None] = lambda _: None) -> None:
        self.newest, self.waits, self._every, self._fails = 0, list[float](), every, fails

    async def wake(self, after: str, timeout: float, node: str, jobs: Collection[str]) -> Woken:
        self.waits.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self._every)
        if error := self._fails(len(self.waits)):
            raise error
        self.newest += 1
        return Woken(f"{self.newest}-0")


class Watched:
    """What the watch of one agent does within some time."""

    def __init__(self, events: Events) -> None:
        self.events, self.lease, self.beat_now = events, Lease(), asyncio.Event()
        self.beats = list[float]()
        context = AgentContext(
            "n1", TIMING, cast(Store, events), cast(PodHost, Host()), SimClock(), random_id=lambda: "r",
            process=Words(), snapshot=Snapshot(TIMING), metrics=Metrics(),
            undecided=Undecided("n1", Metrics().left_undecided),
        )  # fmt: skip
        pace = WakePace("n1", TIMING)
        self.watch = EventWatch(
            context, cast(Membership, self.lease), pace, refresh=self.refresh, beat_now=self.beat_now
        )

    async def refresh(self) -> None:
        self.beats.append(asyncio.get_running_loop().time())
        self.lease.newest_event = f"{self.events.newest}-0"

    async def during(self, seconds: float) -> None:
        running = asyncio.create_task(self.watch.run())
        await asyncio.sleep(seconds)
        running.cancel()


def watched(seconds: float, every: float, fails: Callable[[int], Exception | None] = lambda _: None) -> Watched:
    async def main() -> Watched:
        found = Watched(Events(every, fails))
        await found.during(seconds)
        return found

    return run_virtual(main())


def test_events_without_end_do_not_make_an_agent_beat_without_end() -> None:
    """Anybody who can write to the store can add as many to the stream for all as it bears: each agent beat 370 times
    a second."""
    beats = len(watched(60.0, 0.001).beats)
    assert PER_SECOND * 59 < beats < AT_ONCE + PER_SECOND * 61


def test_what_happens_at_once_is_read_as_it_comes() -> None:
    """A hundred jobs one after the other, with three events each, in ten seconds."""
    found = watched(10.0, 10 / 300)
    late = [beat - wait - found.events._every for beat, wait in zip(found.beats, found.events.waits, strict=False)]
    assert len(found.beats) > 290
    assert max(late) < 1e-6


def test_an_entry_that_is_too_long_is_not_asked_for_again_and_again() -> None:
    """It stays where it is, and each wait would have the store send it: beats bring what happens."""
    found = watched(600.0, 0.001, lambda _: TooMuchError("it holds more than any agent writes"))
    assert not found.watch.answers, "or the agent would beat seldom"
    assert found.beat_now.is_set()
    pauses = [later - sooner for sooner, later in zip(found.events.waits, found.events.waits[1:], strict=False)]
    assert pauses[0] < TIMING.heartbeat * 1.1, "it may have been many entries of an instant"
    assert max(pauses) < LONGEST_REST + 1
    assert len(pauses) < 20


def test_once_it_is_gone_events_are_waited_for_as_before() -> None:
    found = watched(20.0, 0.5, lambda wait: TooMuchError("too much") if wait < 3 else None)
    assert found.watch.answers
    assert len(found.beats) > 30


def test_a_store_that_is_away_or_refuses_is_asked_once_a_heartbeat() -> None:
    for error in (StoreUnavailableError("away"), StoreRefusedError("behind", "read anew")):
        found = watched(20.0, 0.001, lambda _, error=error: error)  # type: ignore[misc]
        assert not found.watch.answers
        assert len(found.events.waits) < 20 / TIMING.heartbeat + 2
