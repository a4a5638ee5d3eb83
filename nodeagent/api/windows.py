"""Maintenance windows over HTTP: list, and operators' changes. All windows are read, changed and written under the
revision that was read: of two simultaneous changes, the second is made on top of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, requests
from nodeagent.api.auth import Caller
from nodeagent.api.errors import ApiError, unknown
from nodeagent.api.once import Once, earlier, once
from nodeagent.api.requests import saved, seen, write_again
from nodeagent.api.serializers import Json, items
from nodeagent.model.constraints import is_pattern, names
from nodeagent.model.timing import millis
from nodeagent.model.window import MOST_PATTERNS, MOST_WHY, MOST_WINDOWS, Window, Windows
from nodeagent.plan.cluster import Cluster, in_order
from nodeagent.plan.failure.timeouts import spoken
from nodeagent.plan.nodes.availability import outdated

LONGEST = 90 * 86_400.0
"""The most seconds that a window lasts."""
FARTHEST = 400 * 86_400.0
"""The most seconds from now to its end."""
_UNCHANGED = "nothing was changed"

WindowsChange = Callable[[Cluster, int], tuple[tuple[Window, ...], Window, str]]
"""From the view and the next revision: the new windows, the one that changed, and a sentence about the change."""


class WindowRoutes:
    """The handlers, for one agent's view."""

    def __init__(self, view: AgentView) -> None:
        self.view = view

    def table(self) -> list[web.RouteDef]:
        """Every route of this noun."""
        return [
            web.get("/v1/windows", self.index),
            web.post("/v1/windows", self.create),
            web.delete("/v1/windows/{window}", self.delete),
        ]

    async def index(self, _request: web.Request) -> web.Response:
        """GET /v1/windows: in the order of their beginnings, without those that ended more than a day ago."""
        cluster = self.view.cluster()
        stored = sorted(_stored(cluster), key=lambda w: (w.start, w.id))
        away = self.view.health().store_away_since
        return web.json_response(items([window_json(cluster, w) for w in stored], store_away_since=away))

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/windows {nodes, starts (Unix time) or starts_in (seconds), seconds, why?, request_id}."""
        asked = await requests.read(request, "nodes", "starts", "starts_in", "seconds", "why")
        nodes, why = _nodes(asked), requests.text(asked, "why", MOST_WHY).strip()
        now, seconds = time.time(), _number(asked, "seconds")
        starts = now + _number(asked, "starts_in") if "starts_in" in asked else _number(asked, "starts")
        if not 0 < seconds <= LONGEST:
            raise ApiError("usage", f"a window lasts {spoken(LONGEST)} at most, and not {spoken(seconds)}", _UNCHANGED)
        if not now < starts + seconds <= now + FARTHEST:
            when = "is over already" if starts + seconds <= now else f"ends in more than {spoken(FARTHEST)}"
            raise ApiError("usage", f"this window {when}", "say when it begins: from 2030-01-31T22:00, or from +2h")
        who = await auth.caller(request, self.view.config.jobs)

        def change(cluster: Cluster, rev: int) -> tuple[tuple[Window, ...], Window, str]:
            _known(cluster, nodes)
            others = _stored(cluster)
            if len(others) >= MOST_WINDOWS:
                raise ApiError(
                    "limit", f"there are {MOST_WINDOWS} windows already",
                    "delete those that are over: nodeagentctl reserve list; " + _UNCHANGED,
                )  # fmt: skip
            reason = f": {why}" if why else ""
            text = f"in maintenance from {_utc(starts)} to {_utc(starts + seconds)} UTC{reason} (by {who.name})"
            start = cluster.served + millis(starts - now)
            new = Window(
                id=f"w{rev}", nodes=nodes, start=start, end=cluster.served + millis(starts + seconds - now),
                starts=starts, ends=starts + seconds, why=why, by=who.name, text=text,
            )  # fmt: skip
            return (*others, new), new, f"nodes {','.join(nodes)} {new.text}"

        # not the time of its beginning: +2h is another one each time that it is said
        return await self._write(who, once(requests.request_id(asked), "reserve", nodes, seconds, why), change)

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/windows/{window} {request_id}: its nodes work as if the window had never existed."""
        name, asked = request.match_info["window"], await requests.read(request)
        who = await auth.caller(request, self.view.config.jobs)

        def change(cluster: Cluster, _rev: int) -> tuple[tuple[Window, ...], Window, str]:
            stored = _stored(cluster)
            found = next((w for w in stored if w.id == name), None)
            if found is None:
                raise unknown("window", name, [w.id for w in stored])
            return tuple(w for w in stored if w.id != name), found, f"window {name} deleted (by {who.name})"

        return await self._write(who, once(requests.request_id(asked), "reserve-delete", name), change)

    async def _write(self, who: Caller, asked: Once, change: WindowsChange) -> web.Response:
        auth.may_change_windows(who)
        if (made := await earlier(self.view.store, asked)) is not None:
            cluster = self.view.cluster()
            there = [window_json(cluster, window) for window in _stored(cluster) if window.id == made.did]
            found = {"changed": False, "window": there[0] if there else None}
            return web.json_response(found | await saved(self.view, made.rev, self.view.era))

        async def attempt() -> tuple[Window, int, str]:
            cluster, era = self.view.cluster(), self.view.era
            rev = max(cluster.windows.rev, cluster.windows_rev) + 1
            after, one, text = change(cluster, rev)
            signed = self.view.seal.windows(Windows(rev=rev, by=who.name, windows=after))
            record = await self.view.store.windows(cluster.windows_rev, signed, asked.request, text, asked.did(one.id))
            return one, record.rev, era

        one, rev, era = await write_again(self.view, attempt)
        await seen(self.view)
        disks = await saved(self.view, rev, era)
        return web.json_response({"changed": True, "window": window_json(self.view.cluster(), one)} | disks)


