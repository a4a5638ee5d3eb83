"""The lease: what a beat carries (usage goes along with pods, and is never a reason to send them), and when an id that
another life holds is given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs

from nodeagent.agent.context import AgentContext
from nodeagent.agent.identity import Identity
from nodeagent.agent.membership import PODS_REFRESH, REFUSED_LIMIT, IdTakenError, Membership
from nodeagent.agent.metrics import Metrics
from nodeagent.agent.otherstore import Look
from nodeagent.agent.recovery import LOGGED_AGAIN, LOGGED_AT_ONCE, LOGGED_PER_SECOND, Known, OfferLog
from nodeagent.agent.snapshot import Snapshot
from nodeagent.agent.undecided import Undecided
from nodeagent.lease.statefiles import Pulse
from nodeagent.lease.whichstore import LeaseAnswer
from nodeagent.model.facts import MachineUsage, PodUsage
from nodeagent.model.node import Incarnation, NodeFacts, Readiness
from nodeagent.model.pod import PodState
from nodeagent.model.timing import Timing, millis
from nodeagent.pods.base import PodHost
from nodeagent.store.base import Store, StoreIdentity, StoreRefusedError, StoreUnavailableError, StoreUnusableError
from nodeagent.store.keys import prefix
from nodeagent.store.messages import Beat, BeatReply, JoinReply
from tests.contract.bench import HereBench
from tests.inprocess.lease import Words, era_of, nobody, renew_lease
from tests.inprocess.server import CLUSTER, HereStore, Server
from tests.unit.ctl.samples import node

TIMING = Timing()


class Clock:
    """Stands still unless moved."""

    at = 100.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at


class Host:
    """Knows what was promised."""

    async def promised(self, uids: Iterable[str]) -> Mapping[str, int]:
        return {uid: 7 if uid == "u1" else 7_000_000 for uid in uids}


class Recorder(HereStore):
    """Remembers the pods and the readiness of each beat."""

    away = False
    sent: list[tuple[PodState, ...] | None]
    readiness: list[Mapping[str, Readiness] | None]

    async def beat(self, beat: Beat) -> BeatReply:
        self.sent.append(beat.pods)
        self.readiness.append(beat.readiness)
        if self.away:
            raise StoreUnavailableError("away")
        return await super().beat(beat)


def usage(memory: int) -> PodUsage:
    machine = MachineUsage(load=0, cpus=1, memory_used=1, memory_total=2)
    return PodUsage(memory=memory, processes=1, machine=machine)


def make_lease(
    folder: Path, clock: Clock, store: Store, life: str, metrics: Metrics | None = None, words: Words | None = None,
    start: int = 1, identity: Identity | None = None, peers: Elsewhere | None = None,
) -> Membership:  # fmt: skip
    if identity is None:
        identity = Identity(folder, "b", None, "n1")
        identity.node, identity.incarnation = "n1", Incarnation(life=life, start=start)
    context = AgentContext(
        identity.node, TIMING, store, cast(PodHost, Host()), clock, random_id=lambda: "r", process=words or Words(),
        snapshot=Snapshot(TIMING), metrics=metrics or Metrics(), undecided=Undecided("n1", Metrics().left_undecided),
    )  # fmt: skip
    return Membership(context, identity, node("n1").facts, find_peer=nobody if peers is None else peers.find)


class Away(HereStore):
    """Answers joins and beats unless it is away."""

    away = False

    async def join(
        self, node: str, incarnation: Incarnation, facts: NodeFacts, timing: Timing, regroup: int = 0
    ) -> JoinReply:
        if self.away:
            raise StoreUnavailableError("away")
        return await super().join(node, incarnation, facts, timing, regroup)

    async def beat(self, beat: Beat) -> BeatReply:
        if self.away:
            raise StoreUnavailableError("away")
        return await super().beat(beat)


class Slow(HereStore):
    """Answers in time what has no more than ``carries`` bytes of records."""

    carries = 1 << 20
    rooms: list[int]

    async def beat(self, beat: Beat) -> BeatReply:
        self.rooms.append(beat.room)
        if beat.room > self.carries:
            raise StoreUnavailableError("it did not answer in time")
        return await super().beat(beat)


async def test_an_agent_on_a_slow_link_reads_less_at_a_time_and_so_reads_all(tmp_path: Path) -> None:
    """It asked for as much again and again, for as long as the link was slow."""
    clock = Clock()
    store = Slow(Server(clock.now))
    store.rooms, store.carries = [], 1 << 18
    lease = make_lease(tmp_path, clock, store, "a")
    await lease.join()
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            await lease.beat()
    await lease.beat()
    assert store.rooms == [1 << 20, 1 << 19, 1 << 18]
    await lease.beat()
    assert store.rooms[-1] == 1 << 18, "there was no more to read"


async def test_a_lease_that_runs_out_is_looked_for_only_while_the_store_answers(tmp_path: Path) -> None:
    """Or the agent would ask it a hundred times a second for as long as it is away."""
    clock = Clock()
    server = Server(clock.now)
    store = Away(server)
    lease = make_lease(tmp_path, clock, store, "a")
    await lease.join()
    await store.join("n9", Incarnation(life="z", start=1), lease.facts, TIMING)
    await lease.beat()
    assert lease.next_lapse is not None
    store.away = True
    for attempt in (lease.beat, lease.join):
        lease.next_lapse = 1.0
        with pytest.raises(StoreUnavailableError):
            await attempt()
        assert lease.next_lapse is None
    store.away = False
    await lease.beat()
    assert lease.next_lapse is not None


class Looked(Away):
    """Keeps which look for damage each beat was."""

    looks: list[int]

    async def beat(self, beat: Beat) -> BeatReply:
        self.looks.append(beat.looks)
        return await super().beat(beat)


async def test_each_second_beat_looks_for_damage_and_each_after_one_that_was_not_answered(tmp_path: Path) -> None:
    """The store keeps no number of one that does not look: the lost one would be taken after it."""
    clock = Clock()
    store = Looked(Server(clock.now))
    store.looks = []
    lease = make_lease(tmp_path, clock, store, "a")
    await lease.join()
    for _ in range(4):
        await lease.beat()
        clock.at += TIMING.heartbeat
    store.away = True
    with pytest.raises(StoreUnavailableError):
        await lease.beat()
    store.away = False
    for _ in range(2):
        await lease.beat()
    assert store.looks == [1, 0, 2, 0, 3, 4, 0]


@pytest.mark.parametrize("away", [False, True])
async def test_an_id_is_given_up_when_its_holder_renews_not_when_the_store_was_away(tmp_path: Path, away: bool) -> None:
    clock = Clock()
    server = Server(clock.now)
    held, store = HereStore(server), Away(server)
    other = make_lease(tmp_path / "a", clock, held, "a")
    lease = make_lease(tmp_path / "b", clock, store, "b")
    await other.join()
    for _ in range(int(TIMING.lease * REFUSED_LIMIT / TIMING.heartbeat) + 1):
        with pytest.raises(StoreRefusedError, match="is held by an agent"):
            await lease.join()
        clock.at += TIMING.heartbeat
        await renew_lease(held._calls, "n1", "a", await era_of(held._calls), millis(TIMING.lease))
    if away:
        store.away = True
        with pytest.raises(StoreUnavailableError):
            await lease.join()
        store.away = False
    with pytest.raises(StoreRefusedError if away else IdTakenError):
        await lease.join()


async def test_an_id_is_not_given_up_for_the_long_rest_of_a_dead_one_s_lease(tmp_path: Path) -> None:
    """The store's clock went back: leases end long after their time, and nobody renews this one."""
    clock = Clock()
    server = Server(clock.now)
    store = HereStore(server)
    other = make_lease(tmp_path / "a", clock, store, "a")
    lease = make_lease(tmp_path / "b", clock, store, "b")
    await other.join()
    async with store._calls.link() as link:
        leases = store._calls.prefix + "lease"
        ends = float(await link.ask("ZSCORE", leases, "n1"))
        await link.ask("ZADD", leases, str(int(ends) + 40_000), "n1")
    tries = 0
    while not lease.joined:
        with contextlib.suppress(StoreRefusedError):
            await lease.join()
        clock.at += TIMING.heartbeat
        tries += 1
    assert tries > 40 / TIMING.heartbeat


