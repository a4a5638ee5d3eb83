"""The two servers under test: the one in this process and a private Redis, a fresh cluster for each test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from nodeagent.store.client import connect
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links
from nodeagent.store.server import PrivateRedis
from tests.contract.bench import Bench, HereBench, RedisBench
from tests.inprocess.server import Server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[PrivateRedis]:
    with PrivateRedis() as server:
        yield server


@pytest.fixture(params=["here", pytest.param("redis", marks=pytest.mark.redis)])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if request.param == "here":
        clock = [1_000_000.0]
        yield HereBench(Server(lambda: clock[0]), clock)
        return
    url = request.getfixturevalue("redis_server").url
    cluster = uuid.uuid4().hex
    store, links = connect(url, cluster, 5.0), Links(url, 1)
    yield RedisBench(store, links, prefix(cluster))
    await links.close()
    await store.close()
