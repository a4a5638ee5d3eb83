"""An offer: what is sent to a store that lost writes, in which pages, and what is not sent."""

from __future__ import annotations

import re

from nodeagent.agent.recovery import FAR, FAR_SERVED, PAGE, OfferLog, offer
from nodeagent.agent.snapshot import Snapshot
from nodeagent.model.queue import Queue, Queues
from nodeagent.model.window import Windows
from nodeagent.osutil.clock import SystemClock
from nodeagent.store.messages import PAGE_BYTES, Restored, StoreCopy
from nodeagent.store.scripts import load
from tests.contract.bench import FAST, HereBench, refused
from tests.contract.usual import META
from tests.inprocess.server import HereStore, Server

JOBS = PAGE + 30
LOG = OfferLog("n1", SystemClock())


class Counting(HereStore):
    """Keeps what was offered."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.offers: list[StoreCopy] = []

    async def restore(self, offer: StoreCopy) -> Restored:
        self.offers.append(offer)
        return await super().restore(offer)


class Scene:
    """One store and one agent's copy of it."""

    def __init__(self) -> None:
        clock = [100.0]
        self.server = Server(lambda: clock[0])
        self.store = Counting(self.server)
        self.bench = HereBench(self.server, clock, self.store)

    async def read(self) -> Snapshot:
        snapshot = Snapshot(FAST)
        while not snapshot.complete:
            era, rev = snapshot.asked
            snapshot.absorb(await self.bench.beat("n1", era=era, rev=rev), 0.0)
        return snapshot

    async def offer(self, snapshot: Snapshot) -> str:
        self.store.offers.clear()
        return await offer(self.store, snapshot.known(0.0), FAST, "n1", LOG, regroup=60_000)


async def test_a_view_goes_in_bounded_pages_and_only_once() -> None:
    scene = Scene()
    await scene.bench.up("n1")
    for n in range(JOBS):
        await scene.bench.submit(f"u{n}", f"job{n}")
    first, second = await scene.read(), await scene.read()
    jobs = dict(scene.server.state.jobs)
    scene.server.restart(keep_data=False)
    era = await scene.offer(first)
    assert [len(o.jobs) + len(o.nodes) for o in scene.store.offers] == [0, PAGE, JOBS + 1 - PAGE]
    assert [o.uids is not None for o in scene.store.offers] == [False, False, True]
    assert scene.server.state.jobs == jobs
    assert await scene.offer(second) == era
    assert [len(o.jobs) for o in scene.store.offers] == [0], "the store has everything by now: nothing is sent"


async def test_only_the_newest_steps_of_an_older_view_are_sent() -> None:
    scene = Scene()
    await scene.bench.up("n1")
    await scene.bench.submit("u1", "one")
    newest, older = await scene.read(), await scene.read()
    own = await scene.bench.submit("u2", "two")
    assert older.absorb_job(own)
    scene.server.restart(keep_data=False)
    await scene.offer(newest)
    await scene.offer(older)
    assert [[j.uid for j in o.jobs] for o in scene.store.offers] == [[], ["u2"]]
    assert set(scene.server.state.jobs) == {"u1", "u2"}


