"""The two stores under test: the in-memory twin and a private Redis server, a fresh cluster for each test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from nodeagent.store.client import RedisStore
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links
from nodeagent.store.memory import MemoryServer, MemoryStore
from nodeagent.store.server import PrivateRedis
from tests.contract.bench import Bench, MemoryBench, RedisBench


@pytest.fixture(scope="session")
def redis_server() -> Iterator[PrivateRedis]:
    with PrivateRedis() as server:
        yield server


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if request.param == "memory":
        clock = [1_000_000.0]
        server = MemoryServer(lambda: clock[0])
        yield MemoryBench(MemoryStore(server), server, clock)
        return
    url = request.getfixturevalue("redis_server").url
    cluster = uuid.uuid4().hex
    store, links = RedisStore(url, cluster, 5.0), Links(url, 1)
    yield RedisBench(store, links, prefix(cluster))
    await links.close()
    await store.close()
