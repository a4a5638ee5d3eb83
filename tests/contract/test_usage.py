"""What jobs use is counted where devices are booked and let go: to the millisecond, once, by the day, and for longer
than the jobs' own records."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import pytest

from nodeagent.agent.recovery import Known, OfferLog, offer
from nodeagent.model.job import BudgetEntry, JobRecord
from nodeagent.model.pod import Stall
from nodeagent.model.usage import OTHERS, ROWS_KEPT, Held, UsageDay, UsageRow, UsedTime
from nodeagent.model.world import Cause, Member, PodReport
from nodeagent.osutil.clock import SystemClock
from nodeagent.store import client
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError
from tests.contract.bench import FAST, Bench, HereBench, RedisBench, generation
from tests.contract.fake import FakeLinks
from tests.submitting import submit_one

DAY_S = 86400


def total(uses: Iterable[UsedTime]) -> UsedTime:
    """Of several days, or rows."""
    sums = Counter[str]()
    for use in uses:
        sums.update(UsedTime.model_validate(use.model_dump(include=set(UsedTime.model_fields))).model_dump())
    return UsedTime(**sums)


def used(job: JobRecord) -> UsedTime:
    return total(job.used.values())


def held(job: JobRecord) -> Held:
    assert job.held is not None
    return job.held


def booked_since(job: JobRecord) -> int:
    """When the job got its slots, of which it has had as many since."""
    return held(job).at - used(job).slot_ms // held(job).slots


def fault(kind: str = "worker_failed", stalled: float = 0.0) -> BudgetEntry:
    return BudgetEntry(at=1, wall=2.25, kind=kind, counts=True, node="n1", text="because", stalled=stalled)


async def usage(bench: Bench) -> dict[int, UsageDay]:
    found, rev, more = dict[int, UsageDay](), 0, True
    while more:
        reply = await bench.beat(next(iter(bench.lives)), rev=rev, era=await bench.era() if rev else "")
        found |= {day.day: day for day in reply.usage}
        found = {day: of for day, of in found.items() if f"usage:{day}" not in reply.gone}
        rev, more = reply.rev, reply.more
    return found


async def gpu_members(bench: Bench, *nodes: str, gpus: int = 8) -> dict[str, Member]:
    devices = tuple(f"GPU-{i}" for i in range(gpus))
    return {n: m.model_copy(update={"devices": devices}) for n, m in bench.members(*nodes).items()}


class Watched:
    """Adds up by itself what is booked, from the keys as each step leaves them."""

    def __init__(self, bench: RedisBench) -> None:
        self._bench = bench
        self._served = 0
        self._booked: dict[str, dict[str, str]] = {}
        self.ms: Counter[tuple[str, str]] = Counter()
        """(Job, kind of device) to its milliseconds."""

    async def look(self, nodes: Iterable[str]) -> None:
        """After each step: what was booked before it was until now, or until the lease ended of who is lost."""
        async with self._bench._links.one() as link:
            meta = f"{self._bench._prefix}meta"
            served, *shelter = (int(n or 0) for n in await link.ask("HMGET", meta, "served", "amnesty", "recover"))
            for uids in self._booked.values():
                for device, uid in uids.items():
                    self.ms[uid, device[:3]] += served - self._served
            for node in nodes:
                flat = await link.ask("HGETALL", f"{self._bench._prefix}alloc:{node}")
                now, ended = dict(zip(flat[::2], flat[1::2], strict=True)), served
                if await link.ask("HGET", f"{self._bench._prefix}node:{node}", "lost") == "1":
                    lease = float(await link.ask("ZSCORE", f"{self._bench._prefix}departed", node) or served)
                    ended = min(served, max(int(lease), *shelter))
                for device, uid in self._booked.get(node, {}).items():
                    if now.get(device) != uid:
                        self.ms[uid, device[:3]] -= served - ended
                self._booked[node] = now
        self._served = served


async def test_devices_count_from_the_proposal_until_nothing_runs_there(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.submit()
    assert (job.used, job.held) == ({}, None), "a job that waits has nothing"
    await bench.age(500)
    job = await bench.propose(job, "n1", "n2")
    assert used(job).waited_ms >= 500
    begun = held(job)
    assert (begun.gpus, begun.slots, used(job).slot_ms) == (0, 4, 0)
    await bench.age(2000)
    job = await bench.ack(await bench.ack(job, "n1"), "n2")
    await bench.age(3000)
    job = await bench.end(job, "stopped")
    assert held(job).slots == 4, "they may still run"
    await bench.age(1000)
    job = await bench.ack(job, "n1")
    first = held(job).at
    assert (held(job).slots, used(job).slot_ms) == (2, 4 * (first - begun.at))
    await bench.age(7000)
    job = await bench.ack(job, "n2")
    assert (held(job).slots, used(job).slot_ms) == (0, 4 * (first - begun.at) + 2 * (held(job).at - first))
    assert used(job).lost_slot_ms == used(job).gpu_ms == 0
    assert first - begun.at >= 6000 and held(job).at - first >= 7000


async def test_gpus_and_slots_are_counted_apart(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.store.propose(bench.proposal(await bench.submit(), await gpu_members(bench, "n1")))
    assert (held(job).gpus, held(job).slots) == (8, 0)
    await bench.age(1000)
    job = await bench.ack(await bench.end(await bench.ack(job, "n1"), "stopped"), "n1")
    assert used(job).gpu_ms >= 8000 and used(job).gpu_ms % 8 == 0 == used(job).slot_ms


async def test_a_lost_nodes_devices_count_until_its_lease_ended(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    begun = booked_since(job)
    await bench.lapse("n2", "n1")
    ended = (await bench.beat("n1")).served
    await bench.age(5000)
    job = await bench.end(job, "holding", lost=("n2",), spend=fault("node_lost"))
    at = held(job).at
    assert held(job).slots == 2
    assert 2 * (at - begun) < used(job).slot_ms <= 2 * (at - begun) + 2 * (ended - begun)
    assert 0 < used(job).lost_slot_ms <= used(job).slot_ms


async def test_a_node_that_left_has_its_devices_until_then(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    begun = booked_since(job)
    await bench.age(1000)
    await bench.store.leave("n2", bench.lives["n2"])
    left = (await bench.beat("n1")).served
    await bench.age(5000)
    job = await bench.end(job, "holding", lost=("n2",), spend=fault("node_lost"))
    assert 0 <= 2 * (held(job).at - begun) + 2 * (left - begun) - used(job).slot_ms <= 2 * 300


@pytest.mark.parametrize("planned", [False, True])
async def test_a_lost_node_of_a_job_that_stands_still(bench: Bench, planned: bool) -> None:
    """It was lost before that job's fault, or its planned end, and another job is the first to say so."""
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit("u1", name="a"), "n1", "n2")
    other = await bench.active(await bench.submit("u2", name="b"), "n1", "n2", first=2)
    await bench.lapse("n2", "n1")
    await bench.age(3000)
    before = used(job).overhead_slot_ms
    job = await bench.end(job, "holding", spend=None if planned else fault())
    stands = held(job).idle if planned else held(job).stands
    await bench.age(4000)
    await bench.end(other, "holding", lost=("n2",), spend=fault("node_lost"))
    job = await bench.job("u1", "n1")
    assert held(job).slots == 2
    wasted = used(job).overhead_slot_ms - before if planned else used(job).lost_slot_ms
    assert wasted == 2 * (held(job).at - stands), "of the living node alone"
    assert planned or used(job).overhead_slot_ms == before


