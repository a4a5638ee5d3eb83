"""When the view is written, what counts as saved, and when a command is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from nodeagent.agent import savedview
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.savedview import Acknowledged, Acknowledger, Saver, Writing
from nodeagent.agent.snapshot import Snapshot
from nodeagent.model.job import Checkpoint, JobRecord
from nodeagent.model.timing import Timing
from nodeagent.osutil.clock import Clock, SystemClock
from nodeagent.store.messages import BeatReply, Saved, Saves
from nodeagent.trust.key import ClusterKey
from tests.contract.bench import HereBench
from tests.inprocess.server import HereStore, Server
from tests.sim.virtual import SimClock, run_virtual
from tests.unit.ctl.samples import job as sample
from tests.unit.ctl.samples import node

BOUND = 5.0


def job(uid: str, **more: Any) -> JobRecord:
    return sample(uid=uid, name=uid, **more)


class Disk:
    """Counts what it is given."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.tried = asyncio.Event()
        self.error: OSError | None = None
        self.unreadable = False
        self.kept: list[bytes] = []
        """As damaged."""
        self.open = asyncio.Event()
        self.open.set()

    def read(self) -> bytes | None:
        if self.unreadable:
            raise OSError("input/output error")
        return self.writes[-1] if self.writes else None

    def keep_damaged(self) -> str:
        self.kept.append(self.writes[-1])
        return "view.saved.damaged"

    async def append(self, data: bytes) -> None:
        await self.write(self.writes[-1] + data)

    async def write(self, data: bytes) -> None:
        await self.open.wait()
        if self.error is None:
            self.writes.append(data)
        self.tried.set()
        if self.error is not None:
            raise self.error


