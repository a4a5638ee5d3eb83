"""Sends a call to Redis and returns the reply: on one of a few links, within a bound. A call counts as done only once
enough replicas have it.

Must never know what a step means. Every failure becomes one of the two store errors.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from nodeagent.model.base import RECORD_VERSION
from nodeagent.model.timing import Timing, millis
from nodeagent.store import codec
from nodeagent.store.base import (
    StepFailedError,
    StoreBusyError,
    StoreRefusedError,
    StoreUnavailableError,
    StoreUnusableError,
    TooMuchError,
)
from nodeagent.store.errors import NotReplicatedError, answers, explain, strict, timing_differs
from nodeagent.store.link import BusyError, StoreLink
from nodeagent.store.scripts import ActedOn, load, never
from nodeagent.store.wire import Reached, ReplyError, TooLongError

REPLICAS_SHARE = 0.5
"""Share of a call's bound that may be spent waiting for the replicas to have the step."""
CALLERS_QUEUE = 5.0
"""Seconds that what somebody has asked the agent for may wait for a link."""
CALLERS_STEPS = frozenset({"submit", "control", "forget", "cordon", "replace"})
"""Steps that callers of the API ask for."""
SHOWN = 80
"""Characters of an unexpected reply that an error shows."""
_NUMBER = r"\d{1,14}(\.\d{3})?"


class AnyLinks(Protocol):
    """A bounded set of links to one store: see ``Links``."""

    address: str
    reached: Reached | None
    """The server that the newest link leads to."""

    def one(self) -> AbstractAsyncContextManager[StoreLink]:
        """Lend a link for one request."""

    async def forget(self) -> None:
        """Drop the idle links: the server may be another one now."""

    async def close(self) -> None:
        """Close all links; requests under way fail."""