async def test_overhead_is_what_stands_still_without_a_fault(bench: Bench) -> None:
    """Until a generation is put together and its workers step, and until an ended one has let go."""
    await bench.up("n1")
    job = await bench.propose(await bench.submit(low=1), "n1")
    begun = held(job).at
    await bench.age(2000)
    job = await bench.ack(job, "n1")
    overhead = 2 * (generation(job).since - begun)
    assert used(job).overhead_slot_ms == overhead == used(job).slot_ms
    await bench.age(5000)
    job = await bench.propose(job, "n1", planned=True, cause=Cause(kind="scale", text="x"))
    stood = held(job).at
    await bench.age(1000)
    job = await bench.ack(job, "n1")
    await bench.age(3000)
    report = PodReport(state="running", started=0.5)
    job = await bench.store.report(job.uid, generation(job).token, "n1", bench.lives["n1"], report)
    overhead += 2 * (held(job).started - stood)
    assert (used(job).overhead_slot_ms, used(job).lost_slot_ms) == (overhead, 0)
    assert held(job).started - generation(job).since >= 2000
    job = await bench.store.commit(job.uid, generation(job).token, "n1", bench.lives["n1"], "step-10", 10, 1)
    saved = held(job).saved
    await bench.age(1000)
    job = await bench.end(job, "holding", spend=fault())
    await bench.age(1000)
    job = await bench.ack(job, "n1")
    assert (used(job).overhead_slot_ms, used(job).lost_slot_ms) == (overhead, 2 * (held(job).at - saved))