async def test_nothing_is_published_before_the_agent_has_joined(tmp_path: Path) -> None:
    """Who ends an agent that never reached the store has it report that: its life goes on with the next start."""
    clock = Clock()
    store = HereStore(Server(clock.now))
    await make_lease(tmp_path / "a", clock, store, "a").join()
    again = make_lease(tmp_path / "b", clock, store, "a", start=2)
    with pytest.raises(StoreUnavailableError, match="has not joined yet"):
        await again.beat()
    assert not again.lost
    await again.join()
    await again.beat()


class Held(HereStore):
    """Each beat of a life that has joined waits until ``go`` is set."""

    go: asyncio.Event
    beats: list[Incarnation]
    away = False

    async def beat(self, beat: Beat) -> BeatReply:
        self.beats.append(beat.incarnation)
        await self.go.wait()
        if self.away:
            raise StoreUnavailableError("it does not answer")
        return await super().beat(beat)


async def test_no_beat_goes_in_a_life_that_has_not_joined_yet(tmp_path: Path) -> None:
    """Beats of callers had waited for their turn while the agent stood still. The first heard that the node had left,
    one of the next went in the new life, before that had joined, and its refusal counted as the new life's end: the
    agent took a third one, and its own second one for another agent's."""
    clock = Clock()
    server = Server(clock.now)
    store, lease_process = Held(server), HereStore(server)
    store.go, store.beats = asyncio.Event(), []
    lease = make_lease(tmp_path, clock, store, "a")
    await lease.join()
    await lease_process.leave("n1", lease.incarnation)
    waiting = [asyncio.create_task(lease.beat()) for _ in range(4)]
    await asyncio.sleep(0)

    async def come_back() -> None:
        with pytest.raises(StoreRefusedError, match="has left"):
            await waiting[0]
        lease.renew_life()
        await lease.join()

    back = asyncio.create_task(come_back())
    store.go.set()
    with contextlib.suppress(StoreRefusedError, StoreUnavailableError):
        await asyncio.gather(*waiting, return_exceptions=True)
    await back
    second = lease.incarnation
    assert (lease.joined, lease.lost, second.life != "a") == (True, False, True)
    assert [beat.life for beat in store.beats] == ["a"], "what waited was not sent"
    await lease.beat()
    assert lease.incarnation == second


