"""Who can write to Redis, and to nothing else: what is deleted, damaged or of another type there hurts nothing that
runs, is given back by those who know it, and lets no second job of a name begin. Real server, real leases and views."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from nodeagent.agent.context import AgentContext
from nodeagent.agent.identity import Identity
from nodeagent.agent.membership import Membership
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.snapshot import Snapshot
from nodeagent.agent.undecided import Undecided
from nodeagent.local.privateredis import PrivateRedis
from nodeagent.model.job import JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.timing import Timing
from nodeagent.osutil.clock import SystemClock
from nodeagent.pods.base import PodHost
from nodeagent.store.base import KeyMark, StoreRefusedError, StoreUnavailableError
from nodeagent.store.client import connect
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links
from nodeagent.store.scripts import WHOLE_EACH
from tests.contract.bench import Bench, facts, refused
from tests.groups import one_in
from tests.inprocess.lease import Words, nobody

pytestmark = pytest.mark.redis
TIMING = Timing(heartbeat=0.05, credit=0.1, gap=1.5, lease=0.8)
"""A lease outlives what a busy machine lets these processes wait for a turn."""
LOOKS = WHOLE_EACH
"""Of each node: after these, what is only looked for in turn has been."""
BOUND = 15.0
"""Seconds that anything is waited for."""


class Host:
    """Has promised nothing."""

    async def promised(self, _uids: Iterable[str]) -> Mapping[str, int]:
        return {}


class Cluster:
    """Two nodes whose leases are real, a job that runs on both, and somebody who has the server's password."""

    def __init__(self, url: str, folder: Path) -> None:
        self.name = uuid.uuid4().hex
        self.store = connect(url, self.name, 5.0, KeyMark("ours", "/etc/nodeagent/cluster.key"))
        self.links = Links(url, 1)
        self.bench = Bench(self.store)
        self.leases = [self._lease(node, folder / node) for node in ("n1", "n2")]

    def _lease(self, node: str, folder: Path) -> Membership:
        life = Incarnation(life=f"{node}-a", start=1)
        self.bench.lives[node] = life
        identity = Identity(folder, "b", None, node)
        identity.node, identity.incarnation = node, life
        context = AgentContext(
            node, TIMING, self.store, cast(PodHost, Host()), SystemClock(), random_id=lambda: "r", process=Words(),
            snapshot=Snapshot(TIMING), metrics=Metrics(), undecided=Undecided(node, Metrics().left_undecided),
        )  # fmt: skip
        return Membership(context, identity, facts(node), find_peer=nobody)

    async def start(self) -> None:
        for lease in self.leases:
            await lease.join()
        await self.bench.active(await self.bench.submit(), "n1", "n2")
        await self.beats()

    async def beats(self) -> None:
        """One of each node; what goes wrong is the store's."""
        for lease in self.leases:
            with suppress(StoreRefusedError, StoreUnavailableError):
                if not lease.joined:
                    await lease.join()
                await lease.beat()
                await self.bench.renew(lease.node, life=lease.incarnation.life)
            assert not lease.lost, lease.reason

    def job(self, at: int = 0) -> JobRecord | None:
        return self.leases[at]._snapshot.job("u1")

    async def raw(self, *words: str) -> object:
        async with self.links.one() as link:
            reply: object = await link.ask(*words)
        return reply

    async def attack(self, *commands: str) -> None:
        """``REV`` in it is the store's own revision, ``KEY:`` the beginning of another key."""
        rev = await self.raw("HGET", prefix(self.name) + "meta", "rev")
        for command in commands:
            verb, key, *rest = command.replace("REV", str(rev)).replace("KEY:", prefix(self.name)).split(" ")
            await self.raw(verb, prefix(self.name) + key, *rest)

    async def whole(self, before: JobRecord) -> bool:
        """Both leases hold, both views are the store's and have the job, and the store decides again."""
        await self.beats()
        for at, lease in enumerate(self.leases):
            snapshot = lease._snapshot
            if lease.away_since is not None or snapshot.recovering or snapshot.rereads or snapshot.unread:
                return False
            job = self.job(at)
            if job is None or (job.generation, job.phase) != (before.generation, before.phase):
                return False
        stored = await self.raw("HGET", prefix(self.name) + "job:u1", "generation_id")
        return stored == (before.generation.id if before.generation else "")

    async def until_whole(self, before: JobRecord) -> None:
        async with asyncio.timeout(BOUND):
            looks = [lease._looks + LOOKS for lease in self.leases]
            while any(lease._looks < after for lease, after in zip(self.leases, looks, strict=True)):
                await self.beats()
                await asyncio.sleep(TIMING.heartbeat)
            while not await self.whole(before):  # noqa: ASYNC110 - it asks a server
                await asyncio.sleep(TIMING.heartbeat)


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateRedis]:
    with PrivateRedis() as server:
        yield server


