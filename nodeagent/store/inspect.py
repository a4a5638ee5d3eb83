"""Inspects the store's server and its sentinels, for ``nodeagentctl doctor`` and for start-up. This module only asks;
``nodeagent/plan/findings/store.py`` judges the facts.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from nodeagent.model.base import RECORD_VERSION
from nodeagent.model.facts import SentinelFacts, StoreFacts
from nodeagent.model.timing import Timing
from nodeagent.spec.storeconfig import RedisConfig, shown
from nodeagent.store import codec
from nodeagent.store.endpoint import AccessError, StoreEndpoint
from nodeagent.store.errors import explain, timing_differs
from nodeagent.store.keys import prefix
from nodeagent.store.link import SENTINEL_SHARE, Host, StoreLink, ask_sentinel
from nodeagent.store.whois import parse_info
from nodeagent.store.wire import ReplyError

PINGS = 100
PING_SECONDS = 2.0
"""Seconds for all PINGs together; on a slow network fewer are sent."""


async def inspect(config: RedisConfig, timeout: float) -> StoreFacts:
    """Asks the server once, as the agent's own user; each question is bounded by ``timeout`` seconds. Every failure is
    part of the facts, never raised."""
    facts = StoreFacts(
        address=str(config.place), tls=config.place.tls, replicas_wanted=config.replicas_wanted
    )  # fmt: skip
    try:
        endpoint = StoreEndpoint(config)
    except AccessError as error:
        return facts.model_copy(update={"problem": str(error)})
    sentinel = await _sentinels(endpoint, timeout) if config.place.service else None
    link = StoreLink(endpoint, SENTINEL_SHARE * timeout)
    try:
        async with asyncio.timeout(timeout):
            await link.open()
        found = await _server(link, timeout)
    except (ReplyError, OSError) as error:
        found = {"problem": explain(facts.address, timeout, error)}
    finally:
        await link.drop()
    return facts.model_copy(update=found | {"sentinel": sentinel})


async def refuses(config: RedisConfig, cluster: str, timing: Timing, timeout: float) -> str:
    """Why the cluster's store would let in no agent with this timing, and of this version; empty if it would, where it
    has no such cluster yet, or cannot be asked (see ``inspect``)."""
    link = StoreLink(StoreEndpoint(config), SENTINEL_SHARE * timeout)
    try:
        async with asyncio.timeout(timeout):
            await link.open()
            there, records = await link.ask("HMGET", f"{prefix(cluster)}meta", "timing", "version")
        stored = codec.from_json(Timing, codec.bounded(there, codec.MOST_OF_LINE)) if there is not None else timing
    except (ReplyError, OSError, ValueError):  # what is damaged the agents restore
        return ""
    finally:
        await link.drop()
    if records not in (None, str(RECORD_VERSION)):
        return (
            f"its records have version {records}, this agent reads {RECORD_VERSION}: install the version of nodeagent "
            "that the other nodes run"
        )
    return timing_differs(stored, timing) if stored != timing else ""


async def _server(link: StoreLink, timeout: float) -> dict[str, object]:
    started, wall, first = await _time(link, timeout)
    pings = await _pings(link, timeout)
    ended, _, last = await _time(link, timeout)
    info = dict(link.info)
    for section in ("memory", "persistence"):
        info |= parse_info(str(await _asked(link, timeout, "INFO", section) or ""))
    valkey = info.get("server_name") == "valkey" or "valkey_version" in info
    append = info.get("aof_enabled")
    states = [info[key] for key in ("aof_last_write_status", "aof_last_bgrewrite_status") if key in info]
    return {
        "server": "valkey" if valkey else "redis",
        "version": info.get("valkey_version" if valkey else "redis_version", ""),
        "role": info.get("role", ""),
        "replicas": _number(info.get("connected_slaves")),
        "policy": info.get("maxmemory_policy"),
        "memory_limit": _number(info.get("maxmemory")),
        "memory_used": _number(info.get("used_memory")),
        "evicted": _number(info.get("evicted_keys")),
        "appendonly": None if append is None else append == "1",
        "append_failed": any(state != "ok" for state in states) if states else None,
        "appendfsync": await _setting(link, timeout, "appendfsync"),
        "min_replicas": _number(await _setting(link, timeout, "min-replicas-to-write")),
        "max_lag": _number(await _setting(link, timeout, "min-replicas-max-lag")),
        "pings": pings,
        "clock_step": (last - first) - (ended - started),
        "clock_offset": first - wall,
    }


async def _ask(link: StoreLink, timeout: float, *command: str) -> Any:
    async with asyncio.timeout(timeout):
        return await link.ask(*command)


async def _asked(link: StoreLink, timeout: float, *command: str) -> Any:
    """The reply; None if this user may not ask, or if the server (a managed one) does not know the command."""
    try:
        return await _ask(link, timeout, *command)
    except ReplyError:
        return None


async def _setting(link: StoreLink, timeout: float, name: str) -> str | None:
    """One value of the server's config; None if this user may not ask."""
    pairs = await _asked(link, timeout, "CONFIG", "GET", name)
    return str(pairs[1]) if pairs else None


async def _time(link: StoreLink, timeout: float) -> tuple[float, float, float]:
    """Our monotonic and wall clock, both at the middle of the question, and the server's clock."""
    asked = time.monotonic()
    seconds, micros = await _ask(link, timeout, "TIME")
    half = (time.monotonic() - asked) / 2
    return asked + half, time.time() - half, int(seconds) + int(micros) / 1e6


async def _pings(link: StoreLink, timeout: float) -> tuple[float, ...]:
    took: list[float] = []
    until = time.monotonic() + PING_SECONDS
    while len(took) < PINGS and (asked := time.monotonic()) < until:
        await _ask(link, timeout, "PING")
        took.append(time.monotonic() - asked)
    return tuple(took)


async def _sentinels(endpoint: StoreEndpoint, timeout: float) -> SentinelFacts:
    hosts, service = endpoint.place.hosts, endpoint.place.service
    answers = await asyncio.gather(*(_one_sentinel(endpoint, host, timeout) for host in hosts))
    reported = [answer for answer in answers if answer is not None]
    after = [
        int(answer["down-after-milliseconds"]) / 1000 for answer in reported if "down-after-milliseconds" in answer
    ]
    others = [int(answer["num-other-sentinels"]) for answer in reported if "num-other-sentinels" in answer]
    return SentinelFacts(
        service=service,
        listed=len(hosts),
        answered=len(reported),
        known=max(others) + 1 if others else None,
        down_after=min(after) if after else None,
        primaries=tuple(sorted({shown(answer["ip"], int(answer["port"])) for answer in reported if "ip" in answer})),
    )


async def _one_sentinel(endpoint: StoreEndpoint, host: Host, timeout: float) -> dict[str, str] | None:
    """What the sentinel knows of the service; None if the sentinel does not answer or knows no such service."""
    try:
        async with asyncio.timeout(timeout):
            flat = await ask_sentinel(endpoint, host, "MASTER", endpoint.place.service)
    except (ReplyError, OSError):
        return None
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