async def test_the_lease_of_a_former_name_is_given_back_only_in_the_store_where_it_runs(tmp_path: Path) -> None:
    clock, words = Clock(), Words()
    server = Server(clock.now)
    store = HereStore(server)

    def has_left() -> bool:
        return server.state.nodes["n1"].left

    lease = make_lease(tmp_path, clock, store, "a")
    await lease.join()
    identity = Identity(tmp_path, "b", "n9", "n1")
    identity.node, identity.before, identity.incarnation = "n9", "n1", lease.incarnation
    renamed = make_lease(tmp_path, clock, store, "a", words=words, identity=identity)
    assert (renamed.lost, renamed.former) == (True, "n1")
    words.renewed_at, words.renewed_in = "10.0.0.9:6379", "another"
    with pytest.raises(StoreUnusableError, match=r"10\.0\.0\.9"):
        await renamed.leave_as_former()
    assert not has_left()
    words.renewed_at = ""
    await renamed.leave_as_former()
    assert has_left()
    await make_lease(tmp_path, clock, store, "c").join()
    await renamed.leave_as_former()  # its answer was lost, and by now another machine has the name
    assert not has_left()
    server.restart()
    with pytest.raises(StoreRefusedError) as refused:
        await renamed.leave_as_former()
    assert refused.value.code == "recovering"


async def test_beats_go_on_from_a_number_that_somebody_wrote(tmp_path: Path) -> None:
    """Each later beat would come too late, for as long as the node's clock takes to get there."""
    clock = Clock()
    server = Server(clock.now)
    lease = make_lease(tmp_path, clock, HereStore(server), "a")
    await lease.join()
    await lease.beat()
    record = server.data.keys[prefix(CLUSTER) + "node:n1"]
    assert isinstance(record, dict)
    record["seq"] = str(millis(clock.at) + 3_600_000)
    lease.publish({"u1": Readiness(state="ready")}, ())
    with pytest.raises(StoreRefusedError, match="came after"):
        await lease.beat()
    assert lease.joined
    await lease.beat()
    assert "u1" in server.state.nodes["n1"].readiness


