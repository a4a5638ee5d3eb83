"""The newest part of the audit log, kept between requests: of each event one agent reads and parses the text once.

Must never be taken for the whole log: it reaches back ``EVENTS`` events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

from nodeagent.api.view import AgentView
from nodeagent.model.event import Event
from nodeagent.store.base import StoreUnavailableError

EVENTS = 2000
"""How far back the audit log is read, in events of all jobs."""


class AuditTail:
    """Over one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self._view = view
        self._one = asyncio.Lock()
        self._era = ""
        self._events: deque[Event] = deque(maxlen=EVENTS)

    async def read(self) -> Sequence[Event] | None:
        """The newest events, oldest first; None if the store does not answer (nobody waits for it twice)."""
        if self._view.health().store_away_since is not None:
            return None
        async with self._one:
            if self._view.era != self._era:  # another history, whose ids may begin anywhere
                self._events.clear()
            era = self._view.era
            with contextlib.suppress(StoreUnavailableError):
                newer = await self._view.store.events(self._events[-1].id, EVENTS) if self._events else ()
                if not self._events or len(newer) == EVENTS:
                    newer = await self._view.store.events("0-0", -EVENTS)
                self._events.extend(newer)
                self._era = era
                return tuple(self._events)
        return None
