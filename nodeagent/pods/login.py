"""Whom a pod runs as: what this node's user database says of a job's user. It may be a server that does not answer
(LDAP behind NSS), so it is asked in threads, and remembered for a while.

Must never make the loop wait: it renews the lease.
"""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass

from nodeagent.osutil.threads import in_daemon

LIMIT = 5.0
"""Seconds that a pod waits for its user."""
FRESH = 30.0
"""Seconds for which an answer is taken for true."""
MOST = 8
"""Look-ups under way at once, those included that hang."""
KEPT = 1024
"""Most answers that are remembered; the oldest go first."""


class UserError(Exception):
    """This agent cannot run the job's user; ``str()`` is the sentence for the person."""


class NoAnswerError(UserError):
    """The user database does not answer just now: nobody knows whether it can."""


@dataclass(frozen=True, slots=True)
class Login:
    """Whom a shim runs as."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]


def find_login(user: str, node: str, allow_root: bool) -> Login:
    """The job's user on this node. Raises UserError. Blocks for as long as the user database does."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise UserError(f"user {user} does not exist on {node}") from None
    if os.geteuid() != 0:
        if entry.pw_uid != os.geteuid():
            raise UserError(f"the agent of {node} does not run as root, so it can run jobs of its own user only")
    elif entry.pw_uid == 0 and not allow_root:
        raise UserError(f"{node} runs no jobs of root; set allow_root in its config, or submit as another user")
    groups = tuple(os.getgrouplist(user, entry.pw_gid))
    return Login(user, entry.pw_uid, entry.pw_gid, groups)


FindLogin = Callable[[str, str, bool], Login]
LoginKey = tuple[str, bool]


class Logins:
    """Of one node. ``look`` is ``find_login``'s like and may block; ``clock`` counts seconds."""

    def __init__(self, node: str, look: FindLogin, clock: Callable[[], float]) -> None:
        self._node, self._look, self._clock = node, look, clock
        self._known: dict[LoginKey, tuple[Login, float]] = {}
        self._asked: dict[LoginKey, asyncio.Future[Login]] = {}

    def known(self, user: str, allow_root: bool) -> Login | None:
        """What was answered lately. Never blocks."""
        login, until = self._known.get((user, allow_root), (None, 0.0))
        return login if self._clock() < until else None

    async def find(self, user: str, allow_root: bool, limit: float = LIMIT) -> Login:
        """As ``find_login``, in a thread. Raises UserError; NoAnswerError when there is no answer within ``limit``
        seconds."""
        if (known := self.known(user, allow_root)) is not None:
            return known
        future = self._asked.get((user, allow_root)) or self._ask((user, allow_root))
        try:
            async with asyncio.timeout(limit):
                return await asyncio.shield(future)
        except TimeoutError:
            raise NoAnswerError(
                f"the user database of {self._node} did not answer for {user} within {limit:g} s; see that "
                f"`id {user}` answers there"
            ) from None

    def _ask(self, key: LoginKey) -> asyncio.Future[Login]:
        if len(self._asked) >= MOST:
            text = f"{MOST} questions to the user database of {self._node} are not answered; see that `id` is"
            raise NoAnswerError(text)
        future = in_daemon(lambda: self._look(key[0], self._node, key[1]), "login")
        future.add_done_callback(lambda found: self._take(key, found))
        self._asked[key] = future
        return future

    def _take(self, key: LoginKey, found: asyncio.Future[Login]) -> None:
        del self._asked[key]
        if found.cancelled() or found.exception() is not None:
            return
        self._known.pop(key, None)
        while len(self._known) >= KEPT:
            del self._known[next(iter(self._known))]
        self._known[key] = found.result(), self._clock() + FRESH