async def test_the_first_beat_that_is_answered_again_is_followed_by_one_that_says_so(tmp_path: Path) -> None:
    """The answer to a beat may be lost, and what it had changed would be taken for the agent's return."""
    clock, words, asked = Clock(), Words(), list[bool]()

    class Noted(Away):
        async def beat(self, beat: Beat) -> BeatReply:
            asked.append(beat.unanswered)
            return await super().beat(beat)

    store = Noted(Server(clock.now))
    lease = make_lease(tmp_path, clock, store, "a", words=words)
    await lease.join()
    await lease.beat()
    store.away = True
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            await lease.beat()
    store.away = False
    await renew_lease(store._calls, "n1", "a", await era_of(store._calls), millis(TIMING.lease), asks=True)
    assert words.cut_off == []
    await lease.beat()
    assert asked == [False, False, True, True, False]
    assert words.cut_off == [False], "the lease process hears it before it renews again"
    assert not lease.has_news(clock.now())
    await lease.beat()
    assert len(asked) == 6


async def test_beats_that_wait_while_the_store_is_away_are_not_sent(tmp_path: Path) -> None:
    """Each would cost a timeout. Between one beat's end and the next one's turn none seemed to wait."""
    clock = Clock()
    store = Held(Server(clock.now))
    store.go, store.beats, store.away = asyncio.Event(), [], True
    lease = make_lease(tmp_path, clock, store, "a")
    await lease.join()

    async def twice() -> None:
        for why in ("does not answer", "the beat before"):
            with pytest.raises(StoreUnavailableError, match=why):
                await lease.beat()

    first, second = asyncio.create_task(twice()), asyncio.create_task(lease.beat())
    await asyncio.sleep(0)
    store.go.set()
    with pytest.raises(StoreUnavailableError, match="the beat before"):
        await second
    await first
    assert len(store.beats) == 1


async def test_usage_goes_along_when_pods_are_published(tmp_path: Path) -> None:
    clock = Clock()
    store = Recorder(Server(clock.now))
    store.sent, store.readiness = [], []
    lease = make_lease(tmp_path, clock, store, "x")
    await lease.join()
    pod = PodState(uid="u", job="a", role="worker", node="n1", phase="running")
    lease.usage = {"u": usage(5)}
    lease.publish({}, (pod,))
    for memory in (6, 7):
        await lease.beat()
        clock.at += TIMING.heartbeat
        lease.usage = {"u": usage(memory)}
    clock.at += PODS_REFRESH
    await lease.beat()
    reported = [None if pods is None else pods[0].usage for pods in store.sent]
    assert reported == [usage(5), None, usage(7)]
    assert await store.pods({"u": [pod.node]}) == {"u": (pod.model_copy(update={"usage": usage(7)}),)}


async def test_only_pods_that_have_changed_are_published_until_all_are_again(tmp_path: Path) -> None:
    """A node of a hundred pods of which one gets on sent all of them with each beat."""
    clock = Clock()
    store = Recorder(Server(clock.now))
    store.sent, store.readiness = [], []
    lease = make_lease(tmp_path, clock, store, "x")
    await lease.join()
    pods = [PodState(uid=uid, job=uid, role="worker", node="n1", phase="running") for uid in ("a", "b", "c")]

    async def beat(*which: PodState, later: float = TIMING.heartbeat) -> list[str]:
        clock.at += later
        lease.publish({}, which)
        await lease.beat()
        return [pod.uid for pod in store.sent[-1] or ()]

    assert await beat(*pods) == ["a", "b", "c"]
    assert await beat(*pods) == []
    changed = pods[1].model_copy(update={"phase": "exited"})
    assert await beat(pods[0], changed, pods[2]) == ["b"]
    assert await beat(pods[0], changed, pods[2]) == []
    assert await beat(pods[0], changed, pods[2], later=PODS_REFRESH) == ["a", "b", "c"], "or their keys would expire"
    assert await beat(pods[0]) == [], "the others' keys expire"
    assert await beat(pods[0], pods[1]) == ["b"]
    assert await beat(pods[0], later=2 * PODS_REFRESH) == ["a"]
    assert await beat(later=2 * PODS_REFRESH) == []
    assert await beat(pods[0]) == ["a"], "its key may have expired meanwhile"


