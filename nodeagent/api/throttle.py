"""How much each user may ask of this agent (``limits`` of the config): requests a second and at a time, and the share
of the agent's loop that they take.

Every refusal names the key of the config behind it. Root, the agent's own user and operators have no limits. Must never
look up a name before a count refuses: a request that is not refused costs only the count.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, requests
from nodeagent.api.auth import CALLER, CallerKey
from nodeagent.api.errors import ApiError
from nodeagent.api.loopback import FILES
from nodeagent.osutil.clock import Allowance
from nodeagent.osutil.subuids import SubordinateUids
from nodeagent.spec.sections import LimitsConfig

USERS = 4096
"""The most users that are counted at once; users without recent requests are forgotten first."""
BURST = 2
"""Requests that may come at once, in seconds of the allowed rate."""
REMEMBERED = 300.0
"""Seconds for which ``doctor`` reports that a user was refused."""
WORK_BURST, WORK_SHARE = 2.0, 0.5
"""Seconds of the agent's loop that one user's requests may take at once, and the share of it in the long run: of
requests that are few, each may be large."""
HEAVY_AT_ONCE = 2
"""Requests of one user that may read much of the store at the same time; others wait for their turn."""
HEAVY_WAIT = 10.0
"""Seconds until such a request is refused."""


@dataclass(slots=True)
class _Asking:
    """The present counts of one user."""

    requests: Allowance
    work: Allowance
    """Seconds of the agent's loop."""
    under_way: int = 0
    following: int = 0
    heavy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(HEAVY_AT_ONCE))
    refused: dict[str, float] = field(default_factory=dict)
    """Key of the config to the last time at which it was the reason of a refusal."""


