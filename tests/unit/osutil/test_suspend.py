"""How long the machine was suspended, by two clocks."""

from __future__ import annotations

import time

from nodeagent.osutil.suspend import LEAST, Suspension, suspended


def test_what_is_new_counts_and_no_moment_between_two_looks() -> None:
    times = iter([100.0, 100.0 + LEAST / 2, 3700.0, 3700.0, 3700.5, 3702.0])
    suspension = Suspension(lambda: next(times))
    assert suspension.since() == 0.0
    assert suspension.since() == 3600.0
    suspension.note()
    assert suspension.since() == 0.0
    assert suspension.since() == 2.0


def test_it_is_the_difference_of_the_clocks() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    assert abs(suspended() - before) < LEAST