async def test_pods_of_a_beat_that_was_not_answered_and_all_after_a_join_are_published(tmp_path: Path) -> None:
    clock = Clock()
    store = Recorder(Server(clock.now))
    store.sent, store.readiness = [], []
    lease = make_lease(tmp_path, clock, store, "x")
    await lease.join()
    pods = [PodState(uid=uid, job=uid, role="worker", node="n1", phase="running") for uid in ("a", "b")]
    lease.publish({}, tuple(pods))
    await lease.beat()
    lease.publish({}, (pods[0], pods[1].model_copy(update={"phase": "exited"})))
    store.away = True
    with pytest.raises(StoreUnavailableError):
        await lease.beat()
    store.away = False
    await lease.beat()
    assert [pod.uid for pod in store.sent[-1] or ()] == ["b"]
    await lease.join()
    await lease.beat()
    assert [pod.uid for pod in store.sent[-1] or ()] == ["a", "b"]


async def test_a_store_that_refuses_a_beat_is_not_away(tmp_path: Path) -> None:
    """Changes that need no lease of ours were refused as if nobody answered."""
    clock = Clock()
    store = Away(Server(clock.now))
    lease = make_lease(tmp_path, clock, store, "x")
    await lease.join()
    store.away = True
    with pytest.raises(StoreUnavailableError):
        await lease.beat()
    assert lease.away_since is not None
    store.away = False
    await store.leave("n1", lease.incarnation)
    with pytest.raises(StoreRefusedError):
        await lease.beat()
    assert not lease.joined
    away: float | None = lease.away_since
    assert away is None


def test_how_old_the_lease_is_goes_by_the_lease_process_and_counts_once_there_is_one(tmp_path: Path) -> None:
    clock, words = Clock(), Words()
    metrics = Metrics()
    lease = make_lease(tmp_path, clock, HereStore(Server(clock.now)), "x", metrics, words)
    lease.measure(99.0)
    words.beats = Pulse(90.0, 0.0, 0.0, 90.0)
    lease.measure(99.0)
    for age in (0.5, 1.75):
        words.beats = Pulse(99.0, 99.0 - age, 101.0, 99.0 - age)
        lease.measure(99.0)
    read = metrics.registry.get_sample_value
    assert read("nodeagent_lease_age_seconds_count") == 2
    assert read("nodeagent_lease_age_seconds_sum") == 2.25
    assert read("nodeagent_lease_age_seconds_bucket", {"le": "1.5"}) == 1


async def kept_by_another_process() -> Known:
    """Two jobs of a cluster, as a disk has them."""
    clock = [99.0]
    server = Server(lambda: clock[0])
    bench = HereBench(server, clock)
    await bench.join("n1", timing=TIMING)
    for uid, name in (("u1", "one"), ("u2", "two")):
        await bench.submit(uid, name)
    snapshot = Snapshot(TIMING)
    snapshot.absorb(await bench.beat("n1"), 0.0)
    return snapshot.known(0.0)


async def test_what_the_disk_kept_is_given_back_before_each_try_to_join(tmp_path: Path) -> None:
    clock = Clock()
    server, kept = Server(clock.now), await kept_by_another_process()
    lease = make_lease(tmp_path, clock, HereStore(server), "reborn")
    lease.from_disk, lease.regroup = kept, 60.0
    for _ in range(2):
        with pytest.raises(StoreRefusedError) as refused:
            await lease.join()
        assert refused.value.code == "recovering", "its earlier life may still run something"
        assert set(server.state.jobs) == {"u1", "u2"}
        assert server.state.highest == {"one": 7}, "a promise that cannot be one is not believed"
        server.restart(keep_data=False)
    with pytest.raises(StoreRefusedError):
        await lease.join()
    while server.state.recovering:
        clock.at += TIMING.heartbeat
        server.run("return { 1 }")
    await lease.join()
    await lease.beat()
    await lease.join()
    assert lease.from_disk is None


