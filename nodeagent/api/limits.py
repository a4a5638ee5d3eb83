"""The site's rules about jobs (``limits`` of the config), and the number of requests that each user may
make to this agent.

Every refusal names the key of the config behind it. Root, the agent's own user and operators have no limits.

Owns the counts. Must never look up a name before a count refuses: a request that is not refused costs only the count.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, requests
from nodeagent.api.auth import CALLER, Caller, Key, UserDatabase, in_group
from nodeagent.api.errors import ApiError
from nodeagent.api.loopback import FILES
from nodeagent.api.serializers import Json
from nodeagent.model.job import TERMINAL, JobRecord, Quota
from nodeagent.model.jobspec import JobSpec
from nodeagent.osutil.clock import Allowance
from nodeagent.spec.sections import LimitsConfig

RESTART_WINDOW = 3600.0
"""The shortest window in which restarts are counted, if the site limits them: a shorter window would be no limit."""


def may_submit_at_all(who: Caller, limits: LimitsConfig, node: str) -> None:
    """Raises ``ApiError`` unless the site lets the caller submit. May block on the user database."""
    allowed = limits.submit
    if who.operator or not (allowed.users or allowed.groups) or who.name in allowed.users:
        return
    if any(in_group(who.name, who.gid, group) for group in allowed.groups):
        return
    raise ApiError(
        "permission",
        f"{who.name} may not submit jobs: limits.submit in the config of node {node} lists neither this user nor a "
        "group of theirs",
        "ask an operator; nothing was submitted",
    )


def few_enough_nodes(who: Caller, spec: JobSpec, limits: LimitsConfig, node: str, nothing: str) -> None:
    """Raises ``ApiError`` where the job asks for more nodes than only operators may have. ``nothing``: what was not
    done."""
    most, nodes = limits.nodes_per_job, spec.nodes.max
    if most is not None and nodes > most and not who.operator:
        raise ApiError(
            "permission",
            f"job {spec.name!r} asks for up to {nodes} nodes; limits.nodes_per_job in the config of node {node} is "
            f"{most}",
            f"write a max of {most} nodes or fewer, or ask an operator; {nothing}",
        )


def within_policy(who: Caller, spec: JobSpec, limits: LimitsConfig, node: str) -> None:
    """Raises ``ApiError`` where the job asks for what only operators may have."""
    few_enough_nodes(who, spec, limits, node, "nothing was submitted")
    if who.operator:
        return
    few, asked = limits.restarts_per_job, spec.restarts
    if few is not None and asked.max and (asked.max > few or asked.window < RESTART_WINDOW):
        within = f", within {RESTART_WINDOW:g} s or longer" if asked.max <= few else ""
        raise ApiError(
            "permission",
            f"job {spec.name!r} asks for {asked.max} restarts within {asked.window:g} s; limits.restarts_per_job in "
            f"the config of node {node} is {few}{within}",
            f"write restarts: {{max: {few}}} or less, with a window of 1h or longer, or ask an operator; nothing was "
            "submitted",
        )
    if spec.priority > 0:
        raise ApiError(
            "permission",
            f"job {spec.name!r} has priority {spec.priority}; priorities above 0 are for operators (the group of "
            f"jobs.operators in the config of node {node}), and {who.name} is not an operator",
            "leave out `priority:` or write 0 or less; nothing was submitted",
        )


def quota(who: Caller, limits: LimitsConfig) -> Quota | None:
    """The quota that the store enforces for the caller's jobs; None: no quota."""
    return None if who.operator else Quota(jobs=limits.jobs, bytes=limits.job_bytes)


