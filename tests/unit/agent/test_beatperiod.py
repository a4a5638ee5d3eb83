"""How seldom an agent asks: ``nodeagent/agent/beatperiod.py``. ``tests/sim/test_beatperiod.py`` shows that nothing
waits for it."""

from __future__ import annotations

import pytest

from nodeagent.agent.beatperiod import JITTER, BeatPeriod
from nodeagent.model.timing import Timing

TIMING = Timing(heartbeat=0.5, lease=3.0)


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 0.5), (200, 0.5), (300, 0.75), (800, 2.0), (10_000, 2.0)])
def test_the_period_grows_with_the_nodes_and_ends_before_a_lease_does(nodes: int, seconds: float) -> None:
    assert BeatPeriod("n1", TIMING).period(nodes) == pytest.approx(seconds)


def test_each_beat_draws_a_period_anew_and_none_is_shorter_than_a_heartbeat() -> None:
    period = BeatPeriod("n1", TIMING)
    drawn = []
    for _ in range(100):
        period.beaten()
        drawn.append(period.period(800))
        assert period.period(200) == TIMING.heartbeat
    assert min(drawn) >= 2.0 * (1 - JITTER)
    assert max(drawn) <= 2.0
    assert max(drawn) - min(drawn) > 0.3


def test_agents_that_beat_together_part() -> None:
    both = [BeatPeriod(node, TIMING) for node in ("n1", "n2")]
    for one in both:
        one.beaten()
    assert len({one.period(800) for one in both}) == 2