async def test_the_log_says_once_what_each_try_to_join_gives_the_store(tmp_path: Path) -> None:
    """It said so some times a second, for as long as the store waited for others."""
    clock, lines = Clock(), list[int]()
    server, kept = Server(clock.now), await kept_by_another_process()
    lease = make_lease(tmp_path, clock, HereStore(server), "reborn")

    async def tries() -> int:
        with capture_logs() as logs:
            for _ in range(3):
                with pytest.raises(StoreRefusedError):
                    await lease.join()
                server.restart(keep_data=False)
        lines.extend(log["jobs"] for log in logs if log["event"] == "restoring the store")
        return len(lines)

    lease.from_disk, lease.regroup = kept, 1000.0
    assert await tries() == await tries() == 1
    lease.from_disk = replace(kept, jobs=kept.jobs[:1])
    assert (await tries(), lines) == (2, [2, 1])
    clock.at += LOGGED_AGAIN
    assert (await tries(), lines) == (3, [2, 1, 1])


async def test_an_agent_whose_store_is_lost_again_and_again_logs_some_of_its_joins(tmp_path: Path) -> None:
    """One that throws keys away is joined twice a second."""
    clock = Clock()
    server = Server(clock.now)
    lease = make_lease(tmp_path, clock, HereStore(server), "x")

    async def lost(times: int) -> int:
        with capture_logs() as logs:
            for _ in range(times):
                clock.at += 0.5
                server.restart(keep_data=False)
                await lease.beat()
        assert lease.joined
        return sum(log["event"] == "joined" for log in logs)

    await lease.join()
    first = LOGGED_AT_ONCE - 1
    assert await lost(100) == first, "these take less than a minute"
    assert await lost(120) == 1


def test_what_the_store_is_given_is_logged_some_times_where_it_is_other_each_time() -> None:
    clock = Clock()
    log = OfferLog("n1", clock)
    with capture_logs() as logs:
        for rev in range(100):
            log.restoring(rev=rev)
    assert [line["rev"] for line in logs] == list(range(int(LOGGED_AT_ONCE)))
    clock.at += 1 / LOGGED_PER_SECOND
    with capture_logs() as logs:
        log.restoring(rev=100)
    assert [line["rev"] for line in logs] == [100]


@pytest.mark.parametrize("other", ["", "version", "era"])
async def test_a_record_that_is_not_what_the_disk_has_at_its_revision_is_restored(tmp_path: Path, other: str) -> None:
    """``other``: of the disk, if that says nothing: an agent of another version may have read the same otherwise, and
    a recovery may have changed it."""
    clock = Clock()
    server = Server(clock.now)
    before = make_lease(tmp_path, clock, HereStore(server), "x")
    await before.join()
    bench = HereBench(server, [clock.at])
    kept = {uid: await bench.submit(uid, uid) for uid in ("u1", "u2", "u3")}
    await before.beat()
    known = before._snapshot.known(clock.now())
    if other == "era":
        known = replace(known, era="another")
    if other == "version":
        facts = node("n1").facts.model_copy(update={"agent_version": "another"})
        known = replace(known, nodes=tuple(n.model_copy(update={"facts": facts}) for n in known.nodes))
    server.spoil("job:u1", "phase", "holding")
    server.run("local j = job_read('u3') j.reason = 'changed since' job_save(j)")
    lease = make_lease(tmp_path, clock, HereStore(server), "x", start=2)
    lease.from_disk, lease.regroup = known, 60.0
    await lease.join()
    await lease.beat()
    read = {uid: lease._snapshot.job(uid) for uid in kept}
    assert (read["u2"] == kept["u2"], read["u3"] == kept["u3"]) == (True, False), "it has changed since"
    if other:
        assert (read["u1"] == kept["u1"], lease.has_news(clock.now())) == (False, False)
    else:
        assert (read["u1"] == kept["u1"], lease.has_news(clock.now())) == (True, True), "the next beat says so"
        await lease.beat()
        assert server.state.jobs["u1"] == kept["u1"]
    assert lease.from_disk is None, "it is compared once"


