"""Asks the sentinels where a service's primary is.

All are asked at once. Must never decide that a server *is* the primary: the link asks the server itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from nodeagent.spec.storeurl import shown
from nodeagent.store.door import Door
from nodeagent.store.wire import ReplyError

Host = tuple[str, int]


class NoPrimaryError(ConnectionError):
    """No sentinel could say where the primary is."""


async def find_primary(door: Door, patience: float) -> Host:
    """The address that more than half of the sentinels name, as soon as they do; after ``patience`` seconds the one
    that most of those name which have answered. Raises NoPrimaryError."""
    hosts, service = door.place.hosts, door.place.service
    tasks = [asyncio.create_task(_named(door, host, service)) for host in hosts]
    votes: Counter[Host] = Counter()
    troubles: list[str] = []
    try:
        async with asyncio.timeout(patience):
            for answer in asyncio.as_completed(tasks):
                try:
                    votes[await answer] += 1
                except (ReplyError, OSError) as error:
                    troubles.append(_said(error))
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


async def ask_sentinel(door: Door, host: Host, *command: str) -> Any:
    """One question to one sentinel, on a connection of its own."""
    connection = door.sentinel(host)
    try:
        await connection.open()
        for words in (*door.sentinel_greeting(), ("SENTINEL", *command)):
            await connection.send(*words)
            answer = await connection.receive()
        return answer
    finally:
        await connection.close()


async def _named(door: Door, host: Host, service: str) -> Host:
    answer = await ask_sentinel(door, host, "GET-MASTER-ADDR-BY-NAME", service)
    if answer is None:
        raise NoPrimaryError(f"{shown(*host)} knows no service {service!r}")
    return str(answer[0]), int(answer[1])


def _said(error: Exception) -> str:
    if isinstance(error, ReplyError) and error.not_let_in:
        return f"{error} (check redis.sentinel in the agent's config)"
    return str(error)
