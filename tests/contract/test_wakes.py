"""Who is woken by what happens: those who may have to act on it, and nobody else."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import pytest

from nodeagent.local.privateredis import PrivateRedis
from nodeagent.model.job import JobRecord
from nodeagent.model.node import Readiness
from nodeagent.store.client import JOBS_COMPARED, RedisStore, connect
from nodeagent.store.keys import prefix
from nodeagent.store.link import Links
from nodeagent.store.messages import Beat, Settlement, Woken
from tests.contract.bench import BOUND, LONG, RedisBench, as_own, generation, refused
from tests.inprocess.lease import renew_lease

pytestmark = pytest.mark.redis
NODES = ("n1", "n2", "n3", "n4")


class Wakes:
    """Agents of four nodes, two of which run a job."""

    def __init__(self, store: RedisStore, links: Links, cluster: str) -> None:
        self.store, self.links, self.cluster, self.prefix = store, links, cluster, prefix(cluster)
        self.bench = RedisBench(store, links, self.prefix)

    async def woken(self, step: Awaitable[object], job: JobRecord) -> set[str]:
        """Whom this wakes that could not know of it before."""
        after = (await self.bench.beat("n1")).event
        await step
        return {node for node in NODES if await self._is_woken(node, after, job)}

    async def _is_woken(self, node: str, after: str, job: JobRecord) -> bool:
        jobs = [job.uid] if job.concerns(node) else []
        return (await self.store.wake(after, 0.01, node, jobs)).event != after


@pytest.fixture
async def wakes(redis_server: PrivateRedis) -> AsyncIterator[Wakes]:
    cluster = uuid.uuid4().hex
    store, links = connect(redis_server.url, cluster, 5.0), Links(redis_server.url, 1)
    yield Wakes(store, links, cluster)
    await links.close()
    await store.close()


async def test_a_fault_wakes_the_gang_and_its_next_members(wakes: Wakes) -> None:
    bench = wakes.bench
    await bench.up(*NODES)
    queued = await bench.submit()
    job = await bench.active(queued, "n1", "n2")
    assert await wakes.woken(bench.report(job, "n1"), job) == {"n1", "n2"}
    job = await bench.job()
    assert await wakes.woken(bench.propose(job, "n1", "n3"), job) == {"n1", "n2", "n3"}, "n3 did not know of the job"
    job = await bench.job()
    assert await wakes.woken(bench.ack(job, "n1"), job) == set(), "nobody can do anything yet"
    await bench.ack(job, "n2")
    assert await wakes.woken(bench.ack(job, "n3"), job) == set(NODES), "what n2 had is free"


async def test_a_gang_that_starts_anew_on_the_same_nodes_wakes_nobody_else(wakes: Wakes) -> None:
    bench = wakes.bench
    await bench.up(*NODES)
    job = await bench.active(await bench.submit(), "n1", "n2")
    await bench.report(job, "n1")
    job = await bench.propose(await bench.job(), "n1", "n2")
    await bench.ack(job, "n1")
    assert await wakes.woken(bench.ack(job, "n2"), job) == {"n1", "n2"}
    job = await bench.job()
    assert generation(job).state == "active"
    assert await wakes.woken(bench.report(job, "n1", "running"), job) == set(), "that is for people"


async def test_what_any_node_may_have_to_act_on_wakes_all(wakes: Wakes) -> None:
    bench = wakes.bench
    await bench.up(*NODES)
    job = await bench.submit()
    assert await wakes.woken(bench.submit("u2", "other"), job) == set(NODES)
    job = await bench.active(await bench.job(), "n1", "n2")
    assert await wakes.woken(bench.set_control(job, "r1", "pause"), job) == set(NODES)
    assert await wakes.woken(bench.end(await bench.job(), "pausing"), job) == set(NODES)
    assert await wakes.woken(bench.store.leave("n4", bench.lives["n4"]), job) == set(NODES)


async def test_a_whole_cluster_of_newcomers_is_woken_at_once(wakes: Wakes) -> None:
    bench = wakes.bench
    gang = tuple(f"m{i}" for i in range(70))
    await bench.up("n1")
    for node in gang:
        await bench.join(node)
        await bench.beat(node, rev=1)
    job = await bench.submit(high=100)
    assert await wakes.woken(bench.propose(job, *gang), job) == set(NODES)


async def test_who_waits_is_woken_by_the_first_of_its_places(wakes: Wakes) -> None:
    bench = wakes.bench
    await bench.up(*NODES)
    job = await bench.active(await bench.submit(), "n1", "n2")
    after = (await bench.beat("n1")).event
    async with asyncio.timeout(BOUND), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wakes.store.wake(after, BOUND, "n2", ["u0", "u1"]))
        await bench.report(job, "n1")
    event = waiting.result().event
    assert event == (await bench.beat("n1")).event
    assert (await wakes.store.wake(event, 0.01, "n2", ["u1"])).event == event


async def test_a_clock_that_was_put_back_hinders_no_step(wakes: Wakes) -> None:
    bench = wakes.bench
    await bench.up(*NODES)
    async with wakes.links.one() as link:
        await link.ask("DEL", f"{wakes.prefix}wake:all")
        await link.ask("XADD", f"{wakes.prefix}wake:all", "99999999999999-0", "e", "")
    job = await bench.submit()
    assert await wakes.woken(bench.submit("u2", "other"), job) == set(NODES)
    async with wakes.links.one() as link:
        assert 0 < await link.ask("PTTL", f"{wakes.prefix}wake:all") <= 60_000


async def test_what_wakes_nobody_comes_with_the_next_renewal_of_all(wakes: Wakes) -> None:
    """Of it follow steps that others may have to take: a node that is ready, or sick, or whose workers have ended."""
    bench = wakes.bench
    await bench.up(*NODES)

    async def unannounced(node: str) -> int:
        era = await bench.era()
        return (await renew_lease(bench.calls, node, bench.lives[node].life, era, LONG)).unannounced

    async def is_news(step: Awaitable[object]) -> bool:
        seen = (await bench.beat("n4")).rev
        before = await unannounced("n4")
        assert before <= seen
        await step
        newest = {await unannounced(node) for node in NODES}
        assert newest in ({before}, {(await bench.beat("n4")).rev})
        return newest != {before}

    assert await is_news(bench.beat("n1", readiness={"u": Readiness(state="ready")}))
    assert not await is_news(bench.beat("n1"))
    job = await bench.active(await bench.submit(), "n1", "n2")
    assert not await is_news(bench.report(job, "n1", "running")), "that is for people"
    assert await is_news(bench.report(job, "n1", "succeeded"))
    assert not await is_news(bench.report(job, "n2")), "a fault wakes the gang"
    later = await bench.submit("u9", "later")
    met = later.control.model_copy(update={"met": ("u1",)})
    noted = Settlement(
        uid="u9", expect=None, expect_state="", control_rev=1, control=met, event="JobAfterMet", text="so", by="n1"
    )
    assert await is_news(bench.store.settle(noted)), "that another job has ended"


class Gang:
    """Agents of a gang, each with a client of its own that has read the job."""

    def __init__(self, wakes: Wakes, stores: Mapping[str, RedisStore]) -> None:
        self.wakes, self.stores = wakes, stores
        self.after = dict.fromkeys(stores, "")

    async def read(self) -> None:
        """Each beats."""
        for node, store in self.stores.items():
            self.after[node] = (await self.wakes.bench.only_beat(node, store)).event

    async def woken(self, node: str, job: JobRecord) -> Woken:
        woken = await self.stores[node].wake(self.after[node], BOUND, node, [job.uid])
        assert woken.event != self.after[node]
        self.after[node] = woken.event
        return woken


@pytest.fixture
async def gang(wakes: Wakes, redis_server: PrivateRedis) -> AsyncIterator[Gang]:
    stores = {node: connect(redis_server.url, wakes.cluster, 5.0) for node in ("n1", "n2")}
    await wakes.bench.up(*NODES)
    yield Gang(wakes, stores)
    for store in stores.values():
        await store.close()


async def test_what_happens_in_a_gang_comes_with_the_wake(gang: Gang) -> None:
    bench = gang.wakes.bench
    job = await bench.active(await bench.submit(), "n1", "n2")
    await gang.read()
    steps: list[Callable[[JobRecord], Awaitable[object]]] = [
        lambda job: bench.report(job, "n1"),
        lambda job: bench.propose(job, "n1", "n2"),
    ]
    for step in steps:
        await step(job)
        job = await bench.job()
        for node in gang.stores:
            assert (await gang.woken(node, job)).jobs == (job,)
    await bench.ack(job, "n1")
    await bench.ack(job, "n2")
    job = await bench.job()
    assert generation(job).state == "active"
    for node in gang.stores:
        assert (await gang.woken(node, job)).jobs == (job,)


async def test_who_has_missed_a_wake_has_to_beat(gang: Gang) -> None:
    bench = gang.wakes.bench
    job = await bench.active(await bench.submit(), "n1", "n2")
    await gang.read()
    await bench.report(job, "n1")
    assert (await gang.woken("n1", job)).jobs
    await bench.propose(await bench.job(), "n1", "n2")
    job = await bench.job()
    assert (await gang.woken("n1", job)).jobs == (job,)
    assert (await gang.woken("n2", job)).jobs == (), "the newest brings what came after the first"


async def test_a_wake_brings_nothing_where_more_than_the_job_has_changed(gang: Gang) -> None:
    bench = gang.wakes.bench
    job = await bench.active(await bench.submit(), "n1", "n2", "n3")
    await gang.read()
    await bench.lapse("n3", "n1")
    await bench.propose(job, "n1", "n2", lost=("n3",))
    assert (await gang.woken("n1", job)).jobs == (), "n3's record is another one, too"


async def test_a_beat_leaves_out_jobs_that_its_node_has_read_since(wakes: Wakes) -> None:
    bench = wakes.bench
    await bench.up(*NODES)
    job = await bench.active(await bench.submit(), "n1", "n2")
    other = await bench.submit("u2", "other")
    before = await bench.beat("n1")
    await bench.report(job, "n1")
    job = await bench.job()
    await bench.set_control(other, "r1", "pause")

    async def brought(rev: int, era: str) -> set[str]:
        reply = await bench.beat("n1", rev=before.rev, era=era, ahead={job.uid: rev})
        return {found.uid for found in reply.jobs}

    assert await brought(job.rev, before.era) == {"u2"}
    assert await brought(job.rev - 1, before.era) == {job.uid, "u2"}
    assert await brought(job.rev, "") == {job.uid, "u2"}, "revisions of another era say nothing"


FORGED = [
    "+generation_state=ended +phase=failed",
    "+phase=stopped",
    "+generation_state=ended",
    "+generation_id=other",
    "+generation_number=2 +generation_id=other +generation_state=forming +phase=forming",
    "-generation_id",
    "+control={}",
    "+rev=4611686018427387904",
    "+rev=99999999999999999999999",
    "+rev=x",
    "-rev",
]


@pytest.mark.parametrize("words", FORGED)
async def test_news_that_the_jobs_record_does_not_have_are_not_believed(gang: Gang, words: str) -> None:
    """Anybody who can write to the store can write news: by these an agent would end its workers, and nobody would
    notice."""
    bench, wakes = gang.wakes.bench, gang.wakes
    job = await bench.active(await bench.submit(), "n1", "n2")
    await gang.read()
    fields = ["era", await bench.era(), "since", str(job.rev), "+rev", str(job.rev + 1)]
    fields += [part for word in words.split(" ") for part in ((word, "") if word.startswith("-") else word.split("="))]

    async def forge() -> None:
        async with wakes.links.one() as link:
            await link.ask("XADD", f"{wakes.prefix}wake:job:{job.uid}", "*", *fields)

    await forge()
    assert (await gang.woken("n1", job)).jobs == ()
    await bench.report(job, "n1", "running")
    await forge()
    assert (await gang.woken("n2", job)).jobs == (), "nor where the record is newer by something that wakes nobody"
    await bench.report(job, "n1")
    await gang.read()
    job = await bench.propose(await bench.job(), "n1", "n2")
    for node in gang.stores:
        assert (await gang.woken(node, job)).jobs == (job,), "what a step writes is taken as before"


async def test_a_record_that_cannot_be_compared_is_for_the_beat_to_find(gang: Gang) -> None:
    bench, wakes = gang.wakes.bench, gang.wakes
    job = await bench.active(await bench.submit(), "n1", "n2")
    await gang.read()
    await bench.report(job, "n1")
    async with wakes.links.one() as link:
        await link.ask("SET", f"{wakes.prefix}job:{job.uid}", "x")
    assert (await gang.woken("n2", job)).jobs == ()
    assert (await gang.stores["n2"].wake(gang.after["n2"], 0.01, "n2", [job.uid])).jobs == (), "the link is a good one"


async def test_who_runs_more_jobs_than_are_compared_has_to_beat(gang: Gang) -> None:
    bench = gang.wakes.bench
    job = await bench.active(await bench.submit(), "n1", "n2")
    await gang.read()
    await bench.report(job, "n1")
    others = [f"o{number}" for number in range(JOBS_COMPARED)]
    woken = await gang.stores["n2"].wake(gang.after["n2"], BOUND, "n2", [job.uid, *others])
    assert (woken.event != gang.after["n2"], woken.jobs) == (True, ())


@pytest.mark.parametrize("runs", [False, True])
async def test_who_has_read_more_of_a_job_than_there_is_finds_the_store_damaged(wakes: Wakes, runs: bool) -> None:
    """Somebody has put an older record back, and its place in the list of changes. What has ended is in nobody's list
    of what runs; a reply or a wake has brought it."""
    bench = wakes.bench
    await bench.up(*NODES)
    before = await bench.active(await bench.submit(), "n1", "n2")
    view = await bench.beat("n1")
    job = await bench.report(before, "n1")
    own = as_own(job)
    async with wakes.links.one() as link:
        await link.ask("HSET", f"{wakes.prefix}job:{job.uid}", "rev", before.rev)
        await link.ask("ZADD", f"{wakes.prefix}changes", before.rev, f"job:{job.uid}")
    beat = Beat(node="n1", incarnation=bench.lives["n1"], seq=1001, rev=view.rev, era=view.era, looks=1)
    more = {"runs": (own,)} if runs else {"ahead": {job.uid: job.rev}}
    await refused("behind", bench.store.beat(beat.model_copy(update=more)))
    assert (await bench.kinds())[-1] == "StoreDamaged"