async def test_a_first_start_is_overhead_until_its_first_step(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(low=1), "n1")
    formed = used(job).overhead_slot_ms
    await bench.age(7000)
    report = PodReport(state="running", started=2.0)
    job = await bench.store.report(job.uid, generation(job).token, "n1", bench.lives["n1"], report)
    assert held(job).started - generation(job).since >= 5000
    assert used(job).overhead_slot_ms == formed + 2 * (held(job).started - generation(job).since)
    assert used(job).lost_slot_ms == 0


async def test_bookings_that_were_removed_by_hand_are_not_counted_twice(bench: Bench) -> None:
    """A member books its devices anew, before anybody has seen that this was missing."""
    await bench.up("n1", "n2")
    job = await bench.propose(await bench.submit(), "n1", "n2")
    await bench.take("alloc:n1")
    job = await bench.ack(job, "n1")
    assert held(job).slots == 4
    await bench.take("alloc:n2")
    job = await bench.ack(await bench.ack(await bench.end(job, "stopped"), "n1"), "n2")
    assert held(job).slots == 0


async def test_what_a_planned_end_takes_is_overhead(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(low=1), "n1")
    await bench.age(4000)
    before = used(job).overhead_slot_ms
    job = await bench.end(job, "stopped")
    ended = held(job).at
    await bench.age(1000)
    job = await bench.ack(job, "n1")
    assert used(job).overhead_slot_ms - before == 2 * (held(job).at - ended) >= 2000
    assert used(job).lost_slot_ms == 0


async def test_a_fault_costs_what_came_after_the_last_checkpoint_and_the_standstill(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(low=1), "n1")
    await bench.age(10_000)
    token, life = generation(job).token, bench.lives["n1"]
    before = job.used
    job = await bench.store.commit(job.uid, token, "n1", life, "step-10", 10, 1)
    saved = held(job).saved
    assert job.used == before, "a commit counts nothing"
    await bench.age(4000)
    job = await bench.propose(job, "n1", spend=fault(), cause=Cause(kind="worker_failed", text="x"))
    assert held(job).stands == saved
    assert used(job).lost_slot_ms == 2 * (held(job).at - saved)
    await bench.age(3000)
    job = await bench.ack(job, "n1")
    active = generation(job).since
    assert (held(job).stands, used(job).lost_slot_ms) == (0, 2 * (active - saved))
    assert used(job).restarts == 1
    await bench.age(2500)
    report = PodReport(state="running", started=0.5)
    job = await bench.store.report(job.uid, generation(job).token, "n1", life, report)
    assert used(job).lost_slot_ms == 2 * (held(job).started - saved)
    assert held(job).started - active >= 2000
    await bench.age(1000)
    job = await bench.end(job, "holding", spend=fault("hang", stalled=100.0), steps_saved=True)
    assert used(job).lost_slot_ms == 2 * (held(job).at - saved), "no moment is lost twice"