def window_json(cluster: Cluster, window: Window) -> Json:
    """One window. ``state`` is ``ahead``, ``open`` (its nodes take no work) or ``over``; ``known`` are its nodes;
    ``begins`` and ``closes`` are the seconds until then, below zero once they have passed."""
    begins, closes = (round((at - cluster.served) / 1000, 1) for at in (window.start, window.end))
    state = "over" if closes <= 0 else "open" if begins <= 0 else "ahead"
    known = [node for node in in_order(cluster) if window.names(node)]
    return window.model_dump(mode="json", exclude={"id", "start", "end", "text"}) | {
        "name": window.id, "state": state, "known": known, "begins": begins, "closes": closes,
    }  # fmt: skip


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))


def _stored(cluster: Cluster) -> tuple[Window, ...]:
    return tuple(w for w in cluster.windows.windows if not outdated(w, cluster.served))


def _nodes(asked: dict[str, Any]) -> tuple[str, ...]:
    value = asked.get("nodes")
    if not isinstance(value, list) or not 0 < len(value) <= MOST_PATTERNS:
        raise ApiError("usage", f"nodes must be a list of 1 to {MOST_PATTERNS} names", 'send {nodes: ["n[1-8]"]}')
    for one in value:
        if not isinstance(one, str) or len(one) > MOST_WHY or not is_pattern(one):
            raise ApiError("usage", f"{one!r} names no nodes", "write n7, or a range such as n[1-8,12]")
    return tuple(dict.fromkeys(value))


def _known(cluster: Cluster, nodes: tuple[str, ...]) -> None:
    for one in nodes:
        if not any(names(one, node) for node in cluster.nodes):
            raise unknown("node", one, cluster.nodes)


def _number(asked: dict[str, Any], key: str) -> float:
    if (found := requests.seconds(asked, key)) is None:
        raise ApiError("usage", f"{key} is missing", "send {nodes: [n1], starts_in: 7200, seconds: 14400}")
    return found
