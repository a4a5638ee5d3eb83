"""What a client makes of differences is what the store has: whoever writes, however late replies come, whatever was
forgotten meanwhile on either side."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from nodeagent.local.privateredis import PrivateRedis
from nodeagent.model.job import JobRecord
from nodeagent.model.world import Ack, PodReport
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.calls import Calls
from nodeagent.store.client import RedisStore, connect
from nodeagent.store.codec import decode_job, pairs
from nodeagent.store.decoder import Decoder
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links
from nodeagent.store.messages import Beat
from tests.contract.bench import Bench, RedisBench, generation

pytestmark = pytest.mark.redis
READERS = 5
FEW = 5
TURNS = 40


class Server:
    """One store, and what each revision of the job was."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.cluster, self.random = url, uuid.uuid4().hex, random.Random(seed)
        self.links, self.one_at_a_time = Links(url, 1), asyncio.Lock()
        self.record = f"{prefix(self.cluster)}job:u1"
        self.versions: dict[tuple[str, int], JobRecord] = {}

    async def note(self) -> None:
        async with self.links.one() as link:
            flat = await link.ask("HGETALL", self.record)
            counts = pairs(await link.ask("HGETALL", f"{prefix(self.cluster)}counts:u1"))
            era = await link.ask("HGET", f"{prefix(self.cluster)}meta", "era")
        if flat:
            job = decode_job(flat)
            self.versions[era, job.rev] = job
            if counts.get("rev") == str(job.rev):
                counts.pop("freed")
                assert counts == pairs(["rev", str(job.rev), *by_the_rule(job)])


def by_the_rule(job: JobRecord) -> list[str]:
    """What the store counts beside a record."""
    made = job.generation
    assert made is not None
    seqs = [max([0, *(report.seq for report in of.values())]) for of in (made.reports, job.last_reports)]
    done = sum(made.reports[node].state == "succeeded" for node in made.reports)
    names = ("missing", "holding", "report", "last", "done", "undone")
    numbers = (len(made.missing), len(made.holders), *seqs, done, len(made.members) - done)
    return [word for pair in zip(names, map(str, numbers), strict=True) for word in pair]


class Late(Calls):
    """Calls whose replies come in another order than they were given."""

    def __init__(self, server: Server) -> None:
        super().__init__(Links(server.url, 4), Links(server.url, 1), prefix(server.cluster), 10.0)
        self._server = server

    async def step(self, name: str, arguments: dict[str, object], *more: Any) -> Any:
        async with self._server.one_at_a_time:
            reply = await super().step(name, arguments, *more)
            await self._server.note()
        for _ in range(self._server.random.choice([0, 0, 3, 20, 100])):
            await asyncio.sleep(0)
        return reply


class LateStore(RedisStore):
    def __init__(self, server: Server) -> None:
        super().__init__(Late(server))

    def forget_some(self) -> None:
        """As if there were no room."""
        self._decoder = Decoder()


