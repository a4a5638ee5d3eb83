"""Before an agent gives a store what it knows: whether the cluster lives by another one right now, as its peers' lease
processes answer. With the jobs of one store, another one would have them formed anew, beside the gangs that run.

Decides by answers alone: a peer that does not answer may be dead, and keeps nobody waiting.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from typing import TypeAlias

from nodeagent.agent.questions import LeaseQuestions
from nodeagent.agent.recovery import Known
from nodeagent.lease.failsafe import RESEND
from nodeagent.lease.whichstore import LeaseAnswer
from nodeagent.model.timing import Timing
from nodeagent.osutil.clock import Clock
from nodeagent.store.base import StoreIdentity

BOUND = 0.5
"""Seconds that answers are waited for: what runs here has little time while the store knows nothing of it."""
FIRST = 8
"""Peers that are asked first: mostly one of them has its lease in the store that this agent is to join."""
AGAIN = 10.0
"""Seconds for which a store counts as the cluster's after nobody was elsewhere: an agent that waits for others in it
tries to join again and again."""
MOST_ASKED = 512
"""Peers that are asked in all, at random where the cluster has more."""


Look: TypeAlias = Callable[[], Awaitable[StoreIdentity]]
FindPeer: TypeAlias = Callable[[Known, StoreIdentity, Look], Awaitable[LeaseAnswer | None]]
"""``OtherStore.find_peer``."""


class Says(Enum):
    """What a peer's answer means for a store that was looked at before the peer was asked."""

    HERE = auto()
    """It has its lease there."""
    ELSEWHERE = auto()
    """It has it in another store: it has renewed it there since."""
    EARLY = auto()
    """It was renewed elsewhere before: perhaps in the same server, which has been emptied or restarted since."""
    NOTHING = auto()
    """It has none, or not in that cluster."""


def meaning(answer: LeaseAnswer, here: StoreIdentity, uid: str, since: float, timing: Timing) -> Says:
    """``uid``: of the cluster that this agent knows. ``since``: seconds from the look until the peer was asked."""
    if answer.age is None or answer.cluster_uid != uid:
        return Says.NOTHING
    is_live = not answer.away and answer.age <= timing.heartbeat + timing.store_timeout
    if here.goes_on(answer.era):
        return Says.HERE if is_live else Says.NOTHING
    if answer.age < since:
        return Says.ELSEWHERE
    return Says.EARLY if is_live else Says.NOTHING


class OtherStore:
    """One agent's questions to its peers."""

    def __init__(self, node: str, peers: LeaseQuestions, clock: Clock, timing: Timing) -> None:
        self._node, self._peers, self._clock, self._timing = node, peers, clock, timing
        self._last = ""
        """Where the peer is asked that was elsewhere the last time: as long as it is, no other one is asked."""
        self._passed, self._passed_until = "", 0.0
        """The server process that was asked about last, if nobody was elsewhere."""

    async def find_peer(self, known: Known, here: StoreIdentity, look: Look) -> LeaseAnswer | None:
        """A peer of this view that has its lease in another store than this one, which was looked at just now, and is
        looked at again with ``look``."""
        began = self._clock.now()
        if here.process == self._passed and began < self._passed_until:
            return None
        places = self._places(known)
        for some in ([place for place in places if place == self._last], places[:FIRST], places[FIRST:]):
            found = await self._ask(some, known.cluster_uid, here, began)
            if found is not None:
                place, answer = found
                if here.goes_on(answer.era) or (await look()).goes_on(answer.era):  # which may have begun meanwhile
                    break
                self._last = place
                return answer
        self._passed, self._passed_until = here.process, self._clock.now() + AGAIN
        return None

    def _places(self, known: Known) -> Sequence[str]:
        """Where the others are asked, in an order of this node's own."""
        places = {n.facts.peer for n in known.nodes if n.id != self._node and n.facts.peer}
        return sorted(places, key=lambda place: hashlib.sha256(f"{self._node} {place}".encode()).digest())[:MOST_ASKED]

    async def _ask(
        self, places: Sequence[str], uid: str, here: StoreIdentity, began: float
    ) -> tuple[str, LeaseAnswer] | None:
        """The first answer that decides, and where it comes from. Who answers early is asked again when the next
        renewal must have been tried."""

        async def asked(place: str) -> tuple[str, LeaseAnswer] | None:
            while True:
                since = self._clock.now() - began
                answer = await self._peers.ask_lease(place, BOUND)
                if answer is None or answer.age is None:
                    return None
                says = meaning(answer, here, uid, since, self._timing)
                if says is not Says.EARLY:
                    return None if says is Says.NOTHING else (place, answer)
                await asyncio.sleep(max(0.0, self._timing.heartbeat - answer.age) + RESEND)

        tasks = [asyncio.create_task(asked(place)) for place in places]
        try:
            for next_one in asyncio.as_completed(tasks):
                if (found := await next_one) is not None:
                    return found
        finally:
            for task in tasks:
                task.cancel()
        return None
