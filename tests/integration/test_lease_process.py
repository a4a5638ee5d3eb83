"""The lease process on a real store: it renews, grants and gives back, whatever becomes of the agent, of the store's
server, and of itself."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeagent.lease.grants import NOTHING, Grant, GrantReader, grant_key, write_grant
from nodeagent.lease.main import LONGEST_WORD
from nodeagent.lease.order import LeaseOrder, order_file, script_of
from nodeagent.lease.order import Server as Place
from nodeagent.lease.statefiles import find_holder
from nodeagent.model.job import JobEvent, JobRecord
from nodeagent.model.world import Generation
from nodeagent.osutil.linux import boottime
from nodeagent.store.client import RedisStore, connect
from nodeagent.store.scripts import load
from tests.contract.bench import Bench, generation
from tests.descriptors import few_files_of
from tests.folders import is_held
from tests.integration.lease_support import CLUSTER, LIFE, NODE, POD, Node, order
from tests.integration.redis_support import Server, Yard, ask, frozen, until, yard

pytestmark = pytest.mark.redis
KILLS = 100
PATIENT = {"fence": 30.0, "lease": 40.0}
"""In an order: where it is no matter how soon the next renewal comes."""


class World:
    """A store that the node has joined."""

    def __init__(self, server: Server, store: RedisStore, era: str, node: Node) -> None:
        self.server, self.store, self.era, self.node = server, store, era, node
        self.bench = Bench(store)

    def order(self, **changes: Any) -> LeaseOrder:
        return order(Place("", "127.0.0.1", self.server.port, (), None), **{"era": self.era} | changes)

    def begin(self, **changes: Any) -> None:
        self.node.give(self.order(**changes))
        self.node.start()

    async def fall_silent(self, **changes: Any) -> None:
        """Once the pods have their time."""
        self.begin(**changes)
        await self.node.renewed_again()
        self.node.give(self.order(patience=0.3, **changes))
        self.node.say({})

    async def lease(self) -> float:
        """When it ends, in served milliseconds."""
        return float(str(await ask(self.server, "ZSCORE", f"na:{{{CLUSTER}}}:lease", NODE) or 0))

    async def generation(self, uid: str) -> Generation:
        return generation(await self.bench.job(uid, "n2"))

    async def events(self) -> tuple[JobEvent, ...]:
        return await self.store.events("0-0", 100)


@pytest.fixture
def servers() -> Iterator[Yard]:
    with yard() as found:
        yield found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def world(servers: Yard, node: Node) -> AsyncIterator[World]:
    server = await servers.server()
    store = connect(server.url, CLUSTER, 5.0)
    bench = Bench(store)
    await bench.join(NODE, LIFE)
    era = (await bench.beat(NODE)).era
    made = World(server, store, era, node)
    made.bench = bench
    node.add()
    yield made
    await store.close()


class Watcher:
    """A fake shim: looks at its grant all the time, and notes whether it was ever over."""

    def __init__(self, node: Node) -> None:
        self._reader = GrantReader(node.grants / POD)
        self._end = threading.Event()
        self.looks, self.over = 0, 0
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._reader.__exit__()

    def _look(self) -> None:
        while not self._end.wait(0.002):
            self.looks += 1
            self.over += self._reader.read().until <= boottime()


async def test_it_renews_and_grants(world: World, node: Node) -> None:
    world.begin()
    await node.until(lambda: node.grant().until > boottime())
    assert node.grant().stop_before == 0.0
    before, first = await world.lease(), node.grant().until
    await node.until(lambda: node.grant().until > first)

    async def renewed() -> bool:
        return await world.lease() > before

    await until(renewed)
    pulse = node.pulse
    assert pulse.until == pytest.approx(pulse.renewed + 2.2)
    assert node.status == ("holding", "", (LIFE, 1, world.era))
    assert node.process is not None and find_holder(node.folder) == (node.process.pid, "0.1.0")


async def test_what_clears_tmp_away_passes_over_its_run_folder(world: World, node: Node) -> None:
    world.begin()
    await node.renewed_again()
    assert is_held(node.folder.parent)


async def test_a_new_pod_has_its_time_at_a_word(world: World, node: Node) -> None:
    world.begin(heartbeat=3600.0, lease=3600.0)
    await node.until(lambda: node.grant().until > 0 < node.pulse.renewed)
    for _ in range(2):  # also where one takes the other's place
        node.add("p2")
        before = node.pulse
        node.say({})
        await node.until(lambda: node.grant("p2").until > 0)
        assert node.pulse.renewed == before.renewed


@pytest.mark.timeout(300)  # for so many processes that start
async def test_no_reader_ever_sees_its_time_over_while_the_process_is_killed_again_and_again(
    world: World, node: Node
) -> None:
    chance = random.Random(1)
    world.begin(**PATIENT)
    await node.until(lambda: node.grant().until > boottime())
    with Watcher(node) as shim:
        for number in range(KILLS):
            if number % 3:  # in the middle of whatever it does; and now and then it comes to granting
                await asyncio.sleep(chance.uniform(0, 0.15))
            else:
                await node.renewed_again()
            node.kill()
            node.start()
        await node.renewed_again()
        assert shim.looks > KILLS
        assert not shim.over


async def test_one_that_stood_still_goes_on(world: World, node: Node) -> None:
    world.begin(**PATIENT)
    await node.renewed_again()
    with Watcher(node) as shim:
        node.signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        node.signal(signal.SIGCONT)
        await node.renewed_again()
        assert not shim.over


async def test_there_is_one_at_a_time(world: World, node: Node, tmp_path: Path) -> None:
    world.begin()
    await node.renewed_again()
    first = node.process
    node.start()
    assert await node.ended() == 0
    assert "another lease process runs" in node.log
    node.process = first
    await node.renewed_again()


# --- the agent


async def test_a_silent_agents_node_is_stopped_in_order_and_given_back(world: World, node: Node) -> None:
    await world.fall_silent()
    await node.until(lambda: node.grant().stop_before > 0)
    assert node.grant().until > boottime(), "while they are stopped, workers have their time"
    await node.renewed_again()
    node.obey(node.grant().stop_before)
    assert await node.ended() == 0
    why = node.status.why
    assert re.fullmatch(r"its agent was silent for \d+ s", why)
    assert node.status == ("left", why, (LIFE, 1, world.era))
    assert node.grant().until == 0.0
    assert (await world.events())[-1].text == f"node {NODE} left: {why}"


async def test_shims_that_do_not_obey_have_their_time_taken_and_are_waited_for(world: World, node: Node) -> None:
    await world.fall_silent(grace=0.3, kill=0.5)
    await node.until(lambda: node.grant().stop_before > 0)
    await node.until(lambda: node.grant().until == 0.0)
    latest = node.pulse.renewed + 2.2
    await node.until(lambda: node.status.state == "giving up")
    assert await node.ended() == 0
    assert boottime() > latest + 0.5
    assert node.status.state == "left"


async def test_no_restart_takes_back_that_a_life_goes(world: World, node: Node) -> None:
    await world.fall_silent()
    await node.until(lambda: node.grant().stop_before > 0)
    stop = node.grant().stop_before
    node.kill()
    world.begin()
    for _ in range(3):
        node.say({"alive": True})
        await node.renewed_again()
    assert node.grant().stop_before == stop
    assert node.status.state == "stopping"


async def test_one_that_took_the_time_back_and_died_is_followed_by_one_that_waits_for_the_shims(
    world: World, node: Node
) -> None:
    await world.fall_silent(grace=0.0)
    await node.until(lambda: node.grant().until == 0.0 < node.grant().stop_before)
    stop = node.grant().stop_before
    node.kill()
    world.begin(patience=0.3, grace=0.0)
    assert await node.ended() == 0
    assert boottime() > stop + 2.2


async def test_as_long_as_the_agent_speaks_nothing_is_stopped(world: World, node: Node) -> None:
    world.begin(patience=3.0)
    await node.renewed_again()
    end = boottime() + 4.0
    while boottime() < end:
        node.say({"alive": True})
        node.say(b"\xff{")
        node.say({"alive": 1})
        node.say("x" * (LONGEST_WORD + 1))
        await asyncio.sleep(0.05)
    assert node.status.state == "holding"
    assert node.grant().stop_before == 0.0


async def test_an_agent_that_says_that_it_is_cut_off_makes_its_node_mute_and_keeps_its_lease(
    world: World, node: Node
) -> None:
    await world.bench.up("n2")
    world.begin(lease=0.5, promise=0.5, patience=1.0)
    await node.renewed_again()

    async def mute() -> bool:
        node.say({"alive": True, "cut_off": True, "standing": ""})
        return any(one.mute for one in (await world.bench.beat("n2")).nodes if one.id == NODE)

    await until(mute)
    end = boottime() + 2.0
    while boottime() < end:
        await mute()
    assert node.status.state == "holding"
    assert node.grant().until > boottime()


async def test_an_agent_that_ends_it(world: World, node: Node) -> None:
    world.begin()
    await node.renewed_again()
    node.give(None)
    node.say({})
    assert await node.ended() == 0
    assert node.grant() == NOTHING
    assert node.status.state == "idle"


async def test_a_server_that_has_forgotten_the_scripts_is_sent_them_again(world: World, node: Node) -> None:
    """From their files; without these, the store is away until an agent has written them again."""
    world.begin(**PATIENT)
    await node.renewed_again()
    sha = load("renew_lease").sha

    async def known() -> bool:
        return await ask(world.server, "SCRIPT", "EXISTS", sha) == [1]

    await ask(world.server, "SCRIPT", "FLUSH")
    await until(known)
    script_of(node.folder, sha).file.unlink()
    await ask(world.server, "SCRIPT", "FLUSH")
    await node.until(lambda: "lacks a script that cannot be read" in node.status.why)
    node.give(world.order(**PATIENT))
    await node.until(lambda: not node.status.why)


async def test_an_order_that_cannot_be_read_changes_nothing(world: World, node: Node) -> None:
    world.begin(heartbeat=0.5)
    await node.renewed_again()
    (node.folder / "order.json").write_text('{"node": "n1"}')
    node.say({})
    await node.renewed_again()
    node.kill()
    before = node.grant()
    (node.folder / "order.json").write_text("[]")
    node.start()
    node.say({})
    await node.until(lambda: "is no order that this version" in node.log)
    await asyncio.sleep(0.2)
    assert node.grant() == before
    node.give(world.order())
    await node.renewed_again()


async def test_an_order_that_could_not_be_read_for_a_moment_is_read_again(world: World, node: Node) -> None:
    """It stays as it is meanwhile: nothing but the next turn brings it. Here the process has no descriptor for it."""
    world.begin(**PATIENT)
    await node.renewed_again()
    assert node.process is not None
    with few_files_of(node.process.pid, 0):
        node.give(world.order(start=2, **PATIENT))
        await node.until(lambda: f"{order_file(node.folder)} cannot be read" in node.log)
        assert node.status.of == (LIFE, 1, world.era)
    await node.until(lambda: node.status.of == (LIFE, 2, world.era))
    await node.renewed_again()
    assert node.log.count("cannot be read") == 1


# --- who waits


async def with_a_job(world: World, node: Node) -> tuple[JobRecord, str]:
    """A job that runs here, with its own time, and on another node; and the key of its grant."""
    await world.bench.up("n2")
    job = await world.bench.active(await world.bench.submit(), NODE, "n2")
    key = grant_key(job.uid)
    node.add(key)
    world.begin(lease=0.5, promise=0.5)
    await node.until(lambda: node.grant(key).until > boottime())
    return job, key


async def test_a_silent_agents_node_lets_the_job_go_that_waits_for_it_and_no_other(world: World, node: Node) -> None:
    job, key = await with_a_job(world, node)
    await world.bench.propose(job, "n2")
    with Watcher(node) as other:
        await node.until(lambda: node.grant(key).barred == 1.0)
        assert node.grant(key).until == 0.0
        await node.renewed_again()
        assert NODE in (await world.generation(job.uid)).holders, "its shim has not said that nothing runs"
        node.obey(node.grant(key).stop_before, key)
        await node.until(lambda: node.grant(key).until > boottime())
        assert node.grant(key).barred == 1.0
        assert (await world.generation(job.uid)).holders.keys() == {"n2"}
    assert other.looks and not other.over
    assert (node.status.state, node.grant().barred) == ("holding", 0.0)
    why = "its agent is silent or cut off from the store, and the job waits"
    assert f"lets go of generation 1 of job {job.uid}: {why}" in node.log


async def test_a_cut_off_agents_node_lets_the_job_go_that_waits_for_what_it_cannot_start_and_no_other(
    world: World, node: Node
) -> None:
    job, key = await with_a_job(world, node)

    def barred() -> bool:
        node.say({"alive": True, "cut_off": True, "standing": f"{job.uid} 1"})
        return node.grant(key).barred == 1.0

    with Watcher(node) as other:
        await node.until(barred)
        assert (await world.generation(job.uid)).reports == {}, "its shim has not said that nothing runs"
        node.obey(node.grant(key).stop_before, key)
        await node.until(lambda: node.grant(key).until > boottime())
        assert (await world.generation(job.uid)).reports[NODE].state == "fenced"
    assert other.looks and not other.over
    assert (node.status.state, node.grant().barred) == ("holding", 0.0)


async def test_no_restart_takes_back_that_a_job_is_let_go(world: World, node: Node) -> None:
    job, key = await with_a_job(world, node)
    await world.bench.propose(job, "n2")
    await node.until(lambda: node.grant(key).barred == 1.0)
    node.kill()
    write_grant(node.grants, key, Grant(boottime() + 1.0))  # as if it had died before it wrote that
    node.start()
    await node.until(lambda: node.grant(key).barred == 1.0)
    assert node.grant(key).until == 0.0
    node.obey(node.grant(key).stop_before, key)
    await node.until(lambda: node.grant(key).until > boottime())
    assert (await world.generation(job.uid)).holders.keys() == {"n2"}


async def test_who_only_misses_a_silent_agents_acknowledgement_takes_nothing_from_its_node(
    world: World, node: Node
) -> None:
    await world.bench.up("n2")
    job = await world.bench.submit()
    world.begin(lease=0.5, promise=0.5)
    await node.renewed_again()
    await world.bench.propose(job, NODE, "n2")

    async def mute() -> bool:
        return any(one.mute for one in (await world.bench.beat("n2")).nodes if one.id == NODE)

    await until(mute)
    for _ in range(3):
        await node.renewed_again()
    assert node.grant().until > 0.0
    assert node.status.state == "holding"


# --- the store


async def test_a_life_that_is_over_is_granted_nothing(world: World, node: Node) -> None:
    world.begin(life="another")
    await node.until(lambda: node.status.state == "lost")
    assert node.grant() == NOTHING
    assert "is over" in node.status.why
    world.node.give(world.order())
    node.say({})
    await node.until(lambda: node.grant().until > 0)


async def test_nothing_is_renewed_in_another_era(world: World, node: Node) -> None:
    world.begin(fence=0.5)
    await node.renewed_again()
    node.give(world.order(era="another", fence=0.5))
    await node.until(lambda: "lost writes" in node.status.why)
    assert node.status.state == "holding"
    before = node.grant()
    await node.until(lambda: boottime() > before.until)
    assert node.grant() == before
    node.give(world.order(fence=0.5))
    await node.until(lambda: node.grant().until > boottime())
    await node.until(lambda: node.status.why == "")


async def test_a_server_that_stands_still_for_a_while(world: World, node: Node) -> None:
    world.begin(**PATIENT)
    await node.renewed_again()
    with Watcher(node) as shim:
        with frozen(world.server):
            await node.until(lambda: "did not answer within 0.5 s" in node.status.why)
            turned = node.pulse.turned
            await node.until(lambda: node.pulse.turned > turned)  # it waits, and says so
        await node.until(lambda: node.status.why == "")
        assert not shim.over


async def test_connections_that_are_closed(world: World, node: Node) -> None:
    world.begin(**PATIENT)
    await node.renewed_again()
    with Watcher(node) as shim:
        for _ in range(3):
            await ask(world.server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await node.renewed_again()
        assert not shim.over
    await node.until(lambda: "closed the connection" in node.log)


async def test_a_server_that_has_become_a_replica(world: World, node: Node, servers: Yard) -> None:
    other = await servers.server()
    world.begin()
    await node.renewed_again()
    await ask(world.server, "REPLICAOF", "127.0.0.1", str(other.port))
    await node.until(lambda: node.status.why)
    await node.until(lambda: f"it is a replica of 127.0.0.1:{other.port}" in node.status.why)
    assert node.grant().until == pytest.approx(node.pulse.renewed + 2.2)


# --- what it is made of


def test_it_needs_nothing_but_a_small_part_of_the_standard_library() -> None:
    asked = [sys.executable, "-c", "import nodeagent.lease.main, sys; print(*sys.modules)"]
    names = set(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split())
    large = {"pydantic", "asyncio", "structlog", "redis", "ssl", "inspect", "subprocess", "logging"}
    assert not names & large
    ours = {name.rpartition(".")[0] for name in names if name.startswith("nodeagent.")}
    assert ours == {"nodeagent", "nodeagent.lease", "nodeagent.osutil", "nodeagent.store"}


async def test_that_the_agent_is_there_is_no_reason_for_a_turn(world: World) -> None:
    """A turn looks at all the files of the node's pods: at rest that is most of what the process costs."""
    heartbeat = 0.5
    world.begin(heartbeat=heartbeat)
    await world.node.renewed_again()
    turns, began = {world.node.pulse.turned}, boottime()
    for _ in range(100):
        world.node.say({"alive": True})
        await asyncio.sleep(0.02)
        turns.add(world.node.pulse.turned)
    renewals = (boottime() - began) / heartbeat
    assert len(turns) <= 2 * renewals + 50, "two turns for each renewal, and none for half of the words"


async def test_words_without_end_keep_no_renewal_from_being_sent(world: World) -> None:
    world.begin()
    await world.node.renewed_again()
    over = threading.Event()

    def speak() -> None:
        while not over.is_set():
            world.node.say({"alive": True})

    speaker = threading.Thread(target=speak)
    speaker.start()
    try:
        for _ in range(3):
            await world.node.renewed_again()
    finally:
        over.set()
        speaker.join()
