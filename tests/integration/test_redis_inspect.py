"""Looking at real servers: what is seen is true, soon, and never raised."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from nodeagent.plan.findings.store import SUPPORTED, judge
from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store.client import connect
from nodeagent.store.inspect import PINGS, inspect
from nodeagent.store.wire import ReplyError
from tests.contract.bench import FAST
from tests.integration.redis_support import Yard, ask, frozen, yard

pytestmark = pytest.mark.redis


@pytest.fixture
def servers() -> Iterator[Yard]:
    with yard() as found:
        yield found


async def test_what_a_server_is(servers: Yard) -> None:
    append, memory = ("appendonly yes", "appendfsync always"), ("maxmemory 100mb", "maxmemory-policy noeviction")
    server = await servers.server(*append, *memory, "min-replicas-max-lag 3")
    async with asyncio.timeout(60.0):
        while True:
            facts = await inspect(RedisConfig(url=server.url), 20.0)
            if len(facts.pings) == PINGS and max(facts.pings) < 0.1:  # nothing has disturbed it
                break
    assert judge(facts, FAST) == ()
    assert facts.address == f"127.0.0.1:{server.port}"
    assert facts.server in SUPPORTED
    assert facts.version[0].isdecimal()
    assert (facts.role, facts.replicas, facts.sentinel) == ("master", 0, None)
    assert (facts.policy, facts.memory_limit) == ("noeviction", 100 * 2**20)
    assert (facts.appendonly, facts.appendfsync, facts.append_failed) == (True, "always", False)
    assert (facts.min_replicas, facts.max_lag) == (0, 3)
    assert facts.clock_step is not None
    assert abs(facts.clock_step) < 2.0
    assert facts.clock_offset is not None
    assert abs(facts.clock_offset) < 2.0, "the same machine's clock"


async def test_what_is_advised_repairs_it(servers: Yard) -> None:
    server = await servers.server("maxmemory-policy allkeys-lru", "appendonly no")
    config = RedisConfig(url=server.url)
    fixes = [finding.fix for finding in judge(await inspect(config, 5.0), FAST) if finding.severity == "error"]
    assert len(fixes) == 2
    for fix in fixes:
        command = fix.partition(" (")[0]
        assert await ask(server, *command.split()) == "OK"
    assert [f for f in judge(await inspect(config, 5.0), FAST) if f.severity == "error"] == []


async def test_a_server_that_throws_keys_away_is_named(servers: Yard) -> None:
    server = await servers.server("maxmemory-policy allkeys-lru")
    store = connect(server.url, "c", 5.0)
    assert not (await store.identity()).evicts
    await ask(server, "SET", "any", "x" * 2**20)
    await ask(server, "CONFIG", "SET", "maxmemory", "1mb")
    with suppress(ReplyError):  # where all that it may throw away does not make the room
        await ask(server, "SET", "any", "x")
    assert (await store.identity()).evicts
    await store.close()
    findings = judge(await inspect(RedisConfig(url=server.url), 5.0), FAST)
    assert any("jobs and leases away (keys so far: 1)" in finding.what for finding in findings)


async def test_a_server_that_does_not_answer_takes_no_longer_than_asked(servers: Yard) -> None:
    server = await servers.server()
    with frozen(server):
        asked = time.monotonic()
        facts = await inspect(RedisConfig(url=server.url), 0.2)
        assert time.monotonic() - asked < 10.0
    assert "did not answer within 0.2 s" in facts.problem
    server.stop()
    async with asyncio.timeout(20.0):
        facts = await inspect(RedisConfig(url=server.url), 20.0)
    assert "cannot be reached" in facts.problem
    (finding,) = judge(facts, FAST)
    assert (finding.severity, finding.what) == ("error", facts.problem)


async def test_secrets_that_cannot_be_read_are_a_fact_too(servers: Yard) -> None:
    facts = await inspect(RedisConfig.model_validate({"password_file": "/nowhere/pw"}), 1.0)
    assert "/nowhere/pw cannot be read" in facts.problem