async def test_what_a_view_has_of_numbers_written_by_hand_is_offered_with_smaller_ones_in_the_same_order() -> None:
    """Else they grew to what counts as damage in the store, which was given back, without end."""
    scene = Scene()
    await scene.bench.up("n1")
    for n in range(2):
        await scene.bench.submit(f"u{n}", f"job{n}")
    scene.server.data.hset(META, "rev", str(10**15 - 2))
    scene.server.data.hset(META, "served", str(10**13 - 2))
    far = await scene.bench.submit("u2", "far")
    both = await scene.read(), await scene.read()
    assert far.rev > FAR
    scene.server.restart(keep_data=False)
    era = await scene.offer(both[0])
    whole = scene.store.offers[-1]
    sane = max(job.rev for job in both[0].jobs.values() if job.rev <= FAR)
    assert [job.rev for job in whole.jobs][:2] == [job.rev for job in both[0].jobs.values()][:2]
    assert (whole.jobs[2].rev, whole.rev, whole.served) == (sane + 1, sane + 1, FAR_SERVED // 2)
    assert await scene.offer(both[1]) == era
    assert [len(o.jobs) for o in scene.store.offers] == [0, 0], "the store has everything by now: nothing is sent"
    assert scene.server.state.rev < 10**12


async def test_who_knows_nothing_offers_nothing() -> None:
    scene = Scene()
    assert await scene.offer(Snapshot(FAST)) == ""
    assert scene.store.offers == []


async def test_a_store_of_another_cluster_is_refused_only_if_something_would_be_lost() -> None:
    scene = Scene()
    await scene.bench.up("n1")
    empty = await scene.read()
    await scene.bench.submit("u1", "one")
    full = await scene.read()
    scene.server.restart(keep_data=False)
    await scene.bench.up("n2")
    await scene.bench.submit("u9", "theirs")
    assert await scene.offer(empty) == ""
    assert "another cluster" in await refused("foreign", scene.offer(full))


async def test_an_agent_that_is_too_late_offers_lost_jobs_only() -> None:
    scene = Scene()
    await scene.bench.up("n1")
    kept = await scene.bench.keep()
    await scene.bench.submit("u1", "one")
    late = await scene.read()
    await scene.bench.put_back(kept)
    await scene.bench.recovered("n1")
    await scene.offer(late)
    assert [(len(o.nodes), [j.uid for j in o.jobs], o.uids) for o in scene.store.offers] == [
        (0, [], None),
        (0, ["u1"], None),
    ]
    assert set(scene.server.state.jobs) == {"u1"}


async def test_other_refusals_are_the_callers() -> None:
    scene = Scene()
    await scene.bench.up("n1")
    snapshot = await scene.read()
    other = FAST.model_copy(update={"lease": 7.0})
    await refused("timing", offer(scene.store, snapshot.known(0.0), other, "n1", LOG, regroup=60_000))


async def test_a_view_that_is_not_complete_gives_what_it_has() -> None:
    """Its revision is 0; what it knows is no older for that."""
    scene = Scene()
    await scene.bench.up("n1")
    await scene.bench.submit("u1", "one")
    for _ in range(2):
        await scene.bench.restart()
        await scene.bench.recovered("n1")
    job = await scene.bench.set_control(await scene.bench.job(), "c1", target=1)
    snapshot = Snapshot(FAST)
    snapshot.absorb((await scene.bench.beat("n1")).model_copy(update={"more": True}), 0.0)
    assert not snapshot.complete
    scene.server.restart(keep_data=False)
    await scene.offer(snapshot)
    state = scene.server.state
    assert (set(state.jobs), set(state.nodes)) == ({"u1"}, {"n1"})
    assert state.rev > job.rev, "what is written next is newer than what is known"
    assert state.awaited == {"n1"}


async def test_pages_of_an_offer_are_bounded_in_bytes() -> None:
    scene = Scene()
    await scene.bench.up("n1")
    for n in range(12):
        await scene.bench.submit(f"u{n}", f"job{n}", env={"TEXT": "x" * 240_000})
    await scene.bench.submit("huge", "huge", env={"TEXT": "x" * (PAGE_BYTES + 1)})
    view = await scene.read()
    jobs = dict(scene.server.state.jobs)
    scene.server.restart(keep_data=False)
    await scene.offer(view)
    assert [len(o.jobs) for o in scene.store.offers] == [0, 4, 4, 4, 1]
    assert [o.uids is not None for o in scene.store.offers] == [False, False, False, False, True]
    assert scene.server.state.jobs == jobs


async def test_the_queues_go_with_a_view_and_only_where_they_are_missing() -> None:
    scene = Scene()
    await scene.bench.up("n1")
    record = await scene.store.queues(0, Queues(queues=(Queue(name="a"),)), "r", "queue a created")
    first, second = await scene.read(), await scene.read()
    assert first.queues == second.queues == record
    scene.server.restart(keep_data=False)
    await scene.offer(first)
    assert [o.queues for o in scene.store.offers if o.queues] == [record]
    await scene.offer(second)
    assert [o.queues for o in scene.store.offers] == [None]


async def test_the_windows_go_with_a_view_and_only_where_they_are_missing() -> None:
    scene = Scene()
    await scene.bench.up("n1")
    record = await scene.store.windows(0, Windows(), "r", "reserved")
    first, second = await scene.read(), await scene.read()
    assert first.windows == second.windows == record
    scene.server.restart(keep_data=False)
    await scene.offer(first)
    assert [o.windows for o in scene.store.offers if o.windows] == [record]
    await scene.offer(second)
    assert [o.windows for o in scene.store.offers] == [None]


def test_the_store_refuses_from_where_an_agent_comes_down() -> None:
    (found,) = re.findall(r"local FAR, FAR_SERVED = (\S+), (\S+)", load("restore", bare=True).source)
    assert tuple(map(float, found)) == (FAR, FAR_SERVED)
