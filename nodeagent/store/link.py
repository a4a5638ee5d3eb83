"""Connections to the Redis server, and the search for a service's primary by its sentinels.

A link does one request at a time and is dropped at the first doubt. It returns to the idle links only after its reply
was read whole; after any error or cancellation it is dropped, so no later request can read an earlier one's reply.
Every new link asks all sentinels at once (if there are any) and then the server for its role: a replica is never used.
The sentinels' answer alone must never decide that a server *is* the primary. Must never retry or know what a request
means. The caller bounds each request; only the wait for sentinels has its own bound.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import Any

from nodeagent.model.timing import Timing
from nodeagent.spec.storeconfig import RedisConfig, shown
from nodeagent.store.endpoint import HostAddresses, StoreEndpoint
from nodeagent.store.scripts import Script
from nodeagent.store.whois import identity, parse_info, require_primary
from nodeagent.store.wire import LONGEST_REPLY, Connection, Reached, ReplyError

Host = tuple[str, int]


class BusyError(ConnectionError):
    """All links were in use for too long: the server was not asked."""


class NoPrimaryError(ConnectionError):
    """No sentinel could name the primary."""


async def find_primary(endpoint: StoreEndpoint, patience: float) -> Host:
    """The address that more than half of the sentinels name, as soon as they do. After ``patience`` seconds, the
    address that most of the answers so far name. Raises NoPrimaryError."""
    hosts, service = endpoint.place.hosts, endpoint.place.service
    tasks = [asyncio.create_task(_named(endpoint, host, service)) for host in hosts]
    votes: Counter[Host] = Counter()
    troubles: list[str] = []
    try:
        async with asyncio.timeout(patience):
            for answer in asyncio.as_completed(tasks):
                try:
                    votes[await answer] += 1
                except (ReplyError, OSError) as error:
                    troubles.append(_described(error))
                    continue
                if max(votes.values()) * 2 > len(hosts):
                    break
    except TimeoutError:
        troubles.append(f"{sum(not task.done() for task in tasks)} did not answer within {patience:g} s")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not votes:
        raise NoPrimaryError(f"none of its {len(hosts)} sentinels names a primary: {'; '.join(troubles)}")
    return votes.most_common(1)[0][0]


async def ask_sentinel(endpoint: StoreEndpoint, host: Host, *command: str) -> Any:
    """One question to one sentinel, on a connection of its own."""
    connection = endpoint.sentinel(host)
    try:
        await connection.open()
        for words in (*endpoint.sentinel_greeting(), ("SENTINEL", *command)):
            await connection.send(*words)
            answer = await connection.receive()
        return answer
    finally:
        await connection.close()


async def _named(endpoint: StoreEndpoint, host: Host, service: str) -> Host:
    answer = await ask_sentinel(endpoint, host, "GET-MASTER-ADDR-BY-NAME", service)
    if answer is None:
        raise NoPrimaryError(f"{shown(*host)} knows no service {service!r}")
    return str(answer[0]), int(answer[1])


def _described(error: Exception) -> str:
    if isinstance(error, ReplyError) and error.not_let_in:
        return f"{error} (check redis.sentinel in the agent's config)"
    return str(error)


class Quickest:
    """The shortest time in which the store has lately answered anything: as far as it is away, or slow by itself."""

    KEPT = 30.0
    """Seconds for which the shortest one counts, and at the most twice as long."""

    def __init__(self) -> None:
        self._least = self._before = inf
        self._until = 0.0

    def answered(self, took: float, now: float) -> None:
        if now >= self._until:
            last = self._least if now < self._until + self.KEPT else inf
            self._before, self._least, self._until = last, inf, now + self.KEPT
        self._least = min(self._least, took)

    @property
    def seconds(self) -> float:
        """Of the last half to whole minute in which it answered; 0 if it never did."""
        least = min(self._least, self._before)
        return least if least < inf else 0.0


SENTINEL_SHARE = 0.5
"""Share of the caller's bound that a new link may spend waiting until more than half of the sentinels agree."""


