"""The agent's wait for events: it wakes the agent when something happened that this node may have to act on.

An event is a hint only: beats bring the truth. So nothing here may cost more than a beat is worth: a user who can
write to the store can add entries without end, or one of any length. Must never decide anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from nodeagent.agent.context import AgentContext
from nodeagent.agent.membership import Membership
from nodeagent.agent.pace import WakePace
from nodeagent.osutil.clock import Allowance
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError, TooMuchError
from nodeagent.store.codec import event_order
from nodeagent.store.messages import Woken

WATCH = 2.0
"""Seconds that one wait on the event stream lasts at most."""
AT_ONCE, PER_SECOND = 256.0, 16.0
"""Events that the agent acts on as they come, at once and in the long run. Beyond that, it reads once for all that come
within a sixteenth of a second. A fault or a scale brings an agent some ten, a hundred jobs that somebody submits one by
one some three hundred in ten seconds."""
LONGEST_REST = 64.0
"""Seconds without a wait, at most, where the entry that it brings is too long to be read. It may lie there as long as
nobody removes it, and each wait has the store send it, and this agent read the beginning of it."""


class EventWatch:
    """One agent's."""

    def __init__(
        self,
        context: AgentContext,
        membership: Membership,
        pace: WakePace,
        *,
        refresh: Callable[[], Awaitable[None]],
        beat_now: asyncio.Event,
    ) -> None:
        """``refresh``: a beat, and a round after it. ``beat_now``: set to ask for a beat. The host's ``changed`` is set
        where an event brought all that there is to know."""
        self._node, self._heartbeat = context.node, context.timing.heartbeat
        self._store, self._clock, self._snapshot = context.store, context.clock, context.snapshot
        self._wake = context.host.changed
        self._membership, self._pace, self._refresh, self._beat_now = membership, pace, refresh, beat_now
        self._allowance = Allowance(AT_ONCE, PER_SECOND)
        self._rests = 0
        """Waits one after the other whose entry was too long."""
        self.answers = False
        """The store answered the last wait: it would wake this agent."""
        self._log = structlog.get_logger("agent").bind(node=self._node)

    async def run(self) -> None:
        while True:
            after = self._membership.newest_event
            if not self._membership.joined:
                await asyncio.sleep(self._heartbeat)
                continue
            try:
                woken = await self._store.wake(after, WATCH, self._node, self._snapshot.concern(self._node))
                self.answers, self._rests = True, 0
                if woken.event != after and self._membership.joined:
                    await self._take(woken)
            except TooMuchError as error:
                self.answers = False
                await self._rest(error)
            except StoreUnavailableError:
                self.answers = False
                self._pace.failed(self._clock.now())
                await asyncio.sleep(self._heartbeat + self._pace.left(self._clock.now()))
            except StoreRefusedError:
                self.answers = False
                self._beat_now.set()  # the beats task finds out why
                await asyncio.sleep(self._heartbeat)

    async def _take(self, woken: Woken) -> None:
        if late := self._allowance.spend(1, self._clock.now()):
            await asyncio.sleep(late)
        if self._snapshot.absorb_jobs(woken.jobs):
            self._membership.newest_event = woken.event
            self._wake.set()
            return
        await self._refresh()
        if event_order(self._membership.newest_event) < event_order(woken.event):
            # No step has written it, and it would wake us again at once.
            await asyncio.sleep(self._heartbeat)

    async def _rest(self, error: TooMuchError) -> None:
        """A beat brings what there is; the next wait comes later each time, since it would bring the same entry."""
        if not self._rests:
            self._log.warning("no events, only heartbeats, until a shorter one is there", why=str(error))
        self._beat_now.set()
        seconds = min(LONGEST_REST, self._heartbeat * 2.0 ** min(self._rests, 16))
        self._rests += 1
        await asyncio.sleep(seconds)
