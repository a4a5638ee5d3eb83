"""The audit log over HTTP. Polls: a missed wake-up costs one poll, never an event."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator

from aiohttp import web

from nodeagent.agent.view import AgentView
from nodeagent.api import requests
from nodeagent.api.errors import ApiError
from nodeagent.api.requests import find_any_job, send
from nodeagent.model.job import JobEvent
from nodeagent.store.base import StoreUnavailableError

POLL = 0.3
"""Seconds between two polls while following."""
ALIVE = 10.0
"""Seconds of silence after which an empty line is sent, so that the caller knows that the agent lives."""
PAGE = 500
DEFAULT = 100
"""Events shown if neither ``after`` nor ``limit`` is given."""

_ID = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?")
_MOST = 2**64 - 1
"""The largest number in an event's id; and no id is after the one of two of these."""


class EventRoutes:
    """The handler, for one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self.view = view

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        return [web.get("/v1/events", self.events)]

    @requests.takes("follow", "after", "limit", "job")
    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/events?follow&after&limit&job: JSON lines, oldest first."""
        after, limit = request.query.get("after"), requests.number(request, "limit")
        if after is not None and not _is_id(after):
            raise ApiError("usage", f"after={after[:64]!r} is not an event's id", "take one from the events shown")
        job = request.query.get("job")
        uid = (await find_any_job(self.view, job)).uid if job else ""
        # With `after`: events after it; else the newest `limit` events. The first page is read before the answer
        # starts, so that the HTTP status can report an unreachable store.
        if after is not None:
            first = await self.view.store.events(after, PAGE)
        else:
            first = await self.view.store.events("0-0", -(PAGE if uid else min(limit or DEFAULT, PAGE)))
        lines = self._lines(first, after or "0-0", limit, uid, requests.flag(request, "follow"))
        async with contextlib.aclosing(lines):
            return await send(request, lines)

    async def _lines(
        self, page: tuple[JobEvent, ...], after: str, limit: int | None, uid: str, follow: bool
    ) -> AsyncGenerator[dict[str, object], None]:
        newest_only = after == "0-0"
        sent, quiet_since = 0, time.monotonic()
        first, paged = True, len(page) == PAGE and not newest_only
        while True:
            after = page[-1].id if page else after
            chosen = [e for e in page if not uid or e.uid == uid]
            if limit is not None and first and newest_only:
                chosen = chosen[-limit:] if limit else []
            first = False
            for event in chosen:
                if limit is not None and sent >= limit and not follow:
                    return
                sent += 1
                quiet_since = time.monotonic()
                yield event.model_dump()
            if not follow and not paged:
                return
            if not paged:
                await asyncio.sleep(POLL)
                if time.monotonic() - quiet_since > ALIVE:
                    quiet_since = time.monotonic()
                    yield {}
            try:
                page = await self.view.store.events(after, PAGE)
            except StoreUnavailableError:
                page = ()
                if not follow:
                    return
            paged = len(page) == PAGE


def _is_id(text: str) -> bool:
    """Whether the store can read it as an id that others come after: what it cannot read counts as its failure."""
    found = _ID.fullmatch(text)
    numbers = [int(part) for part in found.groups() if part] if found is not None else [_MOST + 1]
    return max(numbers) <= _MOST and numbers != [_MOST, _MOST]
