"""Connections to the Redis server, and the search for a service's primary by its sentinels.

A link does one request at a time and is dropped at the first doubt. It returns to the idle links only after its reply
was read whole; after any error or cancellation it is dropped, so no later request can read an earlier one's reply.
Every new link asks all sentinels at once (if there are any) and then the server for its role: a replica is never used.
The sentinels' answer alone must never decide that a server *is* the primary. Must never retry or know what a request
means. The caller bounds each request; only the wait for sentinels has its own bound.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from nodeagent.model.timing import Timing
from nodeagent.spec.storeconfig import RedisConfig, shown
from nodeagent.store.endpoint import StoreEndpoint
from nodeagent.store.scripts import Script
from nodeagent.store.whois import identity, parse_info, require_primary
from nodeagent.store.wire import Connection, Reached, ReplyError

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

    async def open(self) -> None:
        """Find the server, connect, and ask for its identity."""
        await self._endpoint.renew()
        host = await find_primary(self._endpoint, self._patience) if self._endpoint.place.service else None
        self._connection = self._endpoint.server(host)
        await self._connection.open()
        greeting = self._endpoint.greeting()
        for command in (*greeting, ("INFO",)):  # all in one round trip; before 7.0 INFO takes one section or all
            await self._connection.send(*command)
        for _ in greeting:
            await self._connection.receive()
        self.info = parse_info(await self._connection.receive())
        self.run_id = identity(self.info)
        self.reached = self._connection.reached

    def require_primary(self) -> None:
        """Raises NotPrimaryError for a replica: it refuses writes, and its data may be old."""
        require_primary(self.info)

    async def ask(self, *command: str | int) -> Any:
        """Send one command and read its reply."""
        if self._connection is None:
            raise ConnectionError("this link is not open")
        await self._connection.send(*command)
        return await self._connection.receive()

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
    a call may wait for a link; None: as long as its caller lets it."""

    def __init__(
        self, at: str | RedisConfig, limit: int, timeout: float = Timing().store_timeout, queue: float | None = None
    ) -> None:
        self._endpoint = StoreEndpoint(RedisConfig(url=at) if isinstance(at, str) else at)
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
            link = self._idle.pop() if self._idle else StoreLink(self._endpoint, self._patience)
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

    async def _enter(self) -> None:
        try:
            async with asyncio.timeout(self._queue):
                await self._room.acquire()
        except TimeoutError:
            raise BusyError(f"none of {self._limit} links to the store became free within {self._queue:g} s") from None

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
