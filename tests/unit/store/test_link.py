"""How what callers ask of the store is held back: each agent sees late answers alone."""

from __future__ import annotations

import heapq
import random
from statistics import median

import pytest

from nodeagent.store.link import CallersPace, Quickest


def test_a_late_answer_lengthens_the_pause_and_each_other_one_shortens_it() -> None:
    pace, now = CallersPace(), 100.0

    def is_pause(whole: float) -> bool:
        return whole / 2 <= pace.left(now) <= whole and pace.left(now + whole) == 0

    pace.answered(pace.LATE, now)
    assert pace.left(now) == 0
    for whole in (0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15.0, 15.0):
        pace.answered(0.2, now := now + 0.2)
        assert is_pause(whole)
    for took, whole in ((0.05, 12.0), (0.05, 9.6), (0.001, 2.4), (0.001, 0.6)):
        pace.answered(took, now)
        assert is_pause(whole)
    for _ in range(3):
        pace.answered(0.001, now)
    assert pace.left(now) == 0
    pace.answered(0.5, now := now + 10.0)
    pace.answered(0.5, now := now + 0.1)  # it was under way
    assert is_pause(1.0)
    pace.answered(0.5, now := now + 0.5)
    assert is_pause(2.0)


def test_a_store_that_is_far_away_is_not_late_and_one_that_nobody_reaches_soon_is() -> None:
    """Found by a stranger: 0.11 s away, from the fourth request on each was refused, for good."""
    pace, quickest, now = CallersPace(), Quickest(), 100.0
    for took in (0.3, 0.14, 0.5):
        quickest.answered(took, now)
    pace.answered(0.24, now, quickest.seconds)
    assert pace.left(now) == 0
    pace.answered(0.26, now, quickest.seconds)
    assert pace.left(now) > 0

    busy = CallersPace()
    busy.answered(0.45, now, 0.45)
    assert busy.left(now) > 0


def test_the_quickest_answer_counts_for_a_while() -> None:
    quickest, now = Quickest(), 100.0
    assert quickest.seconds == 0
    quickest.answered(0.1, now)
    for later in (0.0, 0.9, 1.1, 1.9):
        quickest.answered(0.3, now + later * quickest.KEPT)
        assert quickest.seconds == 0.1
    quickest.answered(0.3, now + 2.1 * quickest.KEPT)
    assert quickest.seconds == 0.3
    quickest.answered(0.4, now + 9 * quickest.KEPT)
    assert quickest.seconds == 0.4, "nobody asked meanwhile"


TIMEOUT, SECONDS = 0.5, 60.0


def waits(agents: int, service: float, pace: type[CallersPace], quiet: bool = True) -> tuple[list[float], float]:
    """One server that takes ``service`` seconds for each request, also one for which nobody waits any more, and callers
    who ask every agent again as soon as it may ask. ``quiet``: the agents have had answers before that. How long a
    request waited that came each 0.1 s of the second half, and the share of that time in which the server worked."""
    paces, quickest = [pace() for _ in range(agents)], [Quickest() for _ in range(agents)]
    for one in quickest if quiet else ():
        one.answered(service, 0.0)
    asking = [(random.Random(i).random() * 0.01, i) for i in range(agents)]
    heapq.heapify(asking)
    free, found, looked, used = 0.0, list[float](), SECONDS / 2, 0.0
    while asking[0][0] < SECONDS:
        at, who = heapq.heappop(asking)
        while looked < at:
            found.append(max(0.0, free - looked))
            looked += 0.1
        used += service if at > SECONDS / 2 else 0.0
        free = max(free, at) + service
        over = min(free, at + TIMEOUT)
        if over < at + TIMEOUT:
            quickest[who].answered(over - at, over)
        paces[who].answered(over - at, over, quickest[who].seconds)
        heapq.heappush(asking, (over + paces[who].left(over) + 1e-6, who))
    return found, used / (SECONDS / 2)


class Unpaced(CallersPace):
    """Asks again at once."""

    def left(self, now: float) -> float:
        return 0.0


@pytest.mark.parametrize(("agents", "service"), [(20, 0.01), (200, 0.003), (2000, 0.0005), (2000, 0.002)])
def test_a_lease_is_renewed_however_many_agents_are_asked_at_once(agents: int, service: float) -> None:
    """A renewal that waits for half a second counts as lost."""
    without, _ = waits(agents, service, Unpaced)
    assert median(without) > 0.18
    found, used = waits(agents, service, CallersPace)
    assert median(found) < CallersPace.LATE
    assert max(found) < 3 * CallersPace.LATE
    assert used > 0.5, "what callers ask for is answered all the same"
    assert max(waits(agents, service, CallersPace, quiet=False)[0]) < TIMEOUT, "who knew the store only as busy"
