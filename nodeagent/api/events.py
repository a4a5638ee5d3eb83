"""The audit log over HTTP. Polls: a missed wake-up costs one poll, never an event."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable

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
MOST_PAGES = 40
"""Read back from the end at most: twice what the store keeps."""
DEFAULT = 100
"""Events shown if neither ``after`` nor ``limit`` is given."""

About = Callable[[JobEvent], bool]
"""Whether an event is asked for."""

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
        about = await self._of_job(job) if job else _any
        follow = requests.flag(request, "follow")
        if follow and after is not None and limit is not None:
            raise ApiError("usage", "who follows after an event gets all that come", "leave out limit, or follow")
        # The first pages are read before the answer starts, so that the HTTP status can report an unreachable store.
        if after is None:
            page, after = await self._newest(about, DEFAULT if limit is None else limit)
            lines = self._lines(page, after, about, None, follow=follow, at_end=True)
        else:
            page = await self.view.store.events(after, PAGE)
            after = page[-1].id if page else after
            lines = self._lines(page, after, about, None if follow else limit, follow=follow, at_end=False)
        async with contextlib.aclosing(lines):
            return await send(request, lines)

    async def _of_job(self, job: str) -> About:
        """Whether an event is about this job; of one whose record was deleted, whether it names it. Raises the errors
        of ``find_any_job`` where no event is left that does."""
        try:
            uid = (await find_any_job(self.view, job)).uid
        except ApiError as error:
            if error.code != "not_found":
                raise
            names = _named(job)
            if not (await self._newest(names, 1))[0]:
                raise
            return names
        return _with_uid(uid)

    async def _newest(self, about: About, most: int) -> tuple[tuple[JobEvent, ...], str]:
        """The newest such events, oldest first, and the place where newer ones follow."""
        found: list[JobEvent] = []
        before, newest = "", "0-0"
        for _ in range(MOST_PAGES):
            size = PAGE if about is not _any else min(PAGE, max(1, most - len(found)))
            page = await self.view.store.events("0-0", -size, before)
            if not page:
                break
            newest, before = newest if before else page[-1].id, page[0].id
            found = [*(e for e in page if about(e)), *found]
            if len(found) >= most:
                break
        return tuple(found[max(0, len(found) - most) :]), newest

    async def _lines(
        self, page: tuple[JobEvent, ...], after: str, about: About, most: int | None, *, follow: bool, at_end: bool
    ) -> AsyncGenerator[dict[str, object], None]:
        """First this page. ``after``: where newer ones follow; ``at_end``: there were none."""
        sent, quiet_since = 0, time.monotonic()
        while True:
            for event in page:
                if not about(event):
                    continue
                if most is not None and sent >= most:
                    return
                sent += 1
                quiet_since = time.monotonic()
                yield event.model_dump()
            if at_end and not follow:
                return
            if at_end:
                await asyncio.sleep(POLL)
                if time.monotonic() - quiet_since > ALIVE:
                    quiet_since = time.monotonic()
                    yield {}
            try:
                page = await self.view.store.events(after, PAGE)
            except StoreUnavailableError as error:
                if not follow:  # what was sent is not all that was asked for: it has no end
                    raise ConnectionError(str(error)) from error
                page = ()
            after = page[-1].id if page else after
            # an event that cannot be read is left out of its page: only an empty one proves that the log ends there
            at_end = len(page) < PAGE if follow else not page


def _any(_: JobEvent) -> bool:
    return True


def _with_uid(uid: str) -> About:
    return lambda event: event.uid == uid


def _named(job: str) -> About:
    return lambda event: job in (event.uid, event.job)


def _is_id(text: str) -> bool:
    """Whether the store can read it as an id that others come after: what it cannot read counts as its failure."""
    found = _ID.fullmatch(text)
    numbers = [int(part) for part in found.groups() if part] if found is not None else [_MOST + 1]
    return max(numbers) <= _MOST and numbers != [_MOST, _MOST]
