"""How often an agent calls the store: ``nodeagent/agent/pace.py``. ``tests/sim/test_pace.py`` shows that nothing
waits for it."""

from __future__ import annotations

import pytest

from nodeagent.agent.pace import JITTER, LEAST_ROOM, MORE_ROOM, BeatPeriod, BeatRoom, WakePace, look_period
from nodeagent.model.timing import Timing
from nodeagent.store.messages import PAGE_BYTES

TIMING = Timing()
RESTING = Timing(heartbeat=0.5, lease=3.0)


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 0.5), (200, 0.5), (300, 0.75), (800, 2.0), (10_000, 2.0)])
def test_the_period_grows_with_the_nodes_and_ends_before_a_lease_does(nodes: int, seconds: float) -> None:
    assert BeatPeriod("n1", RESTING).period(nodes) == pytest.approx(seconds)


def test_each_beat_draws_a_period_anew_and_none_is_shorter_than_a_heartbeat() -> None:
    period = BeatPeriod("n1", RESTING)
    drawn = []
    for _ in range(100):
        period.beaten()
        drawn.append(period.period(800))
        assert period.period(200) == RESTING.heartbeat
    assert min(drawn) >= 2.0 * (1 - JITTER)
    assert max(drawn) <= 2.0
    assert max(drawn) - min(drawn) > 0.3


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 1.0), (50, 1.0), (300, 6.0), (800, 16.0), (10_000, 16.0)])
def test_looks_for_damage_are_seldom_in_a_large_cluster_and_each_second_beat_in_a_small_one(
    nodes: int, seconds: float
) -> None:
    assert look_period(nodes, RESTING) == pytest.approx(seconds)


def test_agents_that_beat_together_part() -> None:
    both = [BeatPeriod(node, RESTING) for node in ("n1", "n2")]
    for one in both:
        one.beaten()
    assert len({one.period(800) for one in both}) == 2


def pauses(node: str, failures: int) -> list[float]:
    pace, now, found = WakePace(node, TIMING), 100.0, []
    for _ in range(failures):
        pace.failed(now)
        found.append(pace.left(now))
        now += pace.left(now) + TIMING.store_timeout
    return found


def test_each_pause_is_longer_up_to_a_bound_and_no_two_agents_have_the_same() -> None:
    slack = TIMING.fence - TIMING.heartbeat - 2 * TIMING.store_timeout
    for node in ("n1", "n2"):
        found = pauses(node, 20)
        assert 0 < found[0] <= slack / 4
        assert all(0.5 * TIMING.heartbeat / 2 <= pause <= TIMING.heartbeat / 2 for pause in found[2:])
    firsts = {pauses(f"n{i}", 1)[0] for i in range(50)}
    assert len(firsts) == 50
    assert max(firsts) > 1.5 * min(firsts)


def test_after_a_reply_that_never_came_there_is_time_for_one_more_before_the_fence() -> None:
    for i in range(50):
        lost = TIMING.heartbeat + TIMING.store_timeout + pauses(f"n{i}", 1)[0]
        assert lost + TIMING.store_timeout < TIMING.fence


def test_calls_that_fail_together_count_once_and_an_answer_ends_it() -> None:
    pace = WakePace("n1", TIMING)
    assert pace.left(0.0) == 0.0
    pace.failed(100.0)
    left = pace.left(100.0)
    for _ in range(5):
        pace.failed(100.0)
    assert pace.left(100.0) <= 2 * left
    late = 100.0 + pace.left(100.0) - 0.001
    pace.failed(late)
    assert pace.left(late) >= left / 2, "it is not sent again at once"
    pace.failed(200.0)
    pace.failed(300.0)
    pace.answered()
    assert pace.left(300.0) == 0.0
    pace.failed(400.0)
    assert pace.left(400.0) <= max(pauses(f"n{i}", 1)[0] for i in range(50)) * 1.1


def test_a_beat_brings_half_as_much_after_one_that_was_not_answered_and_more_after_one_that_was_full() -> None:
    room = BeatRoom()
    assert room.bytes == PAGE_BYTES
    room.unanswered()
    room.unanswered()
    assert room.bytes == PAGE_BYTES / 4
    room.filled()
    assert room.bytes == PAGE_BYTES / 4 + MORE_ROOM
    for _ in range(20):
        room.unanswered()
    assert room.bytes == LEAST_ROOM
    for _ in range(PAGE_BYTES // MORE_ROOM):
        room.filled()
    assert room.bytes == PAGE_BYTES