@pytest.mark.parametrize(("kind", "more", "lost"), [
    ("worker_failed", {}, 6000), ("worker_failed", {"steps_saved": True}, 0),
    ("hang", {"steps_saved": True, "stalled": 2.0}, 2000),
    ("scale", {"planned": True}, 0), ("hardware", {"planned": True}, 0), ("restart", {}, 0),
])  # fmt: skip
async def test_what_is_lost_when_a_generation_ends(bench: Bench, kind: str, more: dict[str, float], lost: int) -> None:
    """With a checkpoint 6 s ago."""
    await bench.up("n1")
    job = await bench.active(await bench.submit(low=1), "n1")
    await bench.age(1000)
    job = await bench.store.commit(job.uid, generation(job).token, "n1", bench.lives["n1"], "step-10", 10, 1)
    await bench.age(6000)
    ways = dict(more)
    entry = fault(kind, ways.pop("stalled", 0.0))
    job = await bench.end(job, "holding", spend=entry, **ways)
    assert lost <= used(job).lost_slot_ms / 2 < lost + (900 if lost else 1)


async def test_without_a_checkpoint_nothing_is_known_to_be_done_again(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(low=1), "n1")
    await bench.age(6000)
    job = await bench.end(job, "holding", spend=fault())
    assert used(job).lost_slot_ms == 0
    assert held(job).stands > 0
    await bench.age(2000)
    job = await bench.ack(job, "n1")
    assert used(job).lost_slot_ms >= 4000, "but it stands still"


async def test_what_was_used_outlives_the_job(bench: Bench) -> None:
    """By its removal, by another of its name, by the history."""
    await bench.up("n1")
    sums = list[UsedTime]()
    for uid, way in (("u1", "remove"), ("u2", "shelve"), ("u3", "replace"), ("u4", "")):
        job = await bench.active(await bench.submit(uid, name=way or "replace", owner=1000 + (uid == "u2")), "n1")
        await bench.age(1000)
        job = await bench.ack(await bench.end(job, "stopped"), "n1")
        sums.append(used(job))
        if way == "remove":
            await bench.store.remove(uid)
        if way == "shelve":
            await bench.store.shelve([uid], 0.0, 0)
            assert (await bench.store.past(uid)).jobs == (), "not even in the history"
    days = await usage(bench)
    rows = [row for day in days.values() for row in day.rows.items()]
    assert {key for key, _ in rows} == {"1000 default", "1001 default"}
    assert total(row for _, row in rows) == total(sums[:3]), "u4 has its own"
    assert total(row for key, row in rows if key.startswith("1001")) == sums[1]


async def test_jobs_are_counted_on_the_day_of_their_submission(bench: Bench) -> None:
    if not isinstance(bench, HereBench):
        pytest.skip("needs the server's clock")
    await bench.up("n1")
    bench._clock[0] = 20_000 * DAY_S + 10.0
    for uid, day in (("u1", 20_000), ("u2", 19_999), ("u3", 19_000)):
        job = await submit_one(bench.store, uid, (await bench.submit(f"x{uid}", name=f"x{uid}")).spec.model_copy(
            update={"name": uid}), 1000, day * DAY_S + 5.0, "ann", f"s{uid}")  # fmt: skip
        await bench.end(job, "stopped")
        await bench.store.remove(uid)
    assert {day: sum(row.jobs for row in rows.rows.values()) for day, rows in (await usage(bench)).items()} == {
        20_000: 1, 19_999: 1,
    }  # fmt: skip


async def test_midnight_parts_the_days(bench: Bench) -> None:
    if not isinstance(bench, HereBench):
        pytest.skip("needs the server's clock")
    bench._clock[0] = 20_000 * DAY_S - 2.0
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    begun = held(job).at
    for _ in range(50):
        await bench.sleep(0.1)
        await bench.beat("n1")
    job = await bench.ack(await bench.end(job, "stopped"), "n1")
    days = {int(day): use.slot_ms for day, use in job.used.items()}
    assert set(days) == {19_999, 20_000}
    assert sum(days.values()) == 2 * (held(job).at - begun)
    assert days[20_000] == 2 * 3000 + 2 * (held(job).at - begun - 5000)


