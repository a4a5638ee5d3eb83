"""How often an agent calls the store: seldom while nothing calls for a beat, and after calls that failed or came late
not at once, later each time, and not together with all other agents. And how much it reads with one call.

A beat costs the store the same in a cluster of any size, so all beats together cost as much as there are nodes. This
module calls nothing; ``loop.py`` knows what calls for a beat at once.
"""

from __future__ import annotations

import random

from nodeagent.model.timing import Timing
from nodeagent.store.messages import PAGE_BYTES

PER_NODE = 0.0025
"""Seconds between two beats of an agent that rests, for each node: all of them together ask the store 400 times a
second, and a little more often by the jitter. Up to 200 nodes every heartbeat brings a beat."""
JITTER = 0.25
"""Of the time between two beats: what it may be shorter by, so that agents which were woken together do not stay so."""


LOOK_PER_NODE = 0.02
"""Seconds between two looks for damage of one agent, for each node: all of them together look 50 times a second."""
LOOK_MOST = 8
"""Of the longest time between two beats: the longest one between two looks, however many nodes there are."""


class BeatPeriod:
    """The time between two beats of one agent that rests."""

    def __init__(self, node: str, timing: Timing) -> None:
        self._timing = timing
        self._rng = random.Random(node)
        self._share = 1.0

    def beaten(self) -> None:
        """A beat was sent: draw the jitter of the next period."""
        self._share = 1 - JITTER * self._rng.random()

    def period(self, nodes: int) -> float:
        """Seconds from one beat to the next in a cluster of so many nodes. Shorter than any lease that was just renewed
        is good for: at that time all agents look for the lapse."""
        return max(self._timing.heartbeat, self._share * min(nodes * PER_NODE, _longest(self._timing)))


def look_period(nodes: int, timing: Timing) -> float:
    """Seconds between two beats of one agent that look for damage in the store, in a cluster of so many nodes. Every
    second beat of a small cluster does."""
    return max(2 * timing.heartbeat, min(nodes * LOOK_PER_NODE, LOOK_MOST * _longest(timing)))


def _longest(timing: Timing) -> float:
    """Seconds between two beats at the most: the fence of what was read with one is later, so that an agent at rest may
    start workers at any time."""
    return timing.lease - 2 * timing.heartbeat


SHARE = 0.25
"""Of the time that one late reply leaves until the fence: the first pause at most."""
MOST = 0.5
"""Of a heartbeat: the longest pause at most."""


class WakePace:
    """One agent's. Each pause is between half of what it may be and all of it, by the node's name, so that agents whose
    calls failed together ask again one after the other."""

    def __init__(self, node: str, timing: Timing) -> None:
        slack = max(0.0, timing.fence - timing.heartbeat - 2 * timing.store_timeout)
        self._most = MOST * timing.heartbeat
        self._first = min(SHARE * slack, self._most)
        self._rng = random.Random(node)
        self._failures = 0
        self._until = 0.0

    def failed(self, now: float) -> None:
        """A call was not answered. One that ends while nobody is to ask began before: it makes no pause longer, but it
        is not sent again at once either."""
        pause = self._first
        if now >= self._until:
            pause = min(self._most, self._first * 2.0 ** min(self._failures, 16))
            self._failures += 1
        self._until = max(self._until, now + pause * self._rng.uniform(0.5, 1.0))

    def answered(self) -> None:
        """The store serves."""
        self._failures, self._until = 0, 0.0

    def left(self, now: float) -> float:
        """Seconds for which nobody is to ask."""
        return max(0.0, self._until - now)


LEAST_ROOM, MORE_ROOM = 1 << 14, 1 << 16
"""Bytes of records that a beat may bring at the least, and how many more after one that brought all that it might."""


class BeatRoom:
    """How many bytes of records one agent lets a beat bring: half as many after one that was not answered. A reply that
    does not arrive within ``store_timeout`` is lost as a whole, and the next one like it would be, too, where a link is
    slow, or all agents read everything anew through one."""

    def __init__(self) -> None:
        self.bytes = PAGE_BYTES

    def unanswered(self) -> None:
        self.bytes = max(LEAST_ROOM, self.bytes // 2)

    def filled(self) -> None:
        """A beat was answered, and the store has more."""
        self.bytes = min(PAGE_BYTES, self.bytes + MORE_ROOM)
