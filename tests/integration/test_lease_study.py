"""What the lease study counts is what a lease process does, and nothing that an agent does."""

from __future__ import annotations

import asyncio

import pytest
from redis import Redis

from benchmarks.lease import RENEWED
from nodeagent.local.privateredis import PrivateRedis
from nodeagent.store.client import connect
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links
from tests.contract.bench import RedisBench

pytestmark = pytest.mark.redis


async def test_a_renewal_is_counted_and_a_beat_is_not() -> None:
    with PrivateRedis() as server:
        store, links = connect(server.url, "c", 5.0), Links(server.url, 1)
        bench = RedisBench(store, links, prefix("c"))
        await bench.up("n1", "n2")
        with Redis(unix_socket_path=str(server.socket)).monitor() as monitor:  # type: ignore[no-untyped-call]
            await bench.only_beat("n1")
            await bench.renew("n2")
            async with links.one() as link:
                await link.ask("PING", "the last")

            def counted() -> list[bytes]:
                found = []
                while b"the last" not in (line := monitor.connection.read_response(disable_decoding=True)):
                    found += [match[1] for match in [RENEWED.search(line)] if match]
                return found

            assert await asyncio.to_thread(counted) == [b"n2"]
        await links.close()
        await store.close()
