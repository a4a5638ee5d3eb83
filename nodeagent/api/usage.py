"""What each user asks of this agent right now, held to ``limits`` of its config: requests a second, requests under way,
logs and events that are followed. A user is the one that the kernel or a credential names.

Owns the counts. Must never look up a name before a count says no: a flood costs nothing but this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from nodeagent.api import auth, requests
from nodeagent.api.auth import CALLER, NOBODY
from nodeagent.api.errors import ApiError
from nodeagent.api.page import FILES
from nodeagent.api.view import AgentView
from nodeagent.spec.limitsconfig import LimitsConfig

USERS = 4096
"""Most users that are counted at once; those who ask for nothing are forgotten first."""
BURST = 2
"""Seconds' worth of requests that may come at once."""
REMEMBERED = 300.0
"""Seconds for which ``doctor`` says that somebody was refused."""

Key = int | str
"""A user's number; of a credential that acts as no user its name."""


@dataclass(slots=True)
class _Asking:
    """One user, now."""

    tokens: float
    at: float
    under_way: int = 0
    following: int = 0
    refused: dict[str, float] = field(default_factory=dict)
    """Key of the config to when it was the reason last."""


class Usage:
    """``clock`` counts seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._users: dict[Key, _Asking] = {}

    def __len__(self) -> int:
        """Users that are counted."""
        return len(self._users)

    def begin(self, key: Key, limits: LimitsConfig, *, follows: bool) -> str:
        """Count one more request of this user: empty, and ``end`` has to follow; or the key of ``limits`` that says
        no (``users``: too many of them), and nothing was counted."""
        now = self._clock()
        asking = self._users.get(key)
        if asking is None:
            if len(self._users) >= USERS:
                self._forget(now, limits)
            if len(self._users) >= USERS:
                return "users"
            asking = self._users[key] = _Asking(tokens=float(BURST * limits.requests), at=now)
        asking.tokens = min(BURST * limits.requests, asking.tokens + (now - asking.at) * limits.requests)
        asking.at = now
        no = ""
        if asking.tokens < 1:
            no = "requests"
        elif asking.under_way >= limits.concurrent:
            no = "concurrent"
        elif follows and asking.following >= limits.followers:
            no = "followers"
        if no:
            asking.refused[no] = now
            return no
        asking.tokens -= 1
        asking.under_way += 1
        asking.following += follows
        return ""

    def end(self, key: Key, *, follows: bool) -> None:
        """A counted request has been answered."""
        asking = self._users[key]
        asking.under_way -= 1
        asking.following -= follows

    def held(self, key: Key) -> tuple[int, int]:
        """(requests under way, those of them that follow) of this user."""
        asking = self._users.get(key)
        return (0, 0) if asking is None else (asking.under_way, asking.following)

    def refused(self) -> Mapping[Key, tuple[str, ...]]:
        """Users that were refused lately, with the keys of ``limits`` that said so."""
        since = self._clock() - REMEMBERED
        found = {key: tuple(k for k, at in a.refused.items() if at >= since) for key, a in self._users.items()}
        return {key: keys for key, keys in found.items() if keys}

    def _forget(self, now: float, limits: LimitsConfig) -> None:
        """Those with nothing under way whose bucket is full by now."""
        full = BURST * limits.requests
        for key, asking in list(self._users.items()):
            if not asking.under_way and asking.tokens + (now - asking.at) * limits.requests >= full:
                del self._users[key]


def usage_middleware(view: AgentView, usage: Usage, agent_uid: int | None = None) -> Middleware:
    """Holds everybody but root, the agent's own user and operators to ``limits``. Behind the door's, where there is
    one. ``agent_uid``: the agent's own user, that of the process if not said."""
    own = os.geteuid() if agent_uid is None else agent_uid

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in FILES:  # the page's own, for anybody: over https nobody says who asks for them
            return await handler(request)
        known = request.get(CALLER)
        uid = auth.peer(request)[0] if known is None else known.uid
        if known is None and uid in (0, own):
            return await handler(request)
        key: Key = uid if known is None or known.uid != NOBODY else known.name
        limits, follows = view.config.limits, requests.flag(request, "follow")
        no = usage.begin(key, limits, follows=follows)
        if no:
            who = await auth.caller(request, view.config.jobs)
            if not who.operator:
                raise refusal(who.name, no, limits, view.node)
            return await handler(request)
        try:
            return await handler(request)
        finally:
            usage.end(key, follows=follows)

    return middleware


def refusal(name: str, key: str, limits: LimitsConfig, node: str) -> ApiError:
    """What a user is answered who is at this limit."""
    if key == "users":
        busy = f"the agent of node {node} has requests of {USERS} users under way"
        return ApiError("limit", f"{busy}, and counts no more at once; nothing was changed", "ask again in a moment")
    most = getattr(limits, key)
    what = {
        "requests": f"{name} has asked the agent of node {node} more often than {most} times a second",
        "concurrent": f"{name} has {most} requests under way at the agent of node {node}",
        "followers": f"{name} follows {most} logs or streams of events at the agent of node {node} already",
    }[key]
    step = {
        "requests": "ask again in a second, and less often",
        "concurrent": "wait for their answers, then ask again",
        "followers": "end one of them (Ctrl-C), then ask again",
    }[key]
    return ApiError("limit", f"{what} (limits.{key} in its config); nothing was changed", step)