async def test_days_and_rows_are_bounded(bench: Bench) -> None:
    if not isinstance(bench, HereBench):
        pytest.skip("needs the server's clock")
    await bench.up("n1")
    for i in range(260):
        job = await submit_one(bench.store, f"u{i}", (await bench.submit("x", name="x")).spec.model_copy(
            update={"name": f"j{i}"}), i, bench._clock[0], "ann", f"s{i}")  # fmt: skip
        await bench.end(job, "stopped")
        await bench.store.remove(job.uid)
    (day,) = (await usage(bench)).values()
    assert len(day.rows) == 257
    assert day.rows[f"{OTHERS} default"].jobs == 4
    first = day.day
    for later, kept in ((399, {first, first + 399}), (401, {first + 399, first + 401})):
        bench._clock[0] = (first + later) * DAY_S + 60.0
        await bench.beat("n1")
        await bench.recovered("n1")
        name = f"later-{later}"
        job = await submit_one(
            bench.store, name, job.spec.model_copy(update={"name": name}), 1, bench._clock[0], "ann", name
        )
        await bench.end(job, "stopped")
        await bench.store.remove(job.uid)
        assert set(await usage(bench)) == kept


async def write(bench: Bench, day: int, rows: int) -> None:
    """A day that no step has written."""
    async with bench.calls.link() as link:
        prefix = bench.calls.prefix
        rev = await link.ask("HINCRBY", f"{prefix}meta", "rev", 1)
        fields = [text for number in range(rows) for text in (f"row:{number} q", "{}")]
        await link.ask("HSET", f"{prefix}usage:{day}", "rev", rev, *fields)
        await link.ask("ZADD", f"{prefix}changes", rev, f"usage:{day}")


async def test_of_days_that_somebody_invents_no_more_are_read_than_there_is_room_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_OF_USAGE", 6 * client.ROW_TAKES)
    await bench.up("n1")
    for day, rows in enumerate((ROWS_KEPT + 1, 2, 3, 1), 20_000):
        await write(bench, day, rows)
    found = await bench.beat("n1", rev=0)
    assert ([day.day for day in found.usage], found.beyond) == ([20_001, 20_003], ("days",))
    assert [(one.key, one.why) for one in found.unread] == [
        ("usage:20000", f"a day's use has more than {ROWS_KEPT} rows")
    ]


async def test_days_to_come_that_somebody_invents_are_forgotten_and_leave_their_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_DAYS", 2)
    await bench.up("n1")
    for uid in ("u1", "u2"):
        job = await bench.active(await bench.submit(uid, name=uid), "n1")
        await bench.age(1000)
        await bench.ack(await bench.end(job, "stopped"), "n1")
    for day in (20, 1_000_000):
        await write(bench, day, 1)
    first = await bench.beat("n1", rev=0)
    assert [day.day for day in first.usage] == [20, 1_000_000]
    await bench.store.remove("u1")
    news = {day.day for day in (await bench.beat("n1", rev=first.rev, era=first.era)).usage}
    assert news
    assert news == set(await usage(bench)) != {day.day for day in first.usage}


async def test_an_emptied_store_gets_it_back(bench: Bench) -> None:
    await bench.up("n1", "n2")
    done = await bench.active(await bench.submit("u1", name="done"), "n1")
    await bench.age(1000)
    await bench.ack(await bench.end(done, "stopped"), "n1")
    await bench.store.remove("u1")
    job = await bench.active(await bench.submit("u2"), "n1", "n2")
    await bench.age(5000)
    reply = await bench.beat("n1")
    known = Known(
        cluster_uid=reply.cluster_uid, era=reply.era, rev=reply.rev, served=reply.served, nodes=reply.nodes,
        jobs=reply.jobs, usage=reply.usage,
    )  # fmt: skip
    assert known.usage
    await bench.put_back(None)
    for node in ("n1", "n2"):
        await offer(bench.store, known, FAST, node, OfferLog(node, SystemClock()), regroup=0)
        await bench.join(node)
    await bench.recovered("n1")
    again = await bench.beat("n2")
    assert again.usage == known.usage
    assert [j.held for j in again.jobs] == [job.held], "booked again, not counted again"
    job = await bench.ack(await bench.ack(await bench.end(job, "stopped"), "n1"), "n2")
    assert used(job).slot_ms >= 4 * 5000
    assert held(job).slots == 0
    await bench.store.remove("u2")
    assert total(r for d in (await usage(bench)).values() for r in d.rows.values()).slot_ms > used(job).slot_ms