class Throttle:
    """The requests of all users. ``limits``: as they are now, since a reload may change them; ``clock`` counts seconds
    and never goes back."""

    def __init__(self, limits: Callable[[], LimitsConfig], clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._users: dict[CallerKey, _Asking] = {}

    def __len__(self) -> int:
        """The number of users that are counted."""
        return len(self._users)

    def begin(self, key: CallerKey, *, follows: bool) -> str:
        """Count one more request of this user. Empty: it was counted, and ``end`` must follow. Otherwise the key of
        ``limits`` that refuses (``work``: the share of the loop is used up; ``users``: too many users), and nothing
        was counted."""
        now, limits = self._clock(), self._limits()
        rate = limits.requests
        asking = self._users.get(key)
        if asking is None:
            if len(self._users) >= USERS:
                self._forget(now)
            if len(self._users) >= USERS:
                return "users"
            asking = self._users[key] = _Asking(Allowance(BURST * rate, rate), Allowance(WORK_BURST, WORK_SHARE))
        asking.requests.change(BURST * rate, rate, now)
        if asking.work.spend(0, now):
            return "work"
        if asking.under_way >= limits.concurrent:
            return "concurrent"
        if follows and asking.following >= limits.followers:
            return "followers"
        if not asking.requests.may(now):
            return "requests"
        asking.under_way += 1
        asking.following += follows
        return ""

    def worked(self, key: CallerKey, seconds: float) -> None:
        """A counted request has kept the loop from anything else for so long."""
        self._users[key].work.spend(seconds, self._clock())

    def refuse(self, key: CallerKey, no: str) -> None:
        """Remember that this user was refused, for ``refused``."""
        if key in self._users:
            self._users[key].refused[no] = self._clock()

    def end(self, key: CallerKey, *, follows: bool) -> None:
        """A counted request has been answered."""
        asking = self._users[key]
        asking.under_way -= 1
        asking.following -= follows

    @asynccontextmanager
    async def turn(self, key: CallerKey) -> AsyncIterator[None]:
        """The turn of a counted request that reads much. Raises TimeoutError if it does not come in time."""
        heavy = self._users[key].heavy
        async with asyncio.timeout(HEAVY_WAIT):
            await heavy.acquire()
        try:
            yield
        finally:
            heavy.release()

    def under_way(self, key: CallerKey) -> tuple[int, int]:
        """This user's requests under way, and how many of them follow."""
        asking = self._users.get(key)
        return (0, 0) if asking is None else (asking.under_way, asking.following)

    def refused(self) -> Mapping[CallerKey, tuple[str, ...]]:
        """Users that were refused lately, with the keys of ``limits`` that refused."""
        since = self._clock() - REMEMBERED
        found = {key: tuple(k for k, at in a.refused.items() if at >= since) for key, a in self._users.items()}
        return {key: keys for key, keys in found.items() if keys}

    def _forget(self, now: float) -> None:
        """Forget users without requests under way to whom all is allowed again."""
        for key, asking in list(self._users.items()):
            if not asking.under_way and asking.requests.whole(now) and asking.work.whole(now):
                del self._users[key]


Answer = TypeVar("Answer")


class Timed(Awaitable[Answer]):
    """Awaits ``work``, and reports how long each of its steps keeps the loop (seconds of the thread's CPU)."""

    def __init__(self, work: Awaitable[Answer], took: Callable[[float], None]) -> None:
        self._work, self._took = cast("Generator[Any, None, Answer]", work.__await__()), took

    def __await__(self) -> Generator[Any, Any, Answer]:
        """As of the work itself, errors and cancellation included."""
        step: Callable[[], Any] = partial(self._work.send, None)
        while True:
            began = time.thread_time()
            try:
                waits = step()
            except StopIteration as over:
                answer: Answer = over.value
                return answer
            finally:
                self._took(time.thread_time() - began)
            try:
                yield waits
            except BaseException as error:  # noqa: BLE001 (whatever it is, it is the work's to handle)
                step = partial(self._work.throw, error)
            else:
                step = partial(self._work.send, None)


def throttle_middleware(view: AgentView, throttle: Throttle, subordinates: SubordinateUids) -> Middleware:
    """Applies ``limits`` to all callers but root, the agent's own user and operators. Runs after the https doorkeeper,
    if there is one. ``subordinates``: uids that are counted together."""
    own = os.geteuid()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in FILES:  # the status page's files are for all: over https they need no credentials
            return await handler(request)
        known = request.get(CALLER)
        uid = auth.peer(request)[0] if known is None else known.uid
        if known is None and uid in (0, own):
            return await handler(request)
        key: CallerKey = subordinates.key(uid) if known is None else known.key
        follows = requests.flag(request, "follow")
        no = throttle.begin(key, follows=follows)
        if no:
            who = await auth.caller(request, view.config.jobs)
            if not who.operator:
                throttle.refuse(key, "requests" if no == "work" else no)
                raise refusal(who.name, no, view.config.limits, view.node)
            return await handler(request)
        try:
            async with AsyncExitStack() as turn:
                if reads_much(request, follows=follows):
                    try:
                        await turn.enter_async_context(throttle.turn(key))
                    except TimeoutError:
                        raise refusal_of_much(view.node) from None
                return await Timed(handler(request), partial(throttle.worked, key))
        finally:
            throttle.end(key, follows=follows)

    return middleware


def reads_much(request: web.Request, *, follows: bool) -> bool:
    """Whether this request may read page after page of the store. What ``follows`` reads is what is new."""
    if request.path == "/v1/usage":
        return request.query.get("by") == "job"
    return request.path == "/v1/history" or (request.path == "/v1/events" and not follows)


def refusal_of_much(node: str) -> ApiError:
    """The answer to a user whose other requests for much have kept this one from its turn."""
    return ApiError(
        "limit",
        f"the agent of node {node} reads history, events and use by job for at most {HEAVY_AT_ONCE} requests of one "
        f"user at a time, and this one has waited for {HEAVY_WAIT:g} s; nothing was changed",
        "wait for the answers to the others, then ask again",
    )


def refusal(name: str, key: str, limits: LimitsConfig, node: str) -> ApiError:
    """The answer to a user who has reached this limit."""
    if key == "work":
        much = f"what {name} asks for has kept the agent of node {node} from other things for half of its time"
        return ApiError("limit", f"{much}; nothing was changed", "ask again in some seconds, for less at a time")
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
