"""Identifies callers and checks their permissions. On the unix socket the kernel identifies the caller (SO_PEERCRED);
over https a token, a ticket or a certificate does. Users and groups are looked up in threads, because their database
may be a server that does not answer.

Owns these threads, and every permission of the API. Must never block the loop, which renews the lease, and never trust
a name or an id from a request's body.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import queue
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from aiohttp import web

from nodeagent.api.errors import ApiError
from nodeagent.model.job import JobRecord
from nodeagent.osutil.linux import peer_credentials
from nodeagent.spec.agentconfig import JobsConfig

T = TypeVar("T")

THREADS = 4
"""Look-ups that run at once; one that hangs blocks one of them."""
WAITING = 256
"""The most look-ups that wait for a thread."""
TIMEOUT = 5.0
"""Seconds that a request waits for the identity of its caller."""
NAMES_LIMIT = 2.0
"""Seconds that an answer waits for the names in it; after that it shows numbers."""
FRESH = 30.0
"""Seconds for which an answer of the database stays valid."""
KEPT = 4096
"""The most answers that are cached; the oldest are dropped first."""


def name_of(uid: int) -> str:
    """The user's name, or the number of a user without a name on this node. Blocks."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@dataclass(frozen=True, slots=True)
class _Answer:
    value: object
    until: float


class UserDatabase:
    """Looks up users. ``look`` returns the name of a uid and may block; ``clock`` counts seconds."""

    def __init__(self, look: Callable[[int], str], clock: Callable[[], float]) -> None:
        self._look, self._clock = look, clock
        self._known: dict[Hashable, _Answer] = {}
        self._asked: dict[Hashable, Future[Any]] = {}
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], object]]] = queue.SimpleQueue()
        self._threads = 0

    def shown(self, uid: int) -> str:
        """The user's name if it is cached, else the number. Never blocks and looks up nothing."""
        answer = self._known.get(("name", uid))
        return str(uid) if answer is None else str(answer.value)

    async def learn(self, uids: Iterable[int]) -> None:
        """Look up these names for ``shown``, if the database answers soon enough. Raises nothing."""
        wanted = [self._begin(("name", uid), lambda uid=uid: self._look(uid)) for uid in set(uids)]  # type: ignore[misc]
        pending = [asyncio.wrap_future(future) for future in wanted if future is not None and not future.done()]
        if pending:
            await asyncio.wait([asyncio.shield(one) for one in pending], timeout=NAMES_LIMIT)

    async def ask(self, key: Hashable, look: Callable[[], T], whom: str, timeout: float = TIMEOUT) -> T:
        """The database's answer, cached by ``key``. Raises ``ApiError`` if the database does not answer, and the errors
        of ``look``."""
        known = self._fresh(key)
        if known is not None:
            return cast("T", known.value)
        future = self._begin(key, look)
        if future is None and not self._threads:
            raise ApiError(
                "permission",
                f"there is no thread for a look at the user database for {whom}",
                "see which processes fill this node's process table, then try again",
            )
        if future is not None:
            try:
                async with asyncio.timeout(timeout):
                    return cast("T", await asyncio.shield(asyncio.wrap_future(future)))
            except TimeoutError:
                pass
        raise ApiError(
            "permission",
            f"the user database did not answer for {whom} within {timeout:.0f} s",
            "check that `id` answers on this node, then try again",
        )

    def _fresh(self, key: Hashable) -> _Answer | None:
        known = self._known.get(key)
        return known if known is not None and self._clock() < known.until else None

    def _begin(self, key: Hashable, look: Callable[[], object]) -> Future[Any] | None:
        """The look-up under way for this key, or a new one; None if too many already wait, or there is no thread."""
        known = self._fresh(key)
        if known is not None:
            done: Future[Any] = Future()
            done.set_result(known.value)
            return done
        asked = self._asked.get(key)  # one step of the interpreter, since a thread removes it once it is answered
        if asked is not None:
            return asked
        if len(self._asked) >= WAITING:
            return None
        if self._threads < min(THREADS, len(self._asked) + 1):
            self._start_thread()
        if not self._threads:
            return None
        future: Future[Any] = Future()
        self._asked[key] = future
        future.add_done_callback(lambda done: self._take(key, done))
        self._queue.put((future, look))
        return future

    def _start_thread(self) -> None:
        """A daemon thread: a look-up that hangs must not delay the agent's end."""
        try:
            threading.Thread(target=self._work, name=f"users-{self._threads + 1}", daemon=True).start()
        except RuntimeError:  # the process table is full: those that there are go on, and the next look-up tries again
            return
        self._threads += 1

    def _take(self, key: Hashable, done: Future[Any]) -> None:
        """Runs in a thread of this class: each statement is one step of the interpreter."""
        if done.exception() is None:
            while len(self._known) >= KEPT:
                self._known.pop(next(iter(self._known)), None)
            self._known.pop(key, None)
            self._known[key] = _Answer(done.result(), self._clock() + FRESH)
        self._asked.pop(key, None)

    def _work(self) -> None:
        while True:
            future, look = self._queue.get()
            future.set_running_or_notify_cancel()
            try:
                result = look()
            except (
                OSError,
                LookupError,
                ValueError,
                ApiError,
            ) as error:  # every error of a look-up; its caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)


