"""How seldom an agent may ask the store: the more nodes there are, the longer it waits while nothing calls for a beat.

A beat costs the store the same in a cluster of any size, so all beats together cost as much as there are nodes. This
module asks nobody; ``loop.py`` knows what calls for a beat at once.
"""

from __future__ import annotations

import random

from nodeagent.model.timing import Timing

PER_NODE = 0.0025
"""Seconds between two beats of an agent that rests, for each node: all of them together ask the store 400 times a
second, and a little more often by the jitter. Up to 200 nodes every heartbeat brings a beat."""
JITTER = 0.25
"""Of the time between two beats: what it may be shorter by, so that agents which were woken together do not stay so."""


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
        most = self._timing.lease - 2 * self._timing.heartbeat
        return max(self._timing.heartbeat, self._share * min(nodes * PER_NODE, most))
