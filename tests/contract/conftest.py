"""The servers under test, which run the same Lua: the one in this process, a private Redis, fakeredis, whose commands
others have written, and each other version of Redis or Valkey that is found here. A fresh cluster for each test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from fakeredis import FakeServer

from nodeagent.local.privateredis import PrivateRedis
from nodeagent.store.calls import Calls
from nodeagent.store.client import RedisStore, connect
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links
from tests.contract.bench import Bench, HereBench, RedisBench
from tests.contract.fake import FakeLinks
from tests.contract.programs import others
from tests.inprocess.server import Server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[PrivateRedis]:
    with PrivateRedis() as server:
        yield server


@pytest.fixture(scope="session")
def other_servers() -> Iterator[Callable[[str], PrivateRedis]]:
    """The server of this name and version, started when it is first asked for."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(PrivateRedis(program=others()[name])))


@pytest.fixture(
    params=[
        "here",
        pytest.param("redis", marks=pytest.mark.redis),
        pytest.param("fakeredis", marks=pytest.mark.slow),
        *(pytest.param(name, marks=[pytest.mark.redis, pytest.mark.slow]) for name in others()),
    ]
)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    if request.param == "here":
        clock = [1_000_000.0]
        yield HereBench(Server(lambda: clock[0]), clock)
        return
    cluster = uuid.uuid4().hex
    if request.param == "fakeredis":
        fake = FakeLinks(FakeServer())
        yield RedisBench(RedisStore(Calls(fake, fake, prefix(cluster), 5.0)), fake, prefix(cluster))
        await fake.close()
        return
    if request.param == "redis":
        url = request.getfixturevalue("redis_server").url
    else:
        url = request.getfixturevalue("other_servers")(request.param).url
    store, links = connect(url, cluster, 5.0), Links(url, 1)
    yield RedisBench(store, links, prefix(cluster))
    await links.close()
    await store.close()