@pytest.fixture
async def cluster(server: PrivateRedis, tmp_path: Path) -> AsyncIterator[Cluster]:
    found = Cluster(server.url, tmp_path)
    await found.start()
    yield found
    await found.links.close()
    await found.store.close()


KEYS = (
    "job:u1", "node:n1", "node:n2", "names", "alloc:n1", "lease", "highest", "changes", "meta", "requests", "saved",
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("how", ["deleted", "a text", pytest.param("a list", marks=pytest.mark.slow)])
async def test_a_key_that_is_deleted_or_of_another_type(cluster: Cluster, key: str, how: str) -> None:
    before = cluster.job()
    assert before is not None
    await cluster.attack(f"DEL {key}", *({"a text": [f"SET {key} x"], "a list": [f"LPUSH {key} x"]}.get(how, ())))
    await cluster.until_whole(before)
    if key == "requests" and how != "deleted":  # only commands use it: the first finds out
        with pytest.raises(StoreUnavailableError, match="WRONGTYPE"):
            await cluster.bench.submit("u2")
        await cluster.until_whole(before)
    await refused("name_taken", cluster.bench.submit("u2"))
    job = cluster.job()
    assert job is not None
    assert (await cluster.bench.propose(job, "n1")).generation is not None, "it can be changed again"


DAMAGES = [
    "HSET job:u1 mood good",
    "HSET job:u1 control x",
    "HSET job:u1 spec {",
    "HSET job:u1 control ",
    "HSET job:u1 since nan",
    "HSET job:u1 rev x",
    "HSET job:u1 member:n2 {",
    "HSET job:u1 member:n2 {}",
    "HSET job:u1 control {}",
    "HSET job:u1 generation_id evil",
    "HSET job:u1 generation_number 7",
    "HSET job:u1 generation_state forming",
    "HSET job:u1 generation_state ended",
    "HDEL job:u1 generation_id",
    "HDEL job:u1 uid",
    "HDEL job:u1 control",
    "HSET names train u9",
    "HDEL names train",
    "HSET highest train 0",
    "HSET highest train x",
    "HSET highest train 99999999999999999999",
    "HSET highest train 9007199254740991",
    "HSET highest train 999999999999998",
    "HSET cordons n2 x",
    "HSET node:n2 seq x",
    "HSET node:n2 seq 99999999999999999",
    "HDEL node:n1 id",
    "HSET node:n1 id n2",
    "HSET node:n1 start 9",
    "HSET node:n1 life evil",
    "HSET node:n1 life evil rev REV",
    "HSET node:n1 start 9 rev REV",
    "HSET node:n1 lost 1",
    "HSET node:n1 lost 1 rev REV",
    "HSET node:n2 left 1",
    "HSET node:n2 left 1 rev REV",
    "RENAME node:n2 KEY:node:n1",
    "COPY node:n2 KEY:node:n1 REPLACE",
    "RENAME job:u1 KEY:past:u1",
    "HSET job:u1 uid u9",
    "ZREM lease n2",
    "ZADD lease 1 n2",
    "ZREM changes job:u1",
    "HSET meta served x",
    "HSET meta served nan",
    "HSET meta last nan",
    "HSET meta amnesty inf",
    "HSET meta credit -1e308",
    "HSET meta rev x",
    "HSET meta rev inf",
    "HSET meta rev 1",
    "ZADD changes 3.5 gone:job:x",
    "XADD wake:job:u1 99999999999999-0 era x",
    "HSET meta cluster_uid evil",
    "HSET meta era evil",
    "HDEL meta timing",
    "HDEL meta lease",
    "HDEL meta floored",
    "HSET meta horizon 99999999999",
    "HSET meta unannounced 99999999999",
    "HSET meta recover 900000000000000",
    "HSET meta amnesty 900000000000000",
    "HSET meta least 900000000000000",
    "XADD events 18446744073709551615-18446744073709551615 e x",
    "HSET queues rev 1",
    "ZADD changes 9000000000000000 job:u1",
]


@pytest.mark.parametrize("command", one_in(3, DAMAGES))
async def test_a_record_that_is_damaged(cluster: Cluster, command: str) -> None:
    """Noticed at once, or by the first step that meets it."""
    before = cluster.job()
    assert before is not None
    await cluster.attack(command)
    with suppress(StoreRefusedError, StoreUnavailableError):
        await cluster.bench.set_control(before, "touch")
    await cluster.until_whole(before)
    await refused("name_taken", cluster.bench.submit("u2"))


@pytest.mark.parametrize(
    "command",
    [
        "HSET meta rev 9999999999999999",
        "HSET meta rev 999999999999999",
        "HSET meta order 9999999999999999",
        "HSET meta order 999999999999999",
        "HSET meta served 999999999999999",
        "HSET meta served 9999999999990",
        "HSET job:u1 rev 9999999999999999",
        "HSET job:u1 rev 500000000000000",
        "HSET node:n2 rev 9999999999999999",
        "HSET queues rev 9999999999999999",
        "ZADD changes 9000000000000000 gone:job:x",
    ],
)
async def test_a_number_that_no_step_can_have_made_is_forgotten(cluster: Cluster, command: str) -> None:
    """It grew with the next write, counted as damage, and was given back by those who had read it, again and again:
    the cluster decided nothing any more, whatever else was mended or emptied."""
    before = cluster.job()
    assert before is not None
    await cluster.attack(command)
    for number in range(3):
        with suppress(StoreRefusedError, StoreUnavailableError):
            await cluster.bench.submit(f"x{number}", f"other{number}")
        await cluster.until_whole(before)
    era = await cluster.raw("HGET", prefix(cluster.name) + "meta", "era")
    await cluster.bench.submit("u2", "another")
    await cluster.until_whole(before)
    assert await cluster.raw("HGET", prefix(cluster.name) + "meta", "era") == era, "and no new one"
    rev = await cluster.raw("HGET", prefix(cluster.name) + "meta", "rev")
    assert int(str(rev)) < 9 * 10**14
    assert await cluster.raw("ZRANGEBYSCORE", prefix(cluster.name) + "changes", f"({rev}", "+inf") == []


@pytest.mark.slow
@pytest.mark.parametrize("text", ["x", "", "nan", "inf", "-inf", "-1e308", "0.5", "0x10", "1e400"])
async def test_no_field_of_meta_stops_the_store_whatever_stands_in_it(cluster: Cluster, text: str) -> None:
    """All that are there, and those that a step writes only now and then."""
    there = await cluster.raw("HKEYS", prefix(cluster.name) + "meta")
    assert isinstance(there, list)
    seldom = {"examined", "looked", "taken", "buried", "least", "known", "recover", "regroup", "stopped", "unattended"}
    for field in sorted(({*there} | seldom) - {"version"}):  # another version stops all, and says so
        before = cluster.job()
        assert before is not None
        await cluster.raw("HSET", prefix(cluster.name) + "meta", field, text)
        with suppress(StoreRefusedError, StoreUnavailableError):
            await cluster.bench.set_control(before, f"touch {field}")
        await cluster.until_whole(before)
        await refused("name_taken", cluster.bench.submit("u2"))


@pytest.mark.parametrize(
    "command",
    [
        "HSET job:u1 phase failed",
        "HSET job:u1 phase succeeded",
        "HSET job:u1 max 0",
        "HSET job:u1 min 9",
        "HSET job:u1 array x",
        'HSET job:u1 control {"rev":99,"target":2,"restart":0}',
        "HSET job:u1 active_id evil",
        'HSET job:u1 checkpoint {"name":"evil","step":9,"number":999999,"order":1}',
        "HSET job:u1 not_before 99999999999",
        "HDEL job:u1 member:n1",
    ],
)
async def test_a_field_that_no_difference_brings(cluster: Cluster, command: str) -> None:
    """Nobody reads it, and each step decides by it: some beats compare it. Else the job never recovers from its next
    fault, and an agent that starts reads it."""
    before, era = cluster.job(), cluster.leases[0]._snapshot.era
    assert before is not None
    await cluster.attack(command)
    async with asyncio.timeout(BOUND):
        while cluster.leases[0]._snapshot.era == era:
            await cluster.beats()
    await cluster.until_whole(before)
    for at, lease in enumerate(cluster.leases):
        job = cluster.job(at)
        assert job is not None
        assert not await cluster.store.differs(job, lease._snapshot.era)
    await cluster.bench.propose(before, "n1")


@pytest.mark.parametrize("kind", ["holder", "member"])
async def test_a_node_that_there_is_not_holds_no_generation_up(cluster: Cluster, kind: str) -> None:
    """Nobody would let go, and the next generation formed for ever."""
    before = cluster.job()
    assert before is not None
    await cluster.attack(f'HSET job:u1 {kind}:x {{"node":"x","life":"x","devices":["cpu0"]}}')
    assert "node:x" in await refused("recovering", cluster.bench.propose(before, "n1"))
    await cluster.until_whole(before)
    job = await cluster.bench.propose(before, "n1")
    assert job.generation is not None
    assert set(job.generation.holders) == {"n1", "n2"}


async def test_a_second_job_of_the_name_is_refused_at_every_moment(cluster: Cluster) -> None:
    before = cluster.job()
    assert before is not None
    await cluster.attack("DEL job:u1", "DEL names", "DEL alloc:n1", "DEL alloc:n2")
    for number in range(20):
        try:
            await cluster.bench.submit(f"x{number}")
        except StoreRefusedError as refusal:
            assert refusal.code in ("recovering", "name_taken")
        else:
            raise AssertionError("there are two jobs of one name")
        await cluster.beats()
    await cluster.until_whole(before)
    await refused("name_taken", cluster.bench.submit("u2"))


async def test_a_removal_that_no_step_did_is_not_believed(cluster: Cluster) -> None:
    before = cluster.job()
    assert before is not None
    rev = str(await cluster.raw("HINCRBY", prefix(cluster.name) + "meta", "rev", "1"))
    await cluster.attack("DEL job:u1", "ZREM changes job:u1", f"ZADD changes {rev} gone:job:u1")
    await cluster.until_whole(before)


async def test_another_version_stops_nobody_and_is_over_when_it_is_put_right(cluster: Cluster) -> None:
    before = cluster.job()
    assert before is not None
    await cluster.attack("HSET meta version 9")
    for _ in range(5):
        await cluster.beats()
    assert all(lease.joined and "version 9" in lease.unusable for lease in cluster.leases)
    await cluster.attack("HSET meta version 1")
    await cluster.until_whole(before)
    assert not any(lease.unusable for lease in cluster.leases)


@pytest.mark.parametrize("attack", ["HSET meta key forged", "HDEL meta key"])
async def test_another_digest_of_the_key_ends_nobody_and_is_over_when_it_is_put_right(
    cluster: Cluster, attack: str
) -> None:
    before = cluster.job()
    assert before is not None
    await cluster.attack(attack)
    await cluster.until_whole(before)
    assert not any(lease.unusable for lease in cluster.leases), "a node that is there needs it for nothing"
    await cluster.attack("DEL job:u1")  # the store has lost what they know: they offer it, and join again
    for _ in range(4 * LOOKS):  # a node that cannot join looks no more
        await cluster.beats()
        await asyncio.sleep(TIMING.heartbeat)
    forged = "HSET" in attack
    assert all(("another cluster key than the cluster" in lease.unusable) == forged for lease in cluster.leases)
    await cluster.attack("HDEL meta key")
    await cluster.until_whole(before)
    assert not any(lease.unusable for lease in cluster.leases)


@pytest.mark.parametrize(
    "news",
    [
        "+generation_state ended +phase failed",
        "+generation_number 2 +generation_id evil +generation_state forming",
    ],
)
async def test_one_entry_that_says_that_a_job_has_ended_ends_no_workers(cluster: Cluster, news: str) -> None:
    before = cluster.job()
    assert before is not None and before.generation is not None
    era = cluster.leases[0]._snapshot.era
    for rev in (before.rev + 1, 2**62):
        await cluster.attack(f"XADD wake:job:u1 * era {era} since {before.rev} +rev {rev} {news}")
        for lease in cluster.leases:
            woken = await cluster.store.wake(lease.newest_event, 1.0, lease.node, ["u1"])
            lease._snapshot.absorb_jobs(woken.jobs)
            job = lease._snapshot.job("u1")
            assert job is not None and (job.generation, job.phase) == (before.generation, before.phase)
    await cluster.until_whole(before)
    assert cluster.leases[0]._snapshot.era == era, "nothing was damaged, and nothing had to be restored"