def within_quota(who: Caller, quota: Quota, new: Sequence[tuple[JobSpec, int]]) -> None:
    """Raises ``ApiError`` where these jobs, each with the number of such jobs, are over the quota by themselves. The
    store says so too, but a thousand large jobs keep it, and this agent, busy for seconds until then."""
    count, size = sum(number for _, number in new), 0
    for spec, number in new:
        if count <= quota.jobs and size <= quota.bytes:
            size += len(spec.to_json().encode()) * number
    if count > quota.jobs:
        raise ApiError(
            "limit",
            f"these are {count} jobs, more than the {quota.jobs} that limits.jobs allows {who.name} at a time",
            "submit fewer at once; nothing was submitted",
        )
    if size > quota.bytes:
        raise ApiError(
            "limit",
            f"these jobs would take {size} bytes or more, and limits.job_bytes allows {who.name} {quota.bytes}",
            "submit fewer at once, or put long texts into files that the nodes can read; nothing was submitted",
        )


def limits_json(limits: LimitsConfig) -> Json:
    """The values in force at one agent; None if there is no limit. Numbers are counts, bytes and (``requests``)
    requests a second."""
    return limits.model_dump(mode="json")


async def owner_json(view: AgentView, usage: Usage, names: UserDatabase, job: JobRecord) -> Json | None:
    """The limits of the job's owner, and how much of them is used; None for an owner without limits."""
    owner, config = job.owner, view.config
    if owner in (0, os.geteuid()) or await _operator(view, names, job):
        return None
    own = [j for j in view.cluster().jobs.values() if j.owner == owner]
    size = await usage.bytes_of(own)
    under_way, following = usage.held(owner)
    live = sum(j.phase not in TERMINAL for j in own)
    return {
        "owner": names.shown(owner),
        "node": view.node,
        "values": limits_json(config.limits),
        "used": {"jobs": live, "job_bytes": size, "concurrent": under_way, "followers": following},
    }


async def _operator(view: AgentView, names: UserDatabase, job: JobRecord) -> bool:
    """Returns whether the owner is an operator, if the user database answers in time."""
    who, group = job.spec.submitter, view.config.jobs.operators
    if group is None or who.uid != job.owner:
        return False
    try:
        return await names.ask(
            ("operator", who.user, who.gid, group), lambda: auth.in_group(who.user, who.gid, group), f"user {who.user}"
        )
    except ApiError:
        return False


USERS = 4096
"""The most users that are counted at once; users without recent requests are forgotten first."""
BURST = 2
"""Requests that may come at once, in seconds of the allowed rate."""
REMEMBERED = 300.0
"""Seconds for which ``doctor`` reports that a user was refused."""

SIZES = 10_000
"""Jobs whose size is kept in memory."""
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

    tokens: float
    at: float
    work: Allowance
    """Seconds of the agent's loop."""
    under_way: int = 0
    following: int = 0
    heavy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(HEAVY_AT_ONCE))
    refused: dict[str, float] = field(default_factory=dict)
    """Key of the config to the last time at which it was the reason of a refusal."""


