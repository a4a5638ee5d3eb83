"""A right is taken away from the store's ACL user, or the server's memory is full: what the server refuses is named,
counts as no damage, and removes nothing; what is damaged is made anew. Real server."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from nodeagent.local.privateredis import PrivateRedis
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError, StoreUnusableError
from nodeagent.store.client import connect
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links
from tests.contract.bench import RedisBench
from tests.contract.programs import others

pytestmark = pytest.mark.redis
RIGHTS = "-@all +@read +@write +@scripting +@connection -@dangerous +info +wait +time"
"""As docs/config.md gives them."""
KEYS = (
    "", "meta", "lease", "changes", "nodes", "events", "names", "highest", "requests*", "events:of:*", "job:*",
    "marks:*", "counts:*", "packed:*", "node:*", "alloc:*", "wake:*", "cordons", "queues", "windows", "claims",
    "departed", "awaited", "called", "saved", "saves", "pod:*", "usage:*", "history*", "past:*",
)  # fmt: skip
"""All keys of a cluster; the first is the one that scripts are called with."""


class Limited:
    """A cluster with a job on two nodes, and another client of it, whose user an administrator limits."""

    def __init__(self, server: PrivateRedis) -> None:
        self._cluster, self._links = uuid.uuid4().hex, Links(server.url, 1)
        self.prefix = prefix(self._cluster)
        self.user = f"u{self._cluster}"
        self._own = connect(server.url, self._cluster, 5.0)
        self._limited = connect(server.url.replace("unix://", f"unix://{self.user}:pw@"), self._cluster, 5.0)
        self.bench = RedisBench(self._own, self._links, self.prefix)
        self.theirs = RedisBench(self._limited, self._links, self.prefix)

    async def start(self) -> None:
        await self.let("")
        await self.bench.up("n1", "n2")
        self.job = await self.bench.active(await self.bench.submit(), "n1", "n2")
        self.theirs.lives, self.theirs._seq = self.bench.lives, self.bench._seq

    async def close(self) -> None:
        for one in (self._own, self._limited, self._links):
            await one.close()

    async def raw(self, *words: str) -> object:
        async with self._links.one() as link:
            reply: object = await link.ask(*words)
        return reply

    async def keys(self) -> list[str]:
        found = await self.raw("KEYS", f"{self.prefix}*")
        assert isinstance(found, list)
        return found

    async def let(self, change: str) -> None:
        """All rights that docs/config.md gives, with this change; ``no KEY``: but for these keys."""
        keys = [f"~{self.prefix}{key}" for key in KEYS if change != f"no {key}"]
        change = "" if change.startswith("no ") else change
        await self.raw("ACL", "SETUSER", self.user, "reset", "on", ">pw", *keys, *RIGHTS.split(), *change.split())

    def steps(self) -> dict[str, Callable[[], Awaitable[object]]]:
        """As agents and callers take them, by the limited user."""
        here = self.theirs
        return {
            "beat": lambda: here.only_beat("n1"),
            "renew": lambda: here.renew("n1"),
            "mute": lambda: here.renew("n2", asks=True),
            "submit": lambda: here.submit("u2", "other", request="r2"),
            "propose": lambda: here.propose(self.job, "n1"),
            "forget": lambda: here.store.forget("n2", "ann", "r3", "f"),
            "join": lambda: here.join("n3"),
            "events": lambda: here.store.events("0-0", 5),
        }

    async def refusals(self) -> dict[str, str]:
        """Why the steps failed, of those that the server refused."""
        found = {}
        for name, step in self.steps().items():
            try:
                await step()
            except StoreUnusableError as error:
                found[name] = str(error)
            except StoreRefusedError as refusal:
                assert name == "forget", f"{name}: {refusal}"
                assert "holds its lease" in str(refusal)
        return found


@pytest.fixture(scope="module", params=["redis", *(pytest.param(name, marks=pytest.mark.slow) for name in others())])
def server(request: pytest.FixtureRequest) -> Iterator[PrivateRedis]:
    with PrivateRedis(program=others().get(request.param)) as server:
        yield server


@pytest.fixture
async def limited(server: PrivateRedis) -> AsyncIterator[Limited]:
    found = Limited(server)
    await found.start()
    yield found
    await found.close()


async def test_with_all_rights_nothing_is_refused(limited: Limited) -> None:
    assert await limited.refusals() == {}


@pytest.mark.parametrize(
    ("change", "step", "command"),
    [
        ("-hmget", "beat", "HMGET in the step beat"),
        ("-hmget", "renew", "HMGET in the step renew_lease"),
        ("-zadd", "renew", "ZADD in the step renew_lease"),
        ("-xadd", "submit", "XADD in the step submit"),
        ("-type", "submit", "TYPE in the step submit"),
        ("-zscore", "propose", "ZSCORE in the step propose"),
        ("-@stream", "events", "'xrange'"),
        ("-@scripting", "beat", "'evalsha'"),
        ("no lease", "join", "ZCOUNT in the step join"),
        ("no nodes", "forget", "HGET in the step forget"),
        ("no highest", "propose", "HGET in the step propose"),
        ("no events", "events", "NOPERM"),
    ],
)
async def test_what_the_server_refuses_is_named(limited: Limited, change: str, step: str, command: str) -> None:
    await limited.let(change)
    text = (await limited.refusals())[step]
    assert command in text
    assert "refused this agent's user a right that it needs" in text
    assert "docs/config.md, An ACL user" in text and "ACL LOG" in text


@pytest.mark.parametrize(
    "change",
    ["-hmget", "-@hash", "-@fast", "-xadd", "-@stream", "-@read", "no nodes", "no events", "no wake:*", "no meta"],
)
async def test_what_the_server_refuses_is_no_damage(limited: Limited, change: str) -> None:
    """Steps took it for a key of another type, and removed that: ``meta``, the audit log, the record of a node."""
    era = await limited.bench.era()
    before = set(await limited.keys())
    await limited.let(change)
    await limited.refusals()
    await limited.let("")
    assert before <= set(await limited.keys())
    with suppress(StoreUnavailableError):
        await limited.theirs.beat("n1")
    kinds = await limited.bench.kinds()
    assert kinds[0] == "NodeJoined" and "StoreDamaged" not in kinds
    assert await limited.bench.era() == era


FULL = r"cannot serve now \(.*OOM command not allowed when used memory > 'maxmemory'"


@asynccontextmanager
async def full(limited: Limited) -> AsyncIterator[None]:
    """The server's memory is: no script may begin to write."""
    ballast = f"{limited.prefix}ballast"
    await limited.raw("SET", ballast, "x" * 2**20)
    await limited.raw("CONFIG", "SET", "maxmemory", "1mb")
    try:
        yield
    finally:
        await limited.raw("CONFIG", "SET", "maxmemory", "0")
        await limited.raw("DEL", ballast)