class StoreLink:
    """One connection, and what its server reports about itself."""

    def __init__(self, endpoint: StoreEndpoint, patience: float) -> None:
        self._endpoint = endpoint
        self._patience = patience
        self._connection: Connection | None = None
        self.run_id = ""
        """Identity of the server process, and of the history of its writes: a primary that was a replica in between is
        the same process and may lack writes of that time. Empty until opened."""
        self.info: dict[str, str] = {}
        self.reached: Reached | None = None
        """The server that the link leads to, once opened."""
        self.longest = 0.0
        """Seconds of the longest wait for a reply since this was set to 0. The wait for replicas does not count."""
        self.shortest = inf
        """Likewise of the shortest, since this was set to infinity; the reply to the greeting counts."""

    async def open(self) -> None:
        """Find the server, connect, and ask for its identity."""
        await self._endpoint.renew()
        host = await find_primary(self._endpoint, self._patience) if self._endpoint.place.service else None
        self._connection = self._endpoint.server(host)
        await self._connection.open()
        greeting, now = self._endpoint.greeting(), asyncio.get_running_loop().time
        began = now()
        await self._connection.send_all((*greeting, ("INFO",)))  # before 7.0 INFO takes one section or all
        for _ in greeting:
            await self._connection.receive()
        self.info = parse_info(await self._connection.receive())
        self.shortest = now() - began
        self.run_id = identity(self.info)
        self.reached = self._connection.reached

    def require_primary(self) -> None:
        """Raises NotPrimaryError for a replica: it refuses writes, and its data may be old."""
        require_primary(self.info)

    @property
    def has_ended(self) -> bool:
        """Its connection leads nowhere any more, as far as this process knows by now."""
        return self._connection is None or self._connection.has_ended

    async def ask(self, *command: str | int) -> Any:
        """Send one command and read its reply."""
        if self._connection is None:
            raise ConnectionError("this link is not open")
        now, is_wait = asyncio.get_running_loop().time, command[0] == "WAIT"
        began = now()
        try:
            await self._connection.send(*command)
            reply = await self._connection.receive()
            self.shortest = min(self.shortest, now() - began)
            return reply
        finally:
            self.longest = max(self.longest, 0.0 if is_wait else now() - began)

    async def ask_beside(self, command: Sequence[str | int], *others: Sequence[str | int]) -> tuple[Any, list[Any]]:
        """Send a command and others in one go: the server runs them one after the other, also where it holds the first
        one back. Returns the first's reply, and the others'; None of each that the server refuses."""
        if self._connection is None:
            raise ConnectionError("this link is not open")
        await self._connection.send_all((command, *others))
        first, beside = await self._connection.receive(), list[Any]()
        for _ in others:
            try:
                beside.append(await self._connection.receive())
            except ReplyError:
                beside.append(None)
        return first, beside

    async def evaluate(self, script: Script, *arguments: str) -> Any:
        """Run a script (first argument: its key), sending the source only if the server does not know it yet."""
        try:
            return await self.ask("EVALSHA", script.sha, 1, *arguments)
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
            return await self.ask("EVAL", script.source, 1, *arguments)

    async def drop(self) -> None:
        """Close without waiting."""
        if self._connection is not None:
            await self._connection.close()


class Links:
    """A bounded set of links to one store, whose calls are bounded by ``timeout`` seconds each. ``queue``: seconds that
    a call may wait for a link; None: as long as its caller lets it. ``longest``: bytes of a reply at most.
    ``addresses``: what other links to the store know of its hosts, too."""

    def __init__(
        self,
        at: str | RedisConfig,
        limit: int,
        timeout: float = Timing().store_timeout,
        queue: float | None = None,
        *,
        longest: int = LONGEST_REPLY,
        addresses: HostAddresses | None = None,
    ) -> None:
        self._endpoint = StoreEndpoint(RedisConfig(url=at) if isinstance(at, str) else at, longest, addresses)
        self._timeout, self._queue, self._patience = timeout, queue, SENTINEL_SHARE * timeout
        self.address = str(self._endpoint.place)
        self._idle: list[StoreLink] = []
        self._used: set[StoreLink] = set()
        self._limit, self._room = limit, asyncio.Semaphore(limit)
        self._run_id = ""
        self._closed = False
        self.reached: Reached | None = None
        """The primary that the newest link leads to."""

    @asynccontextmanager
    async def one(self) -> AsyncIterator[StoreLink]:
        """A link to the primary for one request; waits while all are in use. Raises BusyError if that takes too
        long."""
        await self._enter()
        try:
            if self._closed:
                raise ConnectionError("this store was closed")
            link = await self._unused() or StoreLink(self._endpoint, self._patience)
            self._used.add(link)
            try:
                if not link.run_id:
                    async with asyncio.timeout(self._timeout):
                        await link.open()
                    link.require_primary()
                    self.reached = link.reached
                    if link.run_id != self._run_id:  # idle links may still lead to the former primary
                        self._run_id = link.run_id
                        await self.forget()
                yield link
            except BaseException:
                await link.drop()
                raise
            finally:
                self._used.discard(link)
            self._idle.append(link)
        finally:
            self._room.release()

    async def _unused(self) -> StoreLink | None:
        """An idle link, if there is one. What closes connections that are not used for long (the server's ``timeout``,
        a firewall) costs no request: those links are dropped."""
        while self._idle:
            link = self._idle.pop()
            if not link.has_ended:
                return link
            await link.drop()
        return None

    async def _enter(self) -> None:
        """Waits for room for one more request."""
        try:
            async with asyncio.timeout(self._queue):
                await self._room.acquire()
        except TimeoutError:
            raise BusyError(
                f"none of {self._limit} links to the store became free within {self._queue:g} s: others ask much of "
                "this node's agent"
            ) from None

    async def forget(self) -> None:
        """Drop the idle links: the server behind them may not be the same any more."""
        while self._idle:
            await self._idle.pop().drop()

    async def close(self) -> None:
        """Drop all links; requests under way fail."""
        self._closed = True
        await self.forget()
        for link in tuple(self._used):
            await link.drop()