class Calls:
    """Calls for one cluster, whose keys begin with ``prefix``, on the links ``commands`` and ``waits``. ``timeout``
    (seconds) bounds each call, waiting for ``replicas`` included, and before that the wait for a link.

    What callers of the API read and change goes over links of its own (default: ``commands``): however much they ask
    for, the agent's own calls wait for none of it, and no failure of theirs drops a link of the agent's."""

    def __init__(
        self,
        commands: AnyLinks,
        waits: AnyLinks,
        prefix: str,
        timeout: float,
        replicas: int = 0,
        *,
        reads: AnyLinks | None = None,
        changes: AnyLinks | None = None,
    ) -> None:
        self.prefix, self._timeout = prefix, timeout
        self._commands, self._waits, self._replicas = commands, waits, replicas
        self._reads, self._changes = reads or commands, changes or commands

    async def step(
        self, name: str, arguments: dict[str, object], acted_on: ActedOn = never, words: Sequence[str] = ()
    ) -> Any:
        """Run a script. Returns its reply without the flag for success; raises StoreRefusedError with its reason, and
        StepFailedError if it is the script that fails. ``words``: what its usual case reads without decoding the
        arguments."""
        text = codec.encode(arguments)
        async with self.changing() if name in CALLERS_STEPS else self.link() as link:
            try:
                found = await link.evaluate(load(name), self.prefix, link.run_id, str(RECORD_VERSION), text, *words)
            except ReplyError as error:
                if error.is_of_the_step:  # the next call must not fail too; this one has failed all the same
                    await link.evaluate(load("examine"), self.prefix, link.run_id, str(RECORD_VERSION), "{}")
                    raise StepFailedError(explain(self._commands.address, self._timeout, error)) from error
                if error.is_forbidden and (commands := load(name).commands(error.line)):
                    raise ReplyError(f"{error}, {' or '.join(commands)} in the step {name}") from error
                raise
            done, *rest = _steps_own(found)
            if not done and rest[0] == "link":
                raise ConnectionError(rest[1])  # this drops the links
            if done and self._replicas and acted_on(rest):
                await self._replicated(link)
        if not done:
            raise StoreRefusedError(*rest)
        return rest

    async def timed(self, name: str, arguments: dict[str, object], timing: Timing, acted_on: ActedOn = never) -> Any:
        """Run a step that compares the timing; a refusal says which values differ."""
        try:
            return await self.step(name, arguments, acted_on)
        except StoreRefusedError as refusal:
            if refusal.code == "timing":
                with strict():
                    stored = codec.from_json(Timing, codec.bounded(str(refusal), codec.MOST_OF_LINE))
                raise StoreRefusedError("timing", timing_differs(stored, timing)) from None
            raise

    def link(self) -> AbstractAsyncContextManager[StoreLink]:
        """A link for requests of the agent's own that are answered at once."""
        return self._bounded(self._commands, self._timeout)

    def reading(self) -> AbstractAsyncContextManager[StoreLink]:
        """A link for what callers read. It may be long in coming, where they read much."""
        return self._bounded(self._reads, self._timeout, CALLERS_QUEUE)

    def changing(self) -> AbstractAsyncContextManager[StoreLink]:
        """A link for what callers change."""
        return self._bounded(self._changes, self._timeout, CALLERS_QUEUE)

    def waiting(self, seconds: float) -> AbstractAsyncContextManager[StoreLink]:
        """A link for a request that the server may hold back for this many seconds."""
        return self._bounded(self._waits, seconds + self._timeout)

    @property
    def replicated(self) -> bool:
        """What a step has written counts only once replicas have it."""
        return self._replicas > 0

    @property
    def reached(self) -> Reached | None:
        """The server that the newest link leads to; None before the first."""
        return self._commands.reached

    @property
    def address(self) -> str:
        """Of the store by the config, for people."""
        return self._commands.address

    async def close(self) -> None:
        for links in self._all():
            await links.close()

    def _all(self) -> tuple[AnyLinks, ...]:
        return self._commands, self._waits, self._reads, self._changes

    async def _replicated(self, link: StoreLink) -> None:
        """Returns once enough replicas have all that this link wrote or read; raises NotReplicatedError."""
        there = await link.ask("WAIT", self._replicas, max(1, millis(REPLICAS_SHARE * self._timeout)))
        if not isinstance(there, int):
            raise _no_step(there)
        if there < self._replicas:
            raise NotReplicatedError(f"{there} of the {self._replicas} replicas that must have it do")

    @asynccontextmanager
    async def _bounded(self, links: AnyLinks, timeout: float, queue: float = 0.0) -> AsyncIterator[StoreLink]:
        """A link within a bound; every failure of the link becomes StoreUnavailableError. Getting the link has the
        bound once (and ``queue`` seconds besides), and the request has it again: opening one is a round trip too, and
        on a slow network a node whose link broke needs a new one before its fence."""
        try:
            async with asyncio.timeout(queue + timeout) as bound, links.one() as link:
                bound.reschedule(asyncio.get_running_loop().time() + timeout)
                yield link
        except BusyError as error:  # the store was not asked: it may well be there
            raise StoreBusyError(str(error)) from error
        except TooLongError as error:  # the other links lead to the same store, and have nothing of this reply
            raise TooMuchError(explain(links.address, timeout, error)) from error
        except (ReplyError, OSError) as error:
            own = links in (self._commands, self._waits)
            for lane in self._all() if own else (links,):
                await lane.forget()
            kind = StoreUnusableError if answers(error) else StoreUnavailableError
            raise kind(explain(links.address, timeout, error)) from error


def _steps_own(reply: Any) -> list[Any]:
    """Returns the reply if a script of ours can have given it: a list of 1 and the results, or of 0, a code, a sentence
    and perhaps a number. Raises ConnectionError for any other: the server then does not run scripts as Redis
    does."""
    if not isinstance(reply, list) or not reply or reply[0] not in (0, 1):
        raise _no_step(reply)
    if reply[0] == 0:
        words = [part for part in reply[1:] if isinstance(part, str)]
        number = words[2:]
        if not 2 <= len(words) == len(reply) - 1 <= 3 or not all(re.fullmatch(_NUMBER, one) for one in number):
            raise _no_step(reply)
    return reply


def _no_step(reply: object) -> ConnectionError:
    return ConnectionError(f"it answered {repr(reply)[:SHOWN]}, which is no reply of a step")