async def test_what_a_full_server_refuses_is_named_and_is_no_damage(limited: Limited) -> None:
    era = await limited.bench.era()
    before = set(await limited.keys())
    async with full(limited):
        refused = await limited.refusals()
    assert {"submit", "propose", "forget", "join"} <= refused.keys()
    assert all(re.search(FULL, text) for text in refused.values()), refused
    assert before == set(await limited.keys())
    await limited.theirs.beat("n1")
    assert "StoreDamaged" not in await limited.bench.kinds()
    assert await limited.bench.era() == era


async def test_a_full_server_forgets_nobody_who_is_back_after_a_restart(limited: Limited) -> None:
    """It refused ``ZUNIONSTORE``, and took the ``DEL`` behind it, and then all that the script wrote."""
    meta, called = f"{limited.prefix}meta", f"{limited.prefix}called"
    served = await limited.raw("HGET", meta, "served")
    await limited.raw("HSET", meta, "recover", str(int(str(served)) + 60_000), "parent", "")
    await limited.raw("ZADD", f"{limited.prefix}awaited", "0", "n2")
    await limited.raw("ZADD", called, "0", "n1")
    await limited.bench.restart()
    async with full(limited):
        with pytest.raises(StoreUnusableError, match=FULL):
            await limited.theirs.join("n3")
        assert await limited.raw("ZRANGE", called, "0", "-1") == ["n1"]


@pytest.mark.parametrize("top", ["another type", f"{2**63}-0", f"{2**64 - 1}-{2**64 - 1}"])
async def test_a_stream_that_is_damaged_begins_anew(limited: Limited, top: str) -> None:
    """With no more rights than agents have."""
    stream = f"{limited.prefix}events:of:1000"
    await limited.raw("DEL", stream)
    words = ("SET", stream, "x") if top == "another type" else ("XADD", stream, top, "e", "")
    await limited.raw(*words)
    await limited.theirs.submit("u2", "other", request="r2")
    entries = await limited.raw("XRANGE", stream, "-", "+")
    assert isinstance(entries, list)
    events = [event.id for event in await limited.bench.store.events("0-0", 1000)]
    assert [entry for entry, _ in entries] == events[-1:]