async def test_no_other_store_is_joined_while_the_lease_runs_in_one(tmp_path: Path) -> None:
    """Half of the nodes with another redis.url gave an empty store all jobs, and both halves ran each of them."""
    clock, words = Clock(), Words()
    server = Server(clock.now)
    lease = make_lease(tmp_path, clock, HereStore(server), "reborn", words=words)
    lease.from_disk, lease.regroup = await kept_by_another_process(), 60.0
    words.renewed_at, words.renewed_in = "10.0.0.1:6379", "e1"
    with pytest.raises(StoreUnusableError, match=r"runs in the store at 10\.0\.0\.1:6379"):
        await lease.join()
    assert (lease.joined, lease.lost, lease.unusable == lease.reason != "") == (False, False, True)
    assert not server.state.jobs
    words.renewed_at = ""
    with pytest.raises(StoreRefusedError, match="the store has been disturbed"):
        await lease.join()
    assert set(server.state.jobs) == {"u1", "u2"}


async def test_another_store_that_answers_does_not_count_as_the_leases(tmp_path: Path) -> None:
    """The name in redis.url led to another server under a running agent. Each beat ended and began the agent's time
    without a store, so neither a person nor the lease process learned how long that was."""
    clock, words = Clock(), Words()
    store = HereStore(Server(clock.now))
    lease = make_lease(tmp_path, clock, store, "a", words=words)
    await lease.join()
    await lease.beat()
    lease._store = HereStore(Server(clock.now))
    words.renewed_at, words.renewed_in = "10.0.0.1:6379", "e1"
    since = clock.at
    for _ in range(3):
        with pytest.raises(StoreUnusableError, match=r"runs in the store at 10\.0\.0\.1:6379"):
            await lease.beat()
        assert lease.away_since == since
        clock.at += TIMING.heartbeat
    assert words.cut_off == [], "the lease process is not told that its agent reaches the store"
    lease._store, words.renewed_at = store, ""
    await lease.beat()
    assert (lease.away_since, lease.unusable, words.cut_off) == (None, "", [False])


class Elsewhere:
    """A peer whose lease runs in another store."""

    def __init__(self) -> None:
        self.answer: LeaseAnswer | None = None
        self.asked = 0

    async def find(self, _known: Known, _here: StoreIdentity, _look: Look) -> LeaseAnswer | None:
        self.asked += 1
        return self.answer


async def test_no_other_store_is_joined_while_a_peer_has_its_lease_in_one(tmp_path: Path) -> None:
    """An idle node, which gave its own lease back when it was restarted with another redis.url."""
    clock, peers = Clock(), Elsewhere()
    server = Server(clock.now)
    lease = make_lease(tmp_path, clock, HereStore(server), "reborn", peers=peers)
    lease.from_disk, lease.regroup = await kept_by_another_process(), 60.0
    peers.answer = LeaseAnswer("n2", "c1", "e1", "10.0.0.1:6379", 0.1)
    with pytest.raises(StoreUnusableError) as error:
        await lease.join()
    assert str(error.value) == lease.unusable
    assert lease.unusable.startswith(
        "the lease of node n2 runs in the store at 10.0.0.1:6379, and this agent's config leads to another one, at "
        "this process: all agents must use one Redis: set redis.url and cluster back here; or, "
    )
    assert not server.state.jobs and not server.state.nodes
    peers.answer = None
    with pytest.raises(StoreRefusedError, match="the store has been disturbed"):
        await lease.join()
    assert set(server.state.jobs) == {"u1", "u2"}


class Evicting(HereStore):
    """Its server throws keys away."""

    async def identity(self) -> StoreIdentity:
        return replace(await super().identity(), evicts=True)


async def test_a_server_that_throws_keys_away_is_named_once(tmp_path: Path) -> None:
    clock = Clock()
    server = Server(clock.now)
    lease = make_lease(tmp_path, clock, Evicting(server), "x")
    await lease.join()
    with capture_logs() as lines:
        await lease.beat()
        for _ in range(3):
            server.run("redis.call('DEL', KEYS[1] .. 'meta') return { 1 }")
            await lease.beat()
    (line,) = (line["event"] for line in lines if "thrown keys away" in line["event"])
    assert "set its maxmemory-policy to noeviction" in line