class Scene:
    """One agent's saver."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.disk, self.snapshot, self.metrics, self.notify = Disk(), Snapshot(Timing()), Metrics(), 0
        self.clock = clock or SystemClock()
        self.saver = self.start()

    def start(self) -> Saver:
        """As a new process would."""

        def notify() -> None:
            self.notify += 1

        context: Any = SimpleNamespace(node="n1", snapshot=self.snapshot, clock=self.clock, metrics=self.metrics)
        return Saver(context, self.disk, Writing(ClusterKey(bytes(32)), "default"), notify)

    def read(self, rev: int, era: str = "e", **more: object) -> None:
        plain = {"cluster_uid": "c", "served": 1, "lapsed": (), "next_lapse": None, "rev": rev, "era": era}
        self.snapshot.absorb(BeatReply.model_validate(plain | more), 0.0)

    async def until(self, writes: int) -> None:
        async with asyncio.timeout(BOUND):
            while len(self.disk.writes) < writes:
                self.disk.tried.clear()
                await self.disk.tried.wait()
            await asyncio.sleep(0)  # and the saver has heard of it


@asynccontextmanager
async def running(saver: Saver) -> AsyncIterator[None]:
    task = asyncio.create_task(saver.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_the_first_view_is_written_at_once_and_read_again_by_the_next_start() -> None:
    scene = Scene()
    assert scene.saver.load() is None
    async with running(scene.saver):
        scene.read(3, jobs=(job("a"),), nodes=(node("n1"),))
        await scene.until(1)
        async with asyncio.timeout(BOUND):
            await scene.saver.reached(Saved(era="e", rev=3))
    known = scene.start().load()
    assert known is not None
    assert (known.era, known.rev, [j.name for j in known.jobs]) == ("e", 3, ["a"])


def test_what_nobody_waits_for_is_gathered() -> None:
    async def main() -> None:
        scene = Scene(SimClock())
        async with running(scene.saver):
            scene.read(3)
            await scene.until(1)
            for rev in range(4, 9):
                scene.read(rev)
                await asyncio.sleep(0.01)
            assert len(scene.disk.writes) == 1
            await scene.until(2)
            assert scene.saver.saved == Saved(era="e", rev=8)
            assert scene.notify == 0

    run_virtual(main())


@pytest.mark.parametrize(
    "news", [{"asked": 4}, {"jobs": (job("a", checkpoint=Checkpoint(name="g1", step=1, number=1, order=1)),)}]
)
async def test_what_somebody_waits_for_is_written_at_once(
    monkeypatch: pytest.MonkeyPatch, news: dict[str, Any]
) -> None:
    monkeypatch.setattr(savedview, "SETTLE", 60.0)
    scene = Scene()
    async with running(scene.saver):
        scene.read(3, jobs=(job("a"),))
        await scene.until(1)
        scene.read(4, **news)
        await scene.until(2)
        assert scene.notify == ("asked" in news)


async def test_a_view_that_is_not_the_stores_replaces_nothing() -> None:
    scene = Scene()
    async with running(scene.saver):
        scene.read(3, more=True)
        await asyncio.sleep(0.05)
        assert scene.disk.writes == []
        scene.read(3)
        await scene.until(1)
        scene.read(3, recovering=True, asked=9)
        scene.snapshot.read_again("e2")
        await asyncio.sleep(0.05)
        assert len(scene.disk.writes) == 1
        scene.read(20, era="e2", asked=15)
        await scene.until(2)
        assert scene.saver.saved == Saved(era="e2", rev=20)


async def test_a_disk_that_fails_is_reported_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savedview, "RETRY", 0.01)
    scene = Scene()
    scene.disk.error = OSError("no space left on device")
    async with running(scene.saver):
        scene.read(3)
        async with asyncio.timeout(BOUND):
            for _ in range(3):
                scene.disk.tried.clear()
                await scene.disk.tried.wait()
        assert (scene.saver.saved, scene.saver.trouble) == (None, "no space left on device")
        assert scene.metrics.save_errors._value.get() >= 2
        scene.disk.error = None
        await scene.until(1)
        assert scene.saver.saved == Saved(era="e", rev=3)


async def test_what_changed_is_added_and_after_a_failure_all_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savedview, "SETTLE", 0.0)
    monkeypatch.setattr(savedview, "RETRY", 0.01)
    scene = Scene()
    async with running(scene.saver):
        scene.read(3, jobs=(job("a"), job("b")))
        await scene.until(1)
        scene.read(4, jobs=(job("a", rev=2000),))
        await scene.until(2)
        assert scene.disk.writes[1].startswith(scene.disk.writes[0])
        scene.disk.error = OSError("input/output error")
        scene.disk.tried.clear()
        scene.read(5, jobs=(job("a", rev=2001),))
        async with asyncio.timeout(BOUND):
            await scene.disk.tried.wait()
        scene.disk.error = None
        await scene.until(3)
        assert not scene.disk.writes[2].startswith(scene.disk.writes[0])
    known = scene.start().load()
    assert known is not None
    assert (known.rev, known.whole, {j.uid: j.rev for j in known.jobs}["a"]) == (5, True, 2001)


@pytest.mark.parametrize("damage", ["all", "a line", "the disk"])
async def test_what_cannot_be_read_is_kept_and_does_not_end_the_agent(damage: str) -> None:
    """The next save replaced it: with another cluster's key in the config, all that was kept was gone."""
    scene = Scene()
    async with running(scene.saver):
        scene.read(3, jobs=(job("a"), job("b")))
        await scene.until(1)
    if damage == "the disk":
        scene.disk.unreadable = True
    else:
        whole = scene.disk.writes[-1]
        scene.disk.writes.append(b"rubbish" if damage == "all" else whole.replace(b'"uid":"b"', b'"uid":"c"'))
    with capture_logs() as logs:
        known = scene.start().load()
    assert [job.uid for job in known.jobs] == ["a"] if known is not None else damage != "a line"
    assert scene.disk.kept == [scene.disk.writes[-1]]
    assert [log["damaged_copy"] for log in logs if log["log_level"] == "error"] == ["view.saved.damaged"]


async def test_what_can_be_read_is_not_kept_as_damaged() -> None:
    scene = Scene()
    async with running(scene.saver):
        scene.read(3, jobs=(job("a"),))
        await scene.until(1)
    assert scene.start().load() is not None
    assert scene.disk.kept == []


