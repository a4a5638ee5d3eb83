"""What a large gang's end costs its readers: successes, the end and what its members let go are few texts, whatever its
size."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from nodeagent.local.privateredis import PrivateRedis
from nodeagent.model.job import JobRecord, Phase
from nodeagent.model.world import PodReport
from nodeagent.store.client import RedisStore, connect
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links
from nodeagent.store.messages import Beat
from tests.contract.bench import RedisBench, generation

pytestmark = pytest.mark.redis
NODES = tuple(f"n{i:03}" for i in range(100))
READER = "n050"
DONE = PodReport(state="succeeded")


class Gang:
    """A job that runs on all these nodes, and one of them that reads."""

    def __init__(self, url: str) -> None:
        cluster = uuid.uuid4().hex
        self.links, self.prefix = Links(url, 1), prefix(cluster)
        self.bench = RedisBench(connect(url, cluster, 10.0), self.links, self.prefix)
        self.reader: RedisStore = connect(url, cluster, 10.0)
        self.seq, self.rev, self.era = 1000, 0, ""

    async def start(self) -> JobRecord:
        """The reader has read all that."""
        for node in NODES:
            await self.bench.join(node)
            await self.bench.beat(node, rev=1)
        job = await self.bench.active(await self.bench.submit(high=len(NODES)), *NODES)
        await self.read()
        return job

    async def read(self) -> JobRecord:
        """What a beat of the reader brings; it must be the record."""
        self.seq += 1
        life = self.bench.lives[READER]
        asked = Beat(node=READER, incarnation=life, seq=self.seq, rev=self.rev, era=self.era)
        reply = await self.reader.beat(asked)
        self.rev, self.era = reply.rev, reply.era
        (job,) = reply.jobs
        assert job == await self.bench.job()
        return job

    async def entries(self) -> tuple[set[str], set[str]]:
        """What the next beat of the reader brings of maps of nodes: kinds that come as one text, and single
        fields."""
        async with self.links.one() as link:
            marks = await link.ask("ZRANGEBYSCORE", f"{self.prefix}marks:u1", f"({self.rev}", "+inf")
        texts = {field.removesuffix(":") for field in marks if field.endswith(":")}
        return texts, {field for field in marks if ":" in field and not field.endswith(":") and "used:" not in field}

    async def unannounced(self) -> int:
        async with self.links.one() as link:
            return int(await link.ask("HGET", f"{self.prefix}meta", "unannounced") or 0)

    async def succeed(self, job: JobRecord, *nodes: str) -> list[str]:
        """Whose success had the agents of the cluster beat."""
        news = list[str]()
        for node in nodes:
            before = await self.unannounced()
            await self.bench.report(job, node, "succeeded")
            news += [node] if await self.unannounced() != before else []
        return news

    async def close(self) -> None:
        await self.reader.close()
        await self.bench.store.close()
        await self.links.close()


@pytest.fixture
async def gang(redis_server: PrivateRedis) -> AsyncIterator[Gang]:
    gang = Gang(redis_server.url)
    yield gang
    await gang.close()


async def test_successes_are_one_text_once_the_last_has_come(gang: Gang) -> None:
    """Else a thousand agents would read a thousand of them. The one that reports the last one gets all of them, and can
    end the job."""
    job = await gang.start()
    *others, last = (n for n in NODES if n != READER)
    assert await gang.succeed(job, *others) == [NODES[0]], "of those in between nothing follows"
    token, life = generation(job).token, gang.bench.lives[READER]
    mine = await gang.reader.report("u1", token, READER, life, DONE)
    assert (generation(mine).reports, mine.rev) == ({READER: DONE}, job.rev), "the others' come with the next beat"
    done = await gang.bench.report(job, last, "succeeded")
    assert done == await gang.bench.job()
    texts, single = await gang.entries()
    assert "report" in texts and not single
    assert await gang.unannounced() == done.rev
    assert generation(await gang.read()).reports == dict.fromkeys(NODES, DONE)


async def test_members_are_a_list_of_names(gang: Gang) -> None:
    """What is said of a node's life and devices, each agent has read."""
    job = await gang.start()
    job = await gang.bench.propose(job, *NODES[::-1])
    async with gang.links.one() as link:
        rev, rule, *words = (await link.ask("HGET", f"{gang.prefix}packed:u1", "member")).split("\n")
    assert (rev, rule.split(" ")[0]) == (str(job.rev), "listed")
    assert words[:4] == ["n099", "2 0 2", "n098", "2 0 2"] and len(words) == 2 * len(NODES)
    assert generation(await gang.read()).members == generation(job).members


async def test_who_knows_another_life_of_a_member_reads_the_record(gang: Gang) -> None:
    """Or who has not read that the member's node is there at all."""
    job = await gang.start()
    gone = gang.bench.lives[NODES[0]]
    await gang.bench.store.leave(NODES[0], gone)
    await gang.bench.join(NODES[0], life="again")
    await gang.bench.beat(NODES[0], rev=1)
    job = await gang.bench.propose(await gang.bench.job(), *NODES[::-1])
    control = job.control.model_copy(update={"by": "eva"})
    mine = await gang.reader.control("u1", job.control.rev, control, "", "JobScaled", "by eva")
    assert mine == await gang.bench.job()
    assert generation(mine).members[NODES[0]].life == "again"


async def test_a_success_that_is_taken_back_is_counted_once(gang: Gang) -> None:
    job = await gang.start()
    assert await gang.succeed(job, *NODES[:99], NODES[3]) == [NODES[0]]
    await gang.bench.report(job, NODES[7], "running")
    assert await gang.succeed(job, NODES[99]) == []
    assert await gang.succeed(job, NODES[7]) == [NODES[7]]


@pytest.mark.parametrize("phase", ["succeeded", "pausing"])
async def test_an_end_is_one_text_of_each_kind(gang: Gang, phase: Phase) -> None:
    job = await gang.start()
    well = NODES if phase == "succeeded" else ()
    await gang.succeed(job, *well)
    job = await gang.bench.end(await gang.bench.job(), phase)
    texts, single = await gang.entries()
    assert texts >= ({"holder", "report", "last"} if well else {"holder"}) and not single
    job = await gang.read()
    assert (set(generation(job).holders), job.last_reports) == ({*NODES}, dict.fromkeys(well, DONE))
    for node in NODES:
        await gang.bench.ack(job, node)
    texts, single = await gang.entries()
    assert "holder" in texts and not single
    job = await gang.read()
    assert (generation(job).holders, job.phase) == ({}, "succeeded" if well else "paused")


async def test_what_stands_for_the_reports_is_made_anew_with_the_members(gang: Gang) -> None:
    job = await gang.start()
    await gang.succeed(job, *NODES)
    job = await gang.bench.end(await gang.bench.job(), "pausing")
    await gang.bench.propose(job, *NODES[:60])
    assert (await gang.read()).last_reports == dict.fromkeys(NODES, DONE)