DATABASE = UserDatabase(name_of, time.monotonic)
"""The database of this process."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    uid: int
    """``NOBODY`` for a caller who is no user of this machine."""
    gid: int
    name: str
    """User name, or the uid as text if it has none; for a token without a user, the token's name."""
    operator: bool
    """Root, the agent's own user, or a member of the operators' group."""
    trusted: bool
    """Root or the agent's own user, on the unix socket: may submit for other users."""
    reads_only: bool = False
    """The caller may change nothing."""
    remote: bool = False
    """The caller came over https: a user name in a job from another machine has no meaning here."""

    @property
    def key(self) -> CallerKey:
        """Under which this caller's requests are counted."""
        return self.uid if self.uid != NOBODY else self.name


CallerKey = int | str
"""A user's number; for a credential without a user, its name."""
NOBODY = -1
"""The uid of a caller who is no user; no job's owner has this uid."""
NameOf = Callable[[int], str]
"""Returns a user's name, by uid."""
USERS = web.AppKey("nodeagent.users", UserDatabase)
"""The key under which an application stores its database of users."""
CALLER = web.RequestKey("nodeagent.caller", Caller)
"""The key under which ``remote.py`` stores the caller in the request."""


def user_id(name: str) -> int | None:
    """The user's number, or None if this node does not know the name. May block on the user database."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def in_group(name: str, gid: int, group: str) -> bool:
    """Returns whether the user, with this primary group, is a member. May block on the user database."""
    try:
        wanted = grp.getgrnam(group).gr_gid
        return wanted in os.getgrouplist(name, gid)
    except KeyError:
        return False


def identify(uid: int, gid: int, jobs: JobsConfig, agent_uid: int) -> Caller:
    """The caller with this uid. May block on the user database."""
    trusted = uid in (0, agent_uid)
    name = name_of(uid)
    operator = trusted or (jobs.operators is not None and in_group(name, gid, jobs.operators))
    return Caller(uid=uid, gid=gid, name=name, operator=operator, trusted=trusted)


async def caller(request: web.Request, jobs: JobsConfig) -> Caller:
    """The sender of this request. Raises ``ApiError`` if the sender is unknown or the user database does not answer."""
    known: Caller | None = request.get(CALLER)
    if known is not None:
        return known
    uid, gid = peer(request)
    return await database(request).ask(
        (uid, gid, jobs.operators), lambda: identify(uid, gid, jobs, os.geteuid()), f"uid {uid}"
    )


def database(request: web.Request) -> UserDatabase:
    """The user database of the application that serves the request."""
    return request.app.get(USERS, DATABASE)


def peer(request: web.Request) -> tuple[int, int]:
    """The uid and gid at the other end of the unix socket, by the kernel. Raises ``ApiError`` on any other socket."""
    transport = request.transport
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        raise ApiError("permission", "the caller is unknown", "use the unix socket, or https with a token")
    _, uid, gid = peer_credentials(sock)
    return uid, gid


_BEFORE = "A job of yours that had the name before is found by its uid: nodeagentctl get --all -o wide"


def may_change_job(who: Caller, job: JobRecord, names: NameOf = DATABASE.shown) -> None:
    """Raises ``ApiError`` unless the caller owns the job or is an operator. ``names``: users by uid."""
    if who.uid != job.owner and not who.operator:
        owner = names(job.owner)
        raise ApiError(
            "permission",
            f"job {job.name!r} belongs to {owner}; {who.name} may read it, not change it",
            f"ask {owner} or an operator; nothing was changed. {_BEFORE}",
        )


def may_see(who: Caller, job: JobRecord) -> bool:
    """Returns whether the caller may see the job's ``env`` and its workers' output."""
    runs_as = who.uid != NOBODY and who.name == job.spec.user
    return who.uid == job.owner or runs_as or who.operator


def may_read_logs(who: Caller, job: JobRecord, names: NameOf = DATABASE.shown) -> None:
    """Raises ``ApiError`` unless the caller owns the job or is an operator. ``names``: users by uid."""
    if not may_see(who, job):
        owner = names(job.owner)
        raise ApiError(
            "permission",
            f"what job {job.name!r} wrote is for {owner} and operators; {who.name} may see its state",
            f"nodeagentctl describe {job.name}; or ask {owner}. {_BEFORE}",
        )


def may_change_nodes(who: Caller, node: str) -> None:
    """Raises ``ApiError`` unless the caller is an operator."""
    _must_operate(who, f"change node {node}")


def may_change_queues(who: Caller) -> None:
    """Raises ``ApiError`` unless the caller is an operator."""
    _must_operate(who, "change queues")


def may_change_windows(who: Caller) -> None:
    """Raises ``ApiError`` unless the caller is an operator."""
    _must_operate(who, "reserve nodes")


def _must_operate(who: Caller, what: str) -> None:
    if not who.operator:
        raise ApiError(
            "permission",
            f"{who.name} may not {what}: only root and operators may",
            "ask an operator (the group of jobs.operators in the agent's config); nothing was changed",
        )


def may_submit(who: Caller, user: str, jobs: JobsConfig) -> None:
    """Raises ``ApiError`` if the caller may not run jobs as ``user``. May block on the user database."""
    if who.uid == NOBODY:
        raise ApiError(
            "permission",
            f"{who.name} acts as no user, so no job can be its own",
            "use a token that has `user:` in the agent's tokens file; nothing was submitted",
        )
    if who.name == str(who.uid) and not who.trusted and user_id(who.name) is None:
        raise ApiError(
            "permission",
            f"uid {who.uid} has no name in the user database of this node, so no node could run a job as it (a "
            "subordinate uid of a user namespace has none)",
            "submit as the user that you logged in as; if `id -un` names no user there either, ask an operator for an "
            "account; nothing was submitted",
        )
    if user not in (who.name, str(who.uid)) and not who.trusted:
        raise ApiError(
            "permission",
            f"{who.name} may not run a job as {user!r}",
            f"leave out `user:` or write `user: {who.name}`; nothing was submitted",
        )
    if (user_id(user) == 0 or user == "0") and not jobs.allow_root:
        raise ApiError(
            "permission",
            "jobs do not run as root here (jobs.allow_root is false in this node's config)",
            "submit as an ordinary user, or write `user: NAME` in the job file; nothing was submitted",
        )