# --- acknowledging


class Cluster:
    """A store with nodes in it, and the agent of n1."""

    def __init__(self) -> None:
        self.server = Server(lambda: 100.0)
        self.store = HereStore(self.server)
        self.bench = HereBench(self.server, [100.0], self.store)
        self.scene = Scene()
        self.write = Saved(era="", rev=0)

    async def up(self, *nodes: str) -> None:
        """A job was submitted, and read."""
        await self.bench.up(*nodes)
        rev = (await self.bench.submit()).rev
        reply = await self.bench.beat("n1")
        self.scene.snapshot.absorb(reply, 0.0)
        self.write = Saved(era=reply.era, rev=rev)

    async def acknowledge(self, bound: float = BOUND) -> Acknowledged:
        context: Any = SimpleNamespace(node="n1", store=self.store, clock=SystemClock())
        ask = Acknowledger(context, self.scene.saver, lambda: self.scene.snapshot.cluster(0.0), bound)
        return await ask(self.write)


async def test_one_node_alone_is_enough_where_there_is_one() -> None:
    cluster = Cluster()
    await cluster.up("n1")
    async with running(cluster.scene.saver):
        done = await cluster.acknowledge()
    assert (done.nodes, done.wanted, done.safe) == (("n1",), 1, True)


async def test_a_second_node_is_waited_for() -> None:
    cluster = Cluster()
    await cluster.up("n1", "n2", "n3")
    async with running(cluster.scene.saver):
        waiting = asyncio.create_task(cluster.acknowledge())
        await cluster.scene.until(1)
        await cluster.bench.beat("n2", saved=Saved(era="another", rev=cluster.write.rev))
        await cluster.bench.beat("n3", saved=Saved(era=cluster.write.era, rev=cluster.write.rev - 1))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "one has another history, the other an older view"
        await cluster.bench.beat("n3", saved=cluster.write)
        done = await waiting
    assert (done.nodes, done.wanted) == (("n1", "n3"), 2)


async def test_others_are_enough_where_the_own_disk_is_not() -> None:
    cluster = Cluster()
    await cluster.up("n1", "n2", "n3")
    cluster.scene.disk.open.clear()
    async with running(cluster.scene.saver):
        waiting = asyncio.create_task(cluster.acknowledge())
        for name in ("n2", "n3"):
            await cluster.bench.beat(name, saved=cluster.write)
        assert (await waiting).nodes == ("n2", "n3")


async def test_the_wait_has_a_bound_and_says_what_is_so() -> None:
    cluster = Cluster()
    await cluster.up("n1", "n2")
    async with running(cluster.scene.saver):
        await cluster.scene.until(1)
        done = await cluster.acknowledge(0.1)
    assert (done.nodes, done.wanted, done.safe) == (("n1",), 2, False)
    assert done.waited >= 0.1


class Counted(HereStore):
    """Whose saves have been read."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.read = set[str]()

    async def saved(self, after: str, timeout: float, nodes: Collection[str]) -> Saves:
        found = await super().saved(after, timeout, nodes)
        self.read.update(found.nodes)
        return found


async def test_of_saves_only_those_of_nodes_that_are_known_are_read() -> None:
    """Anybody who can write to the store can invent as many as they like: the agent's loop would decode them all."""
    cluster = Cluster()
    cluster.store = store = Counted(cluster.server)
    await cluster.up("n1", "n2")
    key = next(key for key in cluster.server.data.keys if key.endswith(":meta")).removesuffix("meta") + "saved"
    cluster.server.data.call("HSET", key, *(word for i in range(2000) for word in (f"x{i}", f"{i} e")))
    async with running(cluster.scene.saver):
        waiting = asyncio.create_task(cluster.acknowledge())
        await cluster.bench.beat("n2", saved=cluster.write)
        assert (await waiting).nodes == ("n1", "n2")
    assert store.read == {"n2"}