async def test_a_job_that_comes_back_late_has_used_its_devices_until_its_node_was_cut_off(bench: Bench) -> None:
    await bench.up("n1", "n2")
    kept = await bench.keep()
    job = await bench.active(await bench.submit(), "n1")
    begun = booked_since(job)
    await bench.age(2000)
    reply = await bench.beat("n1")
    known = Known(
        cluster_uid=reply.cluster_uid, era=reply.era, rev=reply.rev, served=reply.served, nodes=reply.nodes,
        jobs=reply.jobs,
    )  # fmt: skip
    await bench.put_back(kept)
    await bench.recovered("n2")
    await bench.age(60_000)
    await offer(bench.store, known, FAST, "n1", OfferLog("n1", SystemClock()), regroup=0)
    job = await bench.job("u1", "n2")
    assert job.phase == "holding"
    assert (held(job).slots, used(job).slot_ms) == (0, 2 * (reply.served - begun))


async def test_a_record_that_was_removed_by_hand_is_missed(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    await bench.age(1000)
    await bench.ack(await bench.end(job, "stopped"), "n1")
    await bench.store.remove(job.uid)
    for day in await usage(bench):
        await bench.take(f"usage:{day}")
    for _ in range(10):
        with suppress(StoreRefusedError):
            await bench.beat("n1")
    assert "StoreDamaged" in await bench.kinds()


@pytest.mark.parametrize("how", ["spoilt", "row"])
async def test_a_damaged_record_is_found_when_a_step_fails_of_it(bench: Bench, how: str) -> None:
    assert isinstance(bench, RedisBench)
    if how == "row" and isinstance(bench._links, FakeLinks):
        pytest.skip("its cjson raises what no server does")
    await bench.up("n1")
    for uid in ("u1", "u2"):
        job = await bench.active(await bench.submit(uid, name=uid), "n1")
        await bench.age(1000)
        await bench.ack(await bench.end(job, "stopped"), "n1")
    await bench.store.remove("u1")
    for day in await usage(bench):
        if how == "spoilt":
            await bench.take(f"usage:{day}")
            await bench.spoil(f"usage:{day}")
        else:
            async with bench._links.one() as link:
                await link.ask("HSET", f"{bench._prefix}usage:{day}", "row:1000 default", "{no")
    with pytest.raises(StoreUnavailableError):
        await bench.store.remove("u2")
    assert "StoreDamaged" in await bench.kinds()
    await bench.recovered("n1")
    await bench.store.remove("u2")


async def test_agents_that_race_count_once(bench: Bench) -> None:
    """Each step is one of the store's; who comes second changes nothing."""
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    await bench.age(3000)
    ended = await bench.end(job, "holding", spend=fault())
    await bench.age(1000)
    assert (await bench.store.end(bench.ending(job, "holding", spend=fault()))).used == ended.used
    first = await bench.ack(ended, "n1")
    await bench.age(1000)
    assert (await bench.ack(ended, "n1")).used == first.used


@pytest.mark.parametrize("seed", range(3))
async def test_a_day_of_many_jobs_adds_up(bench: Bench, seed: int) -> None:
    """Random steps with faults and lost nodes, on a clock that jumps by minutes: of each job what is counted is, to the
    millisecond, what was booked."""
    assert isinstance(bench, RedisBench)
    dice, nodes = random.Random(seed), [f"n{i}" for i in range(1, 7)]
    await bench.up("n0", *nodes)
    watched, live, sums, uid = Watched(bench), dict[str, JobRecord](), Counter[tuple[str, str]](), 0
    lost = set[str]()
    for _ in range(200 if isinstance(bench, HereBench) else 40):
        await bench.age(dice.randrange(600_000))
        for node in ("n0", *(n for n in nodes if n not in lost)):
            await bench.renew(node)
        await watched.look(nodes)
        free = [n for n in nodes if n not in lost and not any(_has(job, n) for job in live.values())]
        act = dice.choice(["submit", "submit", "fault", "end", "lose", "back"])
        job = dice.choice(list(live.values())) if live else None
        if act == "submit" and free:
            uid += 1
            members = bench.members(*dice.sample(free, dice.randint(1, min(3, len(free)))))
            if dice.random() < 0.5:
                members = {n: m.model_copy(update={"devices": ("GPU-a", "GPU-b")}) for n, m in members.items()}
            job = await bench.store.propose(bench.proposal(await bench.submit(f"u{uid}", name=f"j{uid}"), members))
            await watched.look(nodes)
            for node in members:
                job = await bench.ack(job, node)
                await watched.look(nodes)
            live[job.uid] = job
        elif act in ("fault", "end", "lose") and job is not None:
            gone = {n for n in generation(job).members if n in lost}
            if act == "lose" and not gone:
                node = dice.choice(sorted(generation(job).members))
                gone, lost = {node}, lost | {node}
                await bench.lapse(node, "n0")
                await watched.look(nodes)
                await bench.age(dice.randrange(1000))
            rest = {n: m for n, m in generation(job).members.items() if n not in gone}
            if act == "fault" and rest:
                token = bench.proposal(job, _ranked(rest), lost=tuple(sorted(gone)), spend=fault())
                job = await bench.store.propose(token)
                await watched.look(nodes)
                for node in rest:
                    job = await bench.ack(job, node)
                    await watched.look(nodes)
                live[job.uid] = job
            else:
                job = await bench.end(job, "failed", lost=tuple(sorted(gone)), spend=fault())
                await watched.look(nodes)
                for node in rest:
                    job = await bench.ack(job, node)
                    await watched.look(nodes)
                del live[job.uid]
                sums[job.uid, "cpu"], sums[job.uid, "GPU"] = used(job).slot_ms, used(job).gpu_ms
                await bench.store.remove(job.uid)
        elif act == "back" and lost:
            node = dice.choice(sorted(lost))
            if not any(node in generation(job).members for job in live.values()):
                lost.remove(node)
                await bench.join(node, life=f"{node}-{dice.random()}")
                await bench.beat(node)
        await watched.look(nodes)
    assert len(sums) > 4, "else it shows nothing"
    assert {key: ms for key, ms in watched.ms.items() if key[0] not in live and ms} == {
        k: v for k, v in sums.items() if v
    }
    kept = total(row for day in (await usage(bench)).values() for row in day.rows.values())
    assert (kept.slot_ms, kept.gpu_ms) == tuple(
        sum(ms for (_, kind), ms in sums.items() if kind == wanted) for wanted in ("cpu", "GPU")
    )


def _has(job: JobRecord, node: str) -> bool:
    return node in generation(job).members or node in generation(job).holders


def _ranked(members: dict[str, Member]) -> dict[str, Member]:
    return {n: m.model_copy(update={"group_rank": i, "first_rank": 2 * i}) for i, (n, m) in enumerate(members.items())}


def test_a_row_is_a_use() -> None:
    assert set(UsageRow.model_fields) == {*UsedTime.model_fields, "jobs"}


async def test_a_stall_reported_first_is_no_start(bench: Bench) -> None:
    """A hang may be the first that a node reports of a generation."""
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    before = used(job).overhead_slot_ms
    await bench.age(5000)
    job = await bench.report(job, "n1", "running", stall=Stall(limit=10.0, suspects=True, ranks=()))
    assert used(job).overhead_slot_ms == before
    assert "GenerationStarted" not in await bench.kinds()