@pytest.fixture
async def server(redis_server: PrivateRedis, request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    server = Server(redis_server.url, request.param)
    yield server
    await server.links.close()


class Reader:
    """An agent's client, and the view that it has by beats and by its own steps."""

    def __init__(self, server: Server, bench: Bench, node: str, gang: Sequence[str]) -> None:
        self.server, self.bench, self.node, self.store = server, bench, node, LateStore(server)
        self.gang = gang
        self.rev, self.era, self.seq = 0, "", 1000
        self.job: JobRecord | None = None

    async def beat(self) -> None:
        self.seq += 1
        asked = Beat(
            node=self.node, incarnation=self.bench.lives[self.node], seq=self.seq, rev=self.rev,
            era=self.era, top=self.job.rev if self.job else 0,
        )  # fmt: skip
        reply = await self.store.beat(asked)
        assert not reply.unread
        for job in reply.jobs:
            self.took(job, reply.era)
        self.rev, self.era = reply.rev, reply.era

    def took(self, job: JobRecord, era: str = "") -> None:
        (made,) = (found for (_, rev), found in self.server.versions.items() if rev == job.rev)
        if made != job:  # of a large gang, an ack and a success bring the caller's own only
            assert len(self.gang) > FEW
            assert generation(made).token == generation(job).token
            assert generation(made).members == generation(job).members
        if self.job is None or job.rev >= self.job.rev:
            self.job = job

    async def step(self) -> None:
        """One that an agent of this node could take by what it knows."""
        job, store, rng = self.job, self.store, self.server.random
        if job is None:
            await self.beat()
            return
        life = self.bench.lives[self.node]
        report = PodReport(state=rng.choice(["failed", "running", "succeeded"]), reason=rng.choice(["", "né"]))
        made = job.generation
        if made is None or (made.state != "forming" and rng.random() < 0.15):
            nodes = rng.sample(self.gang, rng.choice([1, 3, len(self.gang), len(self.gang)]))
            proposal = self.bench.proposal(job, self.bench.members(*nodes), id=f"g{rng.random()}")
            self.took(await store.propose(proposal))
        elif made.state == "active" and rng.random() < 0.1:
            self.took(await store.end(self.bench.ending(job, "pausing")))
        elif made.state == "active":
            well = rng.sample(sorted(made.members), len(made.members) // 2) if rng.random() < 0.3 else []
            for node in well:
                done = PodReport(state="succeeded")
                self.took(await store.report("u1", made.token, node, self.bench.lives[node], done))
            self.took(await store.report("u1", made.token, self.node, life, report))
        else:
            missing = sorted(made.missing.keys() | made.holders.keys())
            for node in [self.node, *rng.sample(missing, min(len(self.gang) // 5, len(missing)))]:
                life = self.bench.lives[node]
                ack = Ack(life=life.life, ended=made.state == "ended", address=f"{node}:1")
                last = report if rng.random() < 0.3 else None
                self.took(await store.ack("u1", made.token, node, life, ack, last))

    async def play(self) -> None:
        """Beats and steps go on beside each other, as an agent's do."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._turns(self.beat))
            tasks.create_task(self._turns(self.step))
            tasks.create_task(self._turns(self.step))

    async def _turns(self, turn: Callable[[], Awaitable[None]]) -> None:
        for _ in range(TURNS):
            roll = self.server.random.random()
            if roll < 0.02:
                self.store.forget_some()
            elif roll < 0.03:
                async with self.server.one_at_a_time, self.server.links.one() as link:
                    await link.ask("DEL", f"{prefix(self.server.cluster)}marks:u1")
            elif roll < 0.05 and turn == self.beat:
                self.rev = 0
            try:
                await turn()
            except StoreRefusedError as refusal:
                assert refusal.code in ("stale", "not_live"), refusal


@pytest.mark.parametrize(
    ("server", "size"),
    [(seed, 5) for seed in range(5)]
    + [pytest.param(seed, 5, marks=pytest.mark.slow) for seed in range(5, 10)]
    + [(seed, 80) for seed in range(2)]
    + [pytest.param(seed, 80, marks=pytest.mark.slow) for seed in range(2, 4)],
    indirect=["server"],
)
async def test_what_was_read_in_differences_is_the_record(server: Server, size: int) -> None:
    gang = [f"n{i}" for i in range(1, size + 1)]
    first = connect(server.url, server.cluster, 10.0)
    bench = RedisBench(first, server.links, prefix(server.cluster))
    for node in gang:
        await bench.join(node)
        await bench.beat(node, rev=1)
    await bench.submit(high=size)
    await server.note()
    readers = [Reader(server, bench, node, gang) for node in gang[:READERS]]
    async with asyncio.TaskGroup() as tasks:
        for reader in readers:
            tasks.create_task(reader.play())
    newest = max(server.versions.values(), key=lambda job: job.rev)
    for reader in readers:
        await reader.beat()
        assert reader.job == newest
        await reader.store.close()
    await first.close()
    assert newest.rev > 20


@pytest.mark.parametrize("server", [0], indirect=True)
async def test_who_writes_without_marks_is_noticed(server: Server) -> None:
    """An agent of an earlier version does not keep them."""
    first = connect(server.url, server.cluster, 10.0)
    bench = RedisBench(first, server.links, prefix(server.cluster))
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    reply = await bench.beat("n1")
    async with server.links.one() as link:
        rev = await link.ask("HINCRBY", f"{prefix(server.cluster)}meta", "rev", 1)
        await link.ask("HSET", server.record, "reason", "written otherwise", "rev", rev)
        await link.ask("ZADD", f"{prefix(server.cluster)}changes", rev, "job:u1")
    (read,) = (await bench.beat("n1", rev=reply.rev, era=reply.era)).jobs
    assert (read.reason, read.rev) == ("written otherwise", rev)
    job = await bench.report(job, "n1", "failed")
    assert job.reason == "written otherwise"
    assert {name: report.seq for name, report in generation(job).reports.items()} == {"n1": 1}
    await first.close()


@pytest.mark.parametrize("server", [0], indirect=True)
async def test_acknowledging_brings_few_of_the_others_acks(server: Server) -> None:
    """So that a gang of a thousand does not read a thousand acknowledgements a thousand times."""
    nodes = tuple(f"n{i:03}" for i in range(100))
    first, second = (connect(server.url, server.cluster, 10.0) for _ in range(2))
    bench = RedisBench(first, server.links, prefix(server.cluster))
    for node in nodes:
        await bench.join(node)
        await bench.beat(node, rev=1)
    job = await bench.propose(await bench.submit(high=100), *nodes)
    beat = Beat(node="n099", incarnation=bench.lives["n099"], seq=99, rev=0)
    seen = await second.beat(beat)
    for node in nodes[:-2]:
        await bench.ack(job, node)
    token, life = generation(job).token, bench.lives["n099"]
    mine = await second.ack("u1", token, "n099", life, Ack(life=life.life), None)
    assert (set(generation(mine).missing), mine.rev) == ({*nodes} - {"n099"}, job.rev)
    again = beat.model_copy(update={"seq": 100, "rev": seen.rev, "era": seen.era})
    (read,) = (await second.beat(again)).jobs
    assert set(generation(read).missing) == {"n098"}
    job = await bench.ack(job, "n098")
    assert generation(job).state == "active"
    assert job == await second.activate("u1", token)
    await first.close()
    await second.close()


@pytest.mark.parametrize("server", [0], indirect=True)
async def test_what_follows_from_the_members_follows_from_those_of_now(server: Server) -> None:
    """A text that names the holders by their membership is of no use once others are members."""
    nodes = tuple(f"n{i:02}" for i in range(42))
    first, second = (connect(server.url, server.cluster, 10.0) for _ in range(2))
    bench = RedisBench(first, server.links, prefix(server.cluster))
    for node in nodes:
        await bench.join(node)
        await bench.beat(node, rev=1)
    job = await bench.active(await bench.submit(high=42), *nodes[:-2])
    beat = Beat(node="n00", incarnation=bench.lives["n00"], seq=99, rev=0)
    seen = await second.beat(beat)
    job = await bench.propose(job, *nodes[:-2])
    job = await bench.propose(job, *nodes[:-3], nodes[-1])
    again = beat.model_copy(update={"seq": 100, "rev": seen.rev, "era": seen.era})
    assert (await second.beat(again)).jobs == (job,)
    assert generation(job).holders.keys() == {*nodes[:-2]}
    await first.close()
    await second.close()