class CallersPace:
    """How long what callers ask of the store is held back. They may ask any number of agents, and each agent sees by
    late answers alone that all together keep the store busy: later than those of a store that is as far away, but has
    nothing to do. A late answer makes the pause before the next request twice as long, and longer than the answer
    took; one in time makes it a fifth shorter, a quick one much shorter. So together they ask as often as the store
    answers within about ``LATE`` seconds, however many the agents are. Between half of the pause and all of it is
    waited for, so that agents do not ask together."""

    LATE = 0.1
    """Seconds. A renewal of a lease waits in the same line, and counts as lost after ``Timing.store_timeout``."""
    FIRST, MOST = 0.1, 15.0
    """Seconds of the shortest pause and of the longest."""
    AWAY = 0.15
    """Seconds that a store may be away; one that answers nobody sooner is busy."""
    OF_ANSWER = 2
    """The least pause, in times that the late answer took."""
    IN_TIME, QUICK = 0.8, 0.25
    """What is left of the pause after an answer in time, and after one in a tenth of it."""

    def __init__(self) -> None:
        self._rng = random.Random()
        self._pause = self._until = self._lengthened = 0.0

    def answered(self, took: float, now: float, away: float = 0.0) -> None:
        """A request was over after ``took`` seconds, answered or not. One that was under way when the pause was made
        longer does not double it. ``away``: seconds that an answer takes where nobody asks."""
        late = took - min(away, self.AWAY)
        if late > self.LATE:
            times = 2 if now - took >= self._lengthened else 1
            self._pause = min(self.MOST, max(self.FIRST, times * self._pause, self.OF_ANSWER * took))
            self._lengthened = now
        else:
            self._pause *= self.IN_TIME if late > self.LATE / 10 else self.QUICK
            self._pause = self._pause if self._pause > self.FIRST / 4 else 0.0
        self._until = now + self._pause * self._rng.uniform(0.5, 1.0)

    def left(self, now: float) -> float:
        """Seconds until the next request."""
        return max(0.0, self._until - now)


class CallersLinks(Links):
    """Links for what callers of the API ask for: in turn, within ``queue`` seconds, and at their ``CallersPace``."""

    def __init__(
        self, at: str | RedisConfig, limit: int, timeout: float, queue: float, addresses: HostAddresses | None = None
    ) -> None:
        super().__init__(at, limit, timeout, queue, addresses=addresses)
        self._pace, self._quickest, self._bound = CallersPace(), Quickest(), queue

    @asynccontextmanager
    async def one(self) -> AsyncIterator[StoreLink]:
        """As of ``Links``. Raises BusyError, too, where the store is too busy for callers."""
        async with super().one() as link:
            link.longest = 0.0
            try:
                yield link
            finally:
                now = asyncio.get_running_loop().time()
                self._quickest.answered(link.shortest, now)
                link.shortest = inf
                self._pace.answered(link.longest, now, self._quickest.seconds)

    async def _enter(self) -> None:
        now = asyncio.get_running_loop().time
        until = now() + self._bound
        await super()._enter()
        try:
            if (left := self._pace.left(now())) > until - now():
                raise BusyError("the store answers late, so what users ask of all agents together is held back")
            await asyncio.sleep(left)
        except BaseException:
            self._room.release()
            raise