class Usage:
    """The requests of all users. ``clock`` counts seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._users: dict[Key, _Asking] = {}
        self._sizes: dict[str, int] = {}
        """Of jobs by uid, whose specs never change: bytes, the newest asked for last."""

    def __len__(self) -> int:
        """The number of users that are counted."""
        return len(self._users)

    def begin(self, key: Key, limits: LimitsConfig, *, follows: bool) -> str:
        """Count one more request of this user. Empty: it was counted, and ``end`` must follow. Otherwise the key of
        ``limits`` that refuses (``users``: too many users), and nothing was counted."""
        now = self._clock()
        asking = self._users.get(key)
        if asking is None:
            if len(self._users) >= USERS:
                self._forget(now, limits)
            if len(self._users) >= USERS:
                return "users"
            work = Allowance(WORK_BURST, WORK_SHARE)
            asking = self._users[key] = _Asking(tokens=float(BURST * limits.requests), at=now, work=work)
        asking.tokens = min(BURST * limits.requests, asking.tokens + (now - asking.at) * limits.requests)
        asking.at = now
        no = ""
        if asking.tokens < 1:
            no = "requests"
        elif asking.work.spend(0, now):
            no = "work"
        elif asking.under_way >= limits.concurrent:
            no = "concurrent"
        elif follows and asking.following >= limits.followers:
            no = "followers"
        if no:
            return no
        asking.tokens -= 1
        asking.under_way += 1
        asking.following += follows
        return ""

    def worked(self, key: Key, seconds: float) -> None:
        """A counted request has kept the loop from anything else for so long."""
        self._users[key].work.spend(seconds, self._clock())

    def refuse(self, key: Key, no: str) -> None:
        """Remember that this user was refused, for ``refused``."""
        if key in self._users:
            self._users[key].refused[no] = self._clock()

    def end(self, key: Key, *, follows: bool) -> None:
        """A counted request has been answered."""
        asking = self._users[key]
        asking.under_way -= 1
        asking.following -= follows

    @asynccontextmanager
    async def turn(self, key: Key) -> AsyncIterator[None]:
        """The turn of a counted request that reads much. Raises TimeoutError if it does not come in time."""
        heavy = self._users[key].heavy
        async with asyncio.timeout(HEAVY_WAIT):
            await heavy.acquire()
        try:
            yield
        finally:
            heavy.release()

    def held(self, key: Key) -> tuple[int, int]:
        """This user's requests under way, and how many of them follow."""
        asking = self._users.get(key)
        return (0, 0) if asking is None else (asking.under_way, asking.following)

    async def bytes_of(self, jobs: Sequence[JobRecord]) -> int:
        """What the specs of these jobs take in the store. Each is written once: at the limit they are megabytes."""
        have = {job.uid: self._sizes[job.uid] for job in jobs if job.uid in self._sizes}
        if new := [job for job in jobs if job.uid not in have]:
            found = await requests.written(lambda: {job.uid: len(job.spec.to_json().encode()) for job in new})
            have |= found
            self._sizes |= found
            for uid in list(self._sizes)[: max(0, len(self._sizes) - SIZES)]:
                del self._sizes[uid]
        return sum(have.values())

    def refused(self) -> Mapping[Key, tuple[str, ...]]:
        """Users that were refused lately, with the keys of ``limits`` that refused."""
        since = self._clock() - REMEMBERED
        found = {key: tuple(k for k, at in a.refused.items() if at >= since) for key, a in self._users.items()}
        return {key: keys for key, keys in found.items() if keys}

    def _forget(self, now: float, limits: LimitsConfig) -> None:
        """Forget users without requests under way whose full rate is available again."""
        full = BURST * limits.requests
        for key, asking in list(self._users.items()):
            idle = not asking.under_way and not asking.work.spend(0, now)
            if idle and asking.tokens + (now - asking.at) * limits.requests >= full:
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


def usage_middleware(view: AgentView, usage: Usage) -> Middleware:
    """Applies ``limits`` to all callers but root, the agent's own user and operators. Runs after the https doorkeeper,
    if there is one."""
    own = os.geteuid()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in FILES:  # the status page's files are for all: over https they need no credentials
            return await handler(request)
        known = request.get(CALLER)
        uid = auth.peer(request)[0] if known is None else known.uid
        if known is None and uid in (0, own):
            return await handler(request)
        key: Key = uid if known is None else known.key
        limits, follows = view.config.limits, requests.flag(request, "follow")
        no = usage.begin(key, limits, follows=follows)
        if no:
            who = await auth.caller(request, view.config.jobs)
            if not who.operator:
                usage.refuse(key, "requests" if no == "work" else no)
                raise refusal(who.name, no, limits, view.node)
            return await handler(request)
        try:
            async with AsyncExitStack() as turn:
                if reads_much(request, follows=follows):
                    try:
                        await turn.enter_async_context(usage.turn(key))
                    except TimeoutError:
                        raise refusal_of_much(view.node) from None
                return await Timed(handler(request), partial(usage.worked, key))
        finally:
            usage.end(key, follows=follows)

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