async def test_peers_are_asked_only_by_who_knows_any_and_may_have_come_to_another_server(tmp_path: Path) -> None:
    clock, peers = Clock(), Elsewhere()
    server = Server(clock.now)
    lease = make_lease(tmp_path, clock, HereStore(server), "x", peers=peers)
    await lease.join()
    await lease.beat()
    server.run("redis.call('DEL', KEYS[1] .. 'meta') return { 1 }")
    await lease.beat()
    assert (lease.joined, peers.asked) == (True, 0), "it was with that server all the time"
    server.restart(keep_data=False)
    await lease.beat()
    assert (lease.joined, peers.asked) == (True, 1)


async def test_another_clusters_jobs_are_left(tmp_path: Path) -> None:
    clock = Clock()
    server = Server(clock.now)
    bench = HereBench(server, [clock.at])
    await bench.join("n2", timing=TIMING)
    await bench.submit("u9", "theirs")
    lease = make_lease(tmp_path, clock, HereStore(server), "x")
    lease.from_disk, lease.regroup = replace(await kept_by_another_process(), cluster_uid="another"), 60.0
    await lease.join()
    assert lease.joined
    assert set(server.state.jobs) == {"u9"}


async def test_other_words_of_the_same_readiness_go_now_and_then_and_another_state_at_once(tmp_path: Path) -> None:
    """All agents read each, and what a pod says of itself may be another text without end."""
    clock = Clock()
    store = Recorder(Server(clock.now))
    store.sent, store.readiness = [], []
    lease = make_lease(tmp_path, clock, store, "x")
    await lease.join()
    beats = urgent = 0
    for number in range(60):  # for 30 s, half of a second each
        urgent += lease.publish({"u": Readiness(state="unfit", reason=f"why {number}")}, ())
        await lease.beat()
        beats, clock.at = beats + 1, clock.at + 0.5
    texts = [sent["u"].reason for sent in store.readiness if sent is not None]
    assert (beats, urgent) == (60, len(texts))
    assert texts[:2] == ["why 0", "why 1"], "the first goes at once"
    assert len(texts) <= 2 + 30 / 5
    assert lease.publish({"u": Readiness(state="ready", reason="why 60")}, ())
    await lease.beat()
    assert store.readiness[-1] == {"u": Readiness(state="ready", reason="why 60")}
    lease.publish({"u": Readiness(state="ready", reason="the last")}, ())
    for _ in range(11):
        clock.at += 0.5
        await lease.beat()
    assert [sent["u"].reason for sent in store.readiness if sent is not None][-1] == "the last"


async def test_what_a_late_join_put_back_is_published_again(tmp_path: Path) -> None:
    """Found by the simulation: a node stayed sick in the store that had long been repaired."""
    clock = Clock()
    store = HereStore(Server(clock.now))
    lease = make_lease(tmp_path, clock, store, "a")
    old = lease.facts.model_copy(update={"hostname": "before"})
    await lease.join()
    await lease.beat()
    await store.join("n1", lease.incarnation, old, TIMING)  # sent before, and served only now
    reported: list[str] = []
    for _ in range(3):
        clock.at += TIMING.heartbeat
        await lease.beat()
        reported.append((await store.cordon("n1", None, f"r{len(reported)}")).facts.hostname)
    assert reported == ["before", lease.facts.hostname, lease.facts.hostname], (
        "seen with one beat, mended with the next"
    )


async def test_an_agent_that_reads_that_it_is_silent_says_at_once_that_it_speaks(tmp_path: Path) -> None:
    """In a large cluster an agent at rest beats seldom."""
    clock = Clock()
    store = HereStore(Server(clock.now))
    lease = make_lease(tmp_path, clock, store, "a")
    await lease.join()
    await lease.beat()
    assert not lease.has_news(clock.now())
    await renew_lease(store._calls, "n1", "a", await era_of(store._calls), millis(TIMING.lease), asks=True)
    other = Incarnation(life="z", start=1)
    await store.join("n2", other, lease.facts, TIMING)
    read = await store.beat(Beat(node="n2", incarnation=other, seq=1, rev=0))
    lease._snapshot.absorb(read, clock.now(), [])
    assert lease.has_news(clock.now())
    await lease.beat()
    assert not lease.has_news(clock.now())
    read = await store.beat(Beat(node="n2", incarnation=other, seq=2, rev=0))
    assert not any(node.mute for node in read.nodes)
