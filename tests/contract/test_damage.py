"""What somebody removes from the store by hand: noticed, given back by those who know it, and never decided upon."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Cordon
from nodeagent.model.queue import Queue, Queues
from nodeagent.model.timing import millis
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError
from nodeagent.store.messages import Saved
from tests.contract.bench import LASTING, Bench, HereBench, RedisBench, generation, refused
from tests.contract.test_restore import View, read, read_after, rejoin
from tests.inprocess.data import CommandError, Data, Word
from tests.inprocess.server import Server

KEYS = ("job:u1", "node:n1", "node:n2", "names", "alloc:n1", "lease", "highest", "changes")


async def trained(bench: Bench) -> tuple[JobRecord, View]:
    """A job runs on n1 and n2, and n1 has read all."""
    await bench.up("n1", "n2", "n3")
    await bench.active(await bench.submit(), "n1", "n2")
    view = await read(bench)
    return view.jobs["u1"], view


async def noticed(bench: Bench, view: View, limit: int = 20, runs: tuple[str, ...] = ("u1",)) -> str:
    """The refusal of a beat that finds out."""
    reply = view.reply
    for _ in range(limit):
        try:
            await bench.beat("n1", rev=reply.rev, era=reply.era, runs=runs)
        except Exception as error:  # noqa: BLE001 - judged below
            found: Exception = error
            break
    else:
        raise AssertionError("nobody notices")

    async def again() -> None:
        raise found

    return await refused("behind", again())


async def reported(beat: Awaitable[object]) -> str:
    """Why it was refused; empty if it was not."""
    try:
        await beat
    except StoreRefusedError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("key", KEYS)
async def test_what_was_removed_is_noticed_and_given_back(bench: Bench, key: str) -> None:
    """Found by strangers: nobody noticed, and a second job of the name could be submitted beside the first."""
    job, view = await trained(bench)
    await bench.take(key)
    assert key in await noticed(bench, view)
    await refused("recovering", bench.submit("u2"))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    restored = after.jobs["u1"]
    assert restored.model_copy(update={"rev": 0}) == job.model_copy(update={"rev": 0})
    assert set(after.nodes) == {"n1", "n2", "n3"}
    assert after.reply.lapsed == ()
    await refused("name_taken", bench.submit("u2"))
    other = await bench.submit("u3", "other")
    await refused("busy", bench.propose(other, "n1"))
    job = await bench.propose(restored, "n1", "n3")
    assert generation(job).number == 2
    kinds = await bench.kinds()
    assert kinds.count("StoreDamaged") == 1
    assert (await bench.beat("n1", rev=after.reply.rev, era=after.reply.era, runs=("u1",))).era == after.reply.era


@pytest.mark.parametrize("left", ["nothing", "node:n1"])
async def test_a_list_of_records_that_was_removed_is_missed_where_nothing_runs(bench: Bench, left: str) -> None:
    """Who read everything anew took the queues, and the jobs that wait, for removed. ``left``: what was written, and so
    listed, since."""
    assert isinstance(bench, RedisBench)
    await bench.up("n1")
    await bench.store.queues(0, Queues(rev=1, queues=(Queue(name="team"),)), "q", "made")
    await bench.submit()
    view = await read(bench)
    prefix = bench._prefix
    async with bench._links.one() as link:
        rev = await link.ask("HGET", f"{prefix}node:n1", "rev")
        await link.ask("DEL", f"{prefix}changes")
        if left != "nothing":
            await link.ask("ZADD", f"{prefix}changes", rev, left)
    assert "changes" in await noticed(bench, view, 3)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    after = await read_after(bench)
    assert (set(after.jobs), after.reply.queues) == ({"u1"}, view.reply.queues)


async def test_a_list_without_the_last_change_is_read_by_nobody(bench: Bench) -> None:
    """It was an older one. Who beat next read that nothing had changed since, and gave that back as the whole."""
    await bench.up("n1", "n2")
    job = await bench.submit()
    before, era = (await bench.beat("n1")).rev, await bench.era()
    job = await bench.propose(job, "n1")
    async with bench.calls.link() as link:
        await link.ask("ZADD", f"{bench.calls.prefix}changes", str(before), f"job:{job.uid}")
    assert (await bench.beat("n1", rev=job.rev, era=era, looks=False)).rev == job.rev, "it has read all that there is"
    assert "changes" in await refused("behind", bench.beat("n2", rev=before, era=era, looks=False))


@pytest.mark.parametrize("name", ["train", "other"])
async def test_each_of_a_nodes_jobs_is_looked_at_in_its_turn(bench: Bench, name: str) -> None:
    await bench.up("n1")
    await bench.active(await bench.submit(), "n1")
    await bench.active(await bench.submit("u2", "other"), "n1", first=2)
    reply = await bench.beat("n1")
    async with bench.calls.link() as link:
        await link.ask("HDEL", bench.calls.prefix + "names", name)
    looks = [bench.beat("n1", rev=reply.rev, era=reply.era, runs=("u1", "u2")) for _ in range(3)]
    refusals = [error for error in [await reported(look) for look in looks] if error]
    assert "removed or damaged names" in refusals[0]


async def test_a_name_is_taken_by_the_record_whatever_the_names_say(bench: Bench) -> None:
    await trained(bench)
    await bench.take("names")
    await refused("name_taken", bench.submit("u2"))


async def test_a_submit_finds_a_record_that_is_missing(bench: Bench) -> None:
    _, view = await trained(bench)
    await bench.take("job:u1")
    await bench.take("names")
    await refused("recovering", bench.submit("u2"))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2")
    assert (await read_after(bench)).jobs["u1"].phase == "running"


async def test_who_is_about_to_read_a_record_that_is_missing_does_not_read_that_it_was_removed(bench: Bench) -> None:
    """The simulation found it: its view, without the job, was the first to be offered, and the job was lost."""
    await bench.up("n1", "n2")
    for other in range(30):  # a beat looks at some of all records
        await bench.submit(f"v{other}", f"other{other}")
    before = await bench.beat("n1")
    await bench.submit()
    known = await read(bench)
    await bench.take("job:u1")
    assert "job:u1" in await refused("behind", bench.beat("n1", rev=before.rev, era=before.era))
    await bench.store.restore(known.offer())
    await rejoin(bench, "n1", "n2")
    after = await read_after(bench)
    assert ("u1" in after.jobs, len(after.jobs)) == (True, 31)


async def test_a_proposal_finds_that_the_number_of_its_job_is_missing(bench: Bench) -> None:
    """The simulation found it: of a job that nobody runs no beat looks, and its next generation was the first again."""
    job, view = await trained(bench)
    await bench.take("highest")
    await refused("recovering", bench.propose(job, "n1", "n3"))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    job = await bench.propose((await read_after(bench)).jobs["u1"], "n1", "n3")
    assert generation(job).number == 2


FAR = ("9007199254740991", "999999999999998", "1000000002", "1e3", "-1", "0x9", "nan", "")


@pytest.mark.parametrize("text", FAR)
async def test_a_highest_number_that_no_step_comes_to_is_damage(bench: Bench, text: str) -> None:
    """It was counted on from, to where two numbers in a row are the same for Lua: the second generation after it never
    began, and its number was promised on disks by then."""
    job, view = await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "highest", "train", text)
    assert "highest" in await noticed(bench, view, 3)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert after.jobs["u1"] == job
    assert generation(await bench.propose(job, "n1", "n3")).number == 2
    assert (await bench.kinds()).count("StoreDamaged") == 1


@pytest.mark.parametrize("text", FAR)
async def test_nor_does_a_proposal_count_on_from_it(bench: Bench, text: str) -> None:
    """No beat looks at a job that nobody runs."""
    await bench.up("n1")
    job = await bench.submit()
    view = await read(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "highest", "train", text)
    assert "highest" in await refused("recovering", bench.propose(job, "n1"))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    assert generation(await bench.propose((await read_after(bench)).jobs["u1"], "n1")).number == 1


async def test_a_number_of_many_generations_is_none_that_no_step_comes_to(bench: Bench) -> None:
    """Of a name whose job is new, too."""
    job, _ = await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "highest", "train", "1000000000", "other", "999999999")
    assert generation(await bench.propose(job, "n1", "n2")).number == 10**9 + 1
    assert generation(await bench.propose(await bench.submit("u2", "other"), "n3")).number == 10**9


async def test_the_number_of_a_record_that_no_step_wrote_is_read_by_nobody(bench: Bench) -> None:
    """Who was to decide read it anew, and all counted on from there."""
    job, view = await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "job:u1", "generation_number", "9007199254740991")
    assert "highest" in await refused("recovering", bench.end(job, "holding"))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    assert (await read_after(bench)).jobs["u1"] == job
    assert generation(await bench.propose(job, "n1", "n3")).number == 2


@pytest.mark.parametrize("owner", ["nobody", "u1", "u3"])
async def test_a_device_that_is_booked_against_the_records_is_booked_anew(bench: Bench, owner: str) -> None:
    """The simulation found it: a job that was to go on was refused its node for ever, for one that is not there.
    ``u1`` is the job itself, which may take the device at once; ``u3`` runs on another node."""
    job, _ = await trained(bench)
    await bench.active(await bench.submit("u3", "third"), "n3")
    other = await bench.submit("u2", "other")
    async with bench.calls.link() as link:
        for node in ("n1", "n3"):
            await link.ask("HSET", f"{bench.calls.prefix}alloc:{node}", "cpu2", owner if node == "n1" else "nobody")
    if owner != "u1":
        assert "alloc:n1" in await refused("recovering", bench.propose(other, "n1", "n3", first=2))
        await rejoin(bench, "n1", "n2", "n3")  # no agent offers anything: the records are enough
        other = (await read_after(bench)).jobs["u2"]
        assert "belongs to job u1" in await refused("busy", bench.propose(other, "n1"))
        assert "belongs to job u3" in await refused("busy", bench.propose(other, "n3"))
        other = await bench.propose(other, "n1", "n3", first=2)
        assert generation(other).number == 1
    else:
        job = await bench.propose(job, "n1", "n2", first=2)
        assert generation(job).number == 2
    assert (await bench.kinds()).count("StoreDamaged") == (owner != "u1")


async def test_devices_of_a_job_whose_record_was_removed_are_not_free(bench: Bench) -> None:
    """Its workers run: no other job may have them before it is given back."""
    _, view = await trained(bench)
    other = await bench.submit("u2", "other")
    await bench.take("job:u1")
    assert "alloc:n1" in await refused("recovering", bench.propose(other, "n1"))
    await refused("recovering", bench.propose(other, "n1"))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert after.jobs["u1"].phase == "running"
    assert "belongs to job u1" in await refused("busy", bench.propose(after.jobs["u2"], "n1"))


@pytest.mark.parametrize(
    ("key", "field", "text"),
    [
        ("job:u1", "control", "{}"),
        ("job:u1", "held", "{}"),
        ("job:u1", "member:n2", "{}"),
        ("cordons", "n1", "{}"),
    ],
)
async def test_a_value_that_a_step_fails_on_is_looked_for_and_given_back(
    bench: Bench, key: str, field: str, text: str
) -> None:
    """It failed again and again, and each agent that tried it looked at no job after this one."""
    job, view = await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + key, field, text)
    with pytest.raises(StoreUnavailableError):
        await bench.propose(job, "n1", "n3")
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert generation(await bench.propose(after.jobs["u1"], "n1", "n3")).number >= 2  # the failed step took one, too
    assert (await bench.kinds()).count("StoreDamaged") == 1


@pytest.mark.parametrize("text", ["x", "9000000000000000", "nan"])
async def test_what_no_step_claimed_of_a_queue_refuses_nothing(bench: Bench, text: str) -> None:
    job, view = await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "claims", "team", text)
    proposal = bench.proposal(job, bench.members("n1", "n3"), claims=("team",), read=view.reply.rev)
    assert generation(await bench.store.propose(proposal)).number == 2


async def test_a_cordon_that_no_agent_has_read_is_read_once_it_refuses_a_node(bench: Bench) -> None:
    """Somebody wrote it by hand: the same node was proposed again and again, while others were free."""
    job, view = await trained(bench)
    cordon = Cordon(reason="by hand", by="ann", at=1.0).to_json()
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "cordons", "n3", cordon)
    assert "by hand" in await refused("not_live", bench.propose(job, "n1", "n3", read=view.reply.rev))
    nodes = (await bench.beat("n1", rev=view.reply.rev, era=view.reply.era)).nodes
    assert [(node.id, node.cordon.reason) for node in nodes if node.cordon] == [("n3", "by hand")]


@pytest.mark.parametrize("by_hand", [("HSET", "queues", "rev", "1"), ("ZADD", "changes", "9000000000000000", "queues")])
async def test_shared_records_at_a_wrong_place_are_noticed_once(bench: Bench, by_hand: tuple[str, ...]) -> None:
    """In a cluster where nothing runs, the store was restored again and again, and decided nothing meanwhile."""
    await bench.up("n1")
    if by_hand[0] == "ZADD":
        await bench.store.queues(0, Queues(rev=1, queues=(Queue(name="team"),)), "q", "made")
    view = await read(bench)
    async with bench.calls.link() as link:
        await link.ask(by_hand[0], bench.calls.prefix + by_hand[1], *by_hand[2:])
    await noticed(bench, view, 3, runs=())
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    after = await read_after(bench)
    for _ in range(3):
        await bench.beat("n1", rev=after.reply.rev, era=after.reply.era)
    assert after.reply.queues == view.reply.queues
    assert (await bench.kinds()).count("StoreDamaged") == 1
    await bench.submit()


async def test_a_number_of_beats_that_no_agent_counts_to_is_damage(bench: Bench) -> None:
    """Each later beat came too late, and nobody said so: the node held its lease, and started nothing."""
    _, view = await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "node:n1", "seq", "99999999999999999")
    assert "node:n1" in await noticed(bench, view, 1)


@pytest.mark.parametrize("newest", [50_000, 9_000_000])
async def test_a_beat_that_comes_late_is_no_damage(bench: Bench, newest: int) -> None:
    """A link behind which somebody holds back what was sent may deliver it after minutes."""
    await bench.up("n1")
    await bench.beat("n1", seq=newest)
    with pytest.raises(StoreRefusedError) as late:
        await bench.beat("n1", seq=1_000)
    assert (late.value.code, late.value.number) == ("stale", newest)
    assert "StoreDamaged" not in await bench.kinds()


async def test_the_present_life_of_a_node_is_not_dead_because_somebody_wrote_so(bench: Bench) -> None:
    """Its agent joins after each recovery and each of its starts: it was told that its life was lost."""
    await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "node:n2", "dead", "n2-a")
    await bench.join("n2")
    await bench.join("n2", start=2)
    await bench.beat("n2")


@pytest.mark.parametrize(("field", "text"), [("rev", "9" * 16), ("order", "9" * 16), ("served", "9" * 14)])
async def test_a_number_of_meta_that_no_step_comes_to_is_damage(bench: Bench, field: str, text: str) -> None:
    """It grew by one digit with the next write, and nothing could be done with it any more."""
    job, view = await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "meta", field, text)
    await noticed(bench, view)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert after.jobs["u1"] == job
    async with bench.calls.link() as link:
        assert int(await link.ask("HGET", bench.calls.prefix + "meta", field)) < 10**13


async def test_served_time_goes_on_where_meta_alone_is_gone_and_who_died_meanwhile_lapses(bench: Bench) -> None:
    """It began at 0, so what was left of each lease was as long as the store had served: the node's jobs waited for
    days, and nobody could forget it."""
    lease = millis(bench.timing.lease)
    await bench.up("n1")
    await bench.age(10_000_000)
    for node in ("n1", "n2"):
        await bench.join(node)
    before = (await bench.beat("n1", length=lease)).served
    await bench.take("meta")
    await bench.join("n1")
    after = (await bench.beat("n1")).served
    assert before <= after
    await bench.until_lapsed("n2", "n1")


@pytest.mark.parametrize("field", ["lease", "credit", "gap", "limit"])
@pytest.mark.parametrize("text", ["0", "999999999999"])
async def test_a_time_that_is_not_of_the_timing_is_damage(bench: Bench, field: str, text: str) -> None:
    """Nothing lapsed any more (``credit``, ``gap``), or the next recovery lasted for years (``lease``)."""
    job, view = await trained(bench)
    async with bench.calls.link() as link:
        right = await link.ask("HGET", bench.calls.prefix + "meta", field)
        await link.ask("HSET", bench.calls.prefix + "meta", field, text)
    await noticed(bench, view, 8)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert after.jobs["u1"] == job
    async with bench.calls.link() as link:
        assert await link.ask("HGET", bench.calls.prefix + "meta", field) == right


@pytest.mark.parametrize("field", ["horizon", "asked", "known", "unannounced"])
async def test_a_revision_in_meta_above_the_stores_own_is_damage(bench: Bench, field: str) -> None:
    """With ``horizon`` every agent read everything anew with each beat, for ever."""
    job, view = await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "meta", field, "99999999999")
    offers = 0
    with suppress(AssertionError):  # no beat is refused any more
        while offers < 6:
            await noticed(bench, view, 9)
            await bench.store.restore(view.offer())
            await rejoin(bench, "n1", "n2", "n3")
            view, offers = await read_after(bench), offers + 1
    assert (offers, view.jobs["u1"]) == (1, job)


@pytest.mark.parametrize("field", ["recover", "amnesty", "least"])
async def test_a_recovery_or_an_amnesty_lasts_no_longer_than_one_can(bench: Bench, field: str) -> None:
    """``recover``: nothing was decided any more, for ever, and nobody noticed; ``amnesty``: no node lapsed any more."""
    await bench.join("n1", regroup=200)
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    view = await read(bench)
    if field == "least":  # it counts only in a recovery
        await bench.take("names")
        await noticed(bench, view)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "meta", field, "900000000000000")
    if field == "least":
        await bench.store.restore(view.offer(regroup=200))
        await rejoin(bench, "n1", "n2")
    async with asyncio.timeout(10):
        while await reported(bench.propose(job, "n1")):
            await bench.sleep(0.05)
        await bench.renew("n2", 1)
        while not (await bench.only_beat("n1")).lapsed:
            await bench.sleep(0.05)


LAST = f"{2**64 - 1}-{2**64 - 1}"


@pytest.mark.parametrize(
    ("stream", "top"),
    [
        ("events", LAST), ("events:of:1000", LAST), ("saves", LAST), ("events:of:1000", f"{2**63}-0"),
        ("events", "another type"), ("events:of:1000", "another type"), ("saves", "another type"),
    ],
)  # fmt: skip
async def test_a_stream_that_takes_no_later_entry_stops_no_step(bench: Bench, stream: str, top: str) -> None:
    """Each step that notes an event wrote its change, and failed then: it was done, and answered as if it were not."""
    await bench.up("n1")
    if top == "another type":
        await bench.spoil(stream)
    else:
        async with bench.calls.link() as link:
            await link.ask("XADD", bench.calls.prefix + stream, "MAXLEN", "9", top, "e", "")
    job = await bench.submit("u1", request="r1")
    assert await bench.submit("u1", request="r1") == job
    view = await read(bench)
    saved = Saved(rev=view.reply.asked, era=view.reply.era)
    await bench.beat("n1", rev=view.reply.rev, era=view.reply.era, saved=saved)
    async with bench.calls.link() as link:
        [[entry, _]] = await link.ask("XREVRANGE", bench.calls.prefix + stream, "+", "-", "COUNT", "1")
    assert int(entry.partition("-")[0]) < 2**63


OF_NOW = (
    "OOM command not allowed when used memory > 'maxmemory'.",
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
    "NOREPLICAS Not enough good replicas to write.",
    "READONLY You can't write against a read only replica.",
    "LOADING Redis is loading the dataset in memory",
    "NOPERM this user has no permissions to run the command",
    "ERR Unknown Redis command called from script",
)
"""What a server says where it refuses a command that it takes at other times, and where it knows no such command."""


@pytest.mark.parametrize("refusal", OF_NOW)
@pytest.mark.parametrize("command", ["XADD", "HMGET", "ZREVRANGEBYSCORE", "ZUNIONSTORE"])
async def test_a_command_that_the_server_refuses_shows_no_damage(command: str, refusal: str) -> None:
    """The step took it for a damaged key, and removed that: all events, ``meta``, who is back after a restart."""
    clock = [1_000_000.0]
    bench = HereBench(Server(lambda: clock[0]), clock)
    data, name = bench.server.data, bench.calls.prefix.__add__
    await trained(bench)
    if command == "ZREVRANGEBYSCORE":
        data.hdel(name("meta"), "served")
    elif command == "ZUNIONSTORE":  # restarted again, in a recovery that waits for some
        data.hset(name("meta"), "recover", int(data.hget(name("meta"), "served") or "0") + 1000, "parent", "")
        data.zadd(name("awaited"), 0, "n2")
        data.zadd(name("called"), 0, "n3")
        await bench.restart()
    before, real = bench.server.kept(), getattr(data, command.lower())

    def refuse(*_: Word) -> Any:
        raise CommandError(refusal)

    data.watch(command, refuse)
    with pytest.raises(StoreUnavailableError, match=re.escape(refusal)):
        await bench.submit("u2", "other")
    data.watch(command, real)
    kept = bench.server.kept()
    assert before.keys() <= kept.keys()
    assert vars(before[name("events")]) == vars(kept[name("events")])


async def test_a_view_with_numbers_from_a_damaged_store_is_not_given_back_as_it_is(bench: Bench) -> None:
    _, view = await trained(bench)
    await bench.put_back(None)
    far = view.offer(rev=10**15 - 1)
    await refused("far", bench.store.restore(far))
    await refused("far", bench.store.restore(view.offer(served=10**13 - 1)))
    assert (await bench.store.restore(view.offer())).recovering
    await refused("far", bench.store.restore(far))


@pytest.mark.parametrize("record", ["job:u1", "node:n2", "queues"])
async def test_a_record_above_the_revision_of_the_store_is_damage(bench: Bench, record: str) -> None:
    """Who read it was ahead of the store, and offered that as what it had lost: then the store's own was as high."""
    job, view = await trained(bench)
    await bench.store.queues(0, Queues(rev=1, queues=(Queue(name="team"),)), "q", "made")
    view = await read(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + record, "rev", "500000000000000")
        await link.ask("ZADD", bench.calls.prefix + "changes", "500000000000000", record)
    assert record in await noticed(bench, view, runs=())
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert (after.jobs["u1"], set(after.nodes)) == (job, {"n1", "n2", "n3"})
    assert after.reply.queues == view.reply.queues
    async with bench.calls.link() as link:
        assert int(await link.ask("HGET", bench.calls.prefix + "meta", "rev")) < 10**12
        assert await link.ask("ZRANGEBYSCORE", bench.calls.prefix + "changes", 10**12, "+inf") == []


async def test_a_step_does_not_read_a_job_above_the_revision_of_the_store(bench: Bench) -> None:
    job, _ = await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "job:u1", "rev", "500000000000000")
    assert "job:u1" in await refused("recovering", bench.propose(job, "n1", "n3"))


async def test_a_node_that_is_missing_holds_what_it_ran(bench: Bench) -> None:
    """That its record is gone is no proof that its workers are."""
    job, view = await trained(bench)
    await bench.take("node:n2")
    assert "node:n2" in await refused("recovering", bench.propose(job, "n1"))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    job = await bench.propose((await read_after(bench)).jobs["u1"], "n1")
    assert set(generation(job).holders) == {"n1", "n2"}


GHOST = '{"node":"x","life":"x","devices":["cpu0"],"group_rank":5,"first_rank":9,"workers":1}'


async def written(bench: Bench, field: str, text: str) -> None:
    """Somebody writes one field of the job, and leaves its revision; nothing: removes it."""
    async with bench.calls.link() as link:
        key = bench.calls.prefix + "job:u1"
        await (link.ask("HSET", key, field, text) if text else link.ask("HDEL", key, field))


@pytest.mark.parametrize("kind", ["holder", "member"])
@pytest.mark.parametrize("how", ["propose", "end"])
async def test_a_holder_that_no_step_has_made_holds_no_generation_up(bench: Bench, kind: str, how: str) -> None:
    """There is no such node: nobody would ever let go, and each later generation waited for it."""
    job, view = await trained(bench)
    await written(bench, f"{kind}:x", GHOST)
    step = bench.propose(job, "n1", "n3") if how == "propose" else bench.end(job, "holding")
    assert "node:x" in await refused("recovering", step)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert after.jobs["u1"] == job, "nothing was changed"
    job = await bench.propose(job, "n1", "n3")
    assert set(generation(job).holders) == {"n1", "n2"}
    assert (await bench.kinds()).count("StoreDamaged") == 1


async def test_nor_does_one_that_all_have_read(bench: Bench) -> None:
    """They give it back with the job; it is known by then that there is no such node."""
    job, _ = await trained(bench)
    await written(bench, "holder:x", GHOST)
    view = await read(bench)
    assert "node:x" in await refused("recovering", bench.propose(job, "n1"))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    assert "x" in generation((await read_after(bench)).jobs["u1"]).holders
    assert set(generation(await bench.propose(job, "n1")).holders) == {"n1", "n2"}


@pytest.mark.parametrize(("field", "text"), [("phase", "failed"), ("phase", "paused"), ("member:n1", "")])
async def test_each_look_at_an_own_job_finds_what_says_something_else(bench: Bench, field: str, text: str) -> None:
    job, view = await trained(bench)
    reply = view.reply
    for _ in range(20):
        await bench.beat("n1", rev=reply.rev, era=reply.era, own=job)
    await written(bench, field, text)
    looks = [reported(bench.beat("n1", rev=reply.rev, era=reply.era, own=job)) for _ in range(2)]
    assert any("job:u1" in refusal for refusal in [await look for look in looks])


UNSEEN = {
    "max": "0", "min": "9", "array": "x", "at_once": "1", "control": '{"rev":99,"target":3,"restart":0}',
    "active_id": "x", "checkpoint": '{"name":"evil","step":9,"number":999999,"order":1}',
    "not_before": "99999999999", "owner": "1",
}  # fmt: skip


@pytest.mark.parametrize("field", UNSEEN)
async def test_each_eighth_beat_finds_a_field_that_somebody_wrote_over(bench: Bench, field: str) -> None:
    job, view = await trained(bench)
    reply, refusals = view.reply, list[str]()
    await written(bench, field, UNSEEN[field])
    for _ in range(8):
        refusals.append(await reported(bench.beat("n1", rev=reply.rev, era=reply.era, own=job)))
    assert sum("job:u1" in refusal for refusal in refusals) == 1
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    assert (await read_after(bench)).jobs["u1"] == job
    assert not await bench.store.differs(job, (await bench.beat("n1")).era)


@pytest.mark.parametrize("field", [*UNSEEN, "phase", "holder:x", "report:n1", "spec", "since"])
async def test_who_asks_finds_out_that_a_record_is_another_one(bench: Bench, field: str) -> None:
    job, view = await trained(bench)
    era = view.reply.era
    assert not await bench.store.differs(job, era)
    await written(bench, field, {**UNSEEN, "phase": "failed", "holder:x": GHOST, "report:n1": "0 succeeded {}",
                                 "spec": "{}", "since": "99"}[field])  # fmt: skip
    assert await bench.store.differs(job, era)
    assert not await bench.store.differs(job, "another"), "of a view of another era nothing is known"


async def test_a_record_that_a_step_has_changed_is_no_other_one(bench: Bench) -> None:
    """Whoever lost a race may ask at any time."""
    job, view = await trained(bench)
    newer = await bench.report(job, "n2", "failed", "exit 1")
    for one in (job, newer):
        assert not await bench.store.differs(one, view.reply.era)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "job:u1", "phase", "failed")
    assert not await bench.store.differs(job, view.reply.era), "there is a newer one"
    assert await bench.store.differs(newer, view.reply.era)


@pytest.mark.parametrize("text", ["life evil", "left 1", "lost 1"])
async def test_a_nodes_record_with_a_later_revision_is_believed_no_more(bench: Bench, text: str) -> None:
    """Its copy is of another revision then, and that counted as agreement: its workers ended, and the job failed."""
    job, view = await trained(bench)
    async with bench.calls.link() as link:
        rev = await link.ask("HGET", bench.calls.prefix + "meta", "rev")
        await link.ask("HSET", bench.calls.prefix + "node:n2", *text.split(), "rev", rev)
    assert "node:n2" in await refused("recovering", bench.propose(job, "n1", lost=("n2",)))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert (after.nodes["n2"].incarnation, after.reply.lapsed) == (bench.lives["n2"], ())
    assert (after.jobs["u1"].phase, (await bench.kinds()).count("StoreDamaged")) == ("running", 1)


@pytest.mark.parametrize("text", ["life evil", "left 1", "lost 1"])
async def test_a_lease_process_does_not_end_by_a_record_with_a_later_revision(bench: Bench, text: str) -> None:
    await trained(bench)
    async with bench.calls.link() as link:
        rev = await link.ask("HGET", bench.calls.prefix + "meta", "rev")
        await link.ask("HSET", bench.calls.prefix + "node:n2", *text.split(), "rev", rev)
    assert "node:n2" in await refused("behind", bench.renew("n2"))


@pytest.mark.parametrize("place", [1, 2000])
async def test_a_mark_of_a_removal_beside_the_record_is_damage(bench: Bench, place: int) -> None:
    """Who read everything anew took the job for removed: its workers ended, and after a recovery nobody knew of it.
    ``place``: a revision before the job's last change, or one that the store comes to."""
    job, view = await trained(bench)
    async with bench.calls.link() as link:
        rev = await link.ask("HINCRBY", bench.calls.prefix + "meta", "rev", str(place // 1000))
        await link.ask("ZADD", bench.calls.prefix + "changes", str(min(place, rev)), "gone:job:u1")
    assert "changes" in await refused("behind", bench.beat("n2"))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert (after.jobs["u1"], after.reply.gone) == (job, ())
    assert (await bench.kinds()).count("StoreDamaged") == 1


async def test_the_copies_of_nodes_may_be_gone(bench: Bench) -> None:
    """A node that has left is damaged once a step asks; nobody waits for it."""
    await trained(bench)
    await bench.leave("n2", "off")
    view = await read(bench)
    await bench.take("nodes")
    assert "node:n2" in await refused("recovering", bench.propose(view.jobs["u1"], "n1", lost=("n2",)))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n3")
    after = await read_after(bench)
    job = await bench.propose(after.jobs["u1"], "n1", lost=("n2",))
    assert set(generation(job).holders) == {"n1"}


async def test_a_lease_that_is_missing_is_no_proof_of_silence(bench: Bench) -> None:
    job, _ = await trained(bench)
    await bench.take("lease")
    assert "holds its lease" in await refused("stale", bench.propose(job, "n1", lost=("n2",)))


@pytest.mark.parametrize("end", [0, 1])
async def test_an_earlier_end_of_a_lease_is_no_proof_of_silence(bench: Bench, end: int) -> None:
    """Written over by hand: the node's workers run on, and another generation could start beside them."""
    job, view = await trained(bench)
    await bench.beat("n1", rev=view.reply.rev, era=view.reply.era)
    async with bench.calls.link() as link:
        served = int(await link.ask("HGET", bench.calls.prefix + "meta", "served"))
        await link.ask("ZADD", bench.calls.prefix + "lease", str(end * served), "n2")
    assert "holds its lease" in await refused("stale", bench.propose(job, "n1", lost=("n2",)))
    assert "lease" in await noticed(bench, view, 1)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert (after.reply.lapsed, after.jobs["u1"].phase) == ((), "running")
    assert (await bench.kinds()).count("StoreDamaged") == 1
    await bench.beat("n1", rev=after.reply.rev, era=after.reply.era)


async def test_a_removed_job_stays_removed(bench: Bench) -> None:
    """A step did it, and left its mark."""
    await bench.up("n1", "n2")
    job = await bench.submit()
    await bench.end(job, "stopped")
    await bench.store.remove("u1")
    reply = await bench.beat("n1")
    assert reply.gone == ("job:u1",)
    for _ in range(10):
        reply = await bench.beat("n1", rev=reply.rev, era=reply.era, runs=("u1",))
    assert not reply.recovering
    assert (await bench.submit("u2")).phase == "queued"
    assert "StoreDamaged" not in await bench.kinds()


async def test_a_record_that_its_members_cannot_read_is_given_back(bench: Bench) -> None:
    job, view = await trained(bench)
    reply = view.reply
    await refused("behind", bench.beat("n1", rev=reply.rev, era=reply.era, runs=("u1",), damaged=("job:u1",)))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2")
    assert (await read_after(bench)).jobs["u1"] == job


async def test_what_nobody_knows_any_more_is_gone_and_asked_for_once(bench: Bench) -> None:
    _, view = await trained(bench)
    await bench.take("job:u1")
    await noticed(bench, view)
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert after.jobs == {}
    for _ in range(10):
        await bench.beat("n2", rev=after.reply.rev, era=after.reply.era)
    assert (await bench.kinds()).count("StoreDamaged") == 1


async def test_of_two_jobs_of_a_name_the_one_that_ran_stays(bench: Bench) -> None:
    job, view = await trained(bench)
    await bench.take("job:u1")
    await bench.take("names")
    await bench.take("changes")
    await bench.submit("u2")
    await noticed(bench, view)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2")
    after = await read_after(bench)
    assert set(after.jobs) == {"u1"}
    assert after.jobs["u1"].generation == job.generation


async def test_a_recovery_that_nobody_came_to_counts_no_record_as_removed(bench: Bench) -> None:
    """The store was overloaded meanwhile: the first who came found that a job which ran had been removed."""
    job, view = await trained(bench)
    await bench.take("job:u1")
    await noticed(bench, view)
    async with asyncio.timeout(30):
        while await reported(bench.submit("u9", "other")):  # nothing is decided meanwhile
            await bench.sleep(0.05)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert set(after.jobs) == {"u1", "u9"}
    assert after.jobs["u1"].model_copy(update={"rev": 0}) == job.model_copy(update={"rev": 0})


async def test_who_reads_everything_anew_reads_no_part_for_the_whole(bench: Bench) -> None:
    """What it had read would have been the newest view, in which the job is not."""
    await trained(bench)
    await bench.take("changes")
    await bench.join("n3", start=2)
    assert "changes" in await refused("behind", bench.beat("n3"))


async def test_a_name_that_a_lost_job_left_is_no_damage_for_ever(bench: Bench) -> None:
    """Of a job that nobody knows any more, once the mark of its removal is gone, too."""
    await trained(bench)
    async with bench.calls.link() as link:
        await link.ask(
            "HSET", bench.calls.prefix + "names", *(word for n in range(9) for word in (f"old{n}", f"uid{n}"))
        )
    await bench.join("n3", start=2)
    reply = await bench.beat("n3")
    assert ({job.uid for job in reply.jobs}, len(reply.nodes)) == ({"u1"}, 3)
    assert "StoreDamaged" not in await bench.kinds()


@pytest.mark.parametrize("key", ["node:n2", "lease"])
async def test_a_key_of_another_type_does_not_outlive_a_restart_of_the_store(bench: Bench, key: str) -> None:
    """Each step began with looking at it, also the one that looks for damage: no step was done ever again."""
    _, view = await trained(bench)
    await bench.join("n3", regroup=200)
    await bench.spoil(key)
    await bench.restart()
    for _ in range(6):  # as agents do: they offer what they know, and join again
        try:
            await bench.store.restore(view.offer())
            await rejoin(bench, "n1", "n2", "n3")
            break
        except StoreUnavailableError:
            await bench.sleep(1.1)  # the store looks at itself once a second
        except StoreRefusedError as refusal:
            assert refusal.code == "behind"
    else:
        raise AssertionError("no step is done any more")
    assert set((await read_after(bench)).jobs) == {"u1"}


@pytest.mark.parametrize("floor", [0, 2])
async def test_leases_of_nodes_that_never_were_are_named_to_nobody_and_removed(bench: Bench, floor: int) -> None:
    """Whoever can write to the store can invent as many as they like, again and again: a beat brought each agent all
    their names, or a recovery began. ``floor``: before that moment no lease ended when a beat last counted them."""
    bench.timing = LASTING
    await bench.up("n1", "n2", "n3")
    await bench.active(await bench.submit(), "n1", "n2")
    view = await bench.beat("n1")
    lease, meta = f"{bench.calls.prefix}lease", f"{bench.calls.prefix}meta"
    for turn in range(4):
        async with bench.calls.link() as link:
            await link.ask("ZADD", lease, *(word for i in range(2500) for word in (0, f"x{turn}-{i}")))
            await link.ask("HSET", meta, "floor", floor, "floored", 0)
        await bench.join("n4")
        for node in ("n1", "n2", "n3"):
            reply = await bench.beat(node, rev=view.rev, era=view.era)
            assert (reply.lapsed, reply.sheltered, reply.era) == ((), (), view.era)
    async with bench.calls.link() as link:
        assert sorted(await link.ask("ZRANGE", lease, 0, -1)) == ["n1", "n2", "n3", "n4"]
    await bench.usual_time_passes()  # else nobody lapses yet
    await bench.lapse("n3", "n1")
    lapsed = (await bench.beat("n1", rev=view.rev, era=view.era)).lapsed
    assert {*lapsed} - {"n4"} == {"n3"}, "who is silent in earnest is found"
    assert "StoreDamaged" not in await bench.kinds()


HUGE = 5 * 1024**2
"""Characters: more than any step writes into one field."""


@pytest.mark.parametrize("field", ["timing", "parent", "cluster_uid", "event", "run"])
async def test_a_text_of_meta_that_is_longer_than_any_is_damage(bench: Bench, field: str) -> None:
    """Every step read it, for as long as it was there."""
    job, view = await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "meta", field, "7" * HUGE)
    await noticed(bench, view)
    async with bench.calls.link() as link:
        assert await link.ask("HSTRLEN", bench.calls.prefix + "meta", field) < HUGE
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    assert (await read_after(bench)).jobs["u1"] == job


async def test_a_cordon_that_is_longer_than_any_keeps_the_node_out_and_is_read_by_nobody(bench: Bench) -> None:
    job, view = await trained(bench)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "cordons", "n3", "x" * HUGE, "n9", "y")
    why = await refused("not_live", bench.propose(job, "n1", "n3", read=view.reply.rev))
    assert why == f"node n3 is cordoned: somebody wrote one of {HUGE} bytes"
    reply = await bench.beat("n1", rev=view.reply.rev, era=view.reply.era)
    assert [unread.key for unread in reply.unread] == ["node:n3"]
    assert generation(await bench.propose(job, "n1", "n2")).number == 2, "others' cordons concern nobody"


@pytest.mark.parametrize("names", [{"x": "u" * 65}, {f"x{i}": "u" for i in range(65536)}], ids=["long", "many"])
async def test_names_that_no_job_can_have_are_removed_once_a_newcomer_meets_them(
    bench: Bench, names: dict[str, str]
) -> None:
    """Each of them read all of the names, with each beat until it had read everything."""
    job, view = await trained(bench)
    key = bench.calls.prefix + "names"
    async with bench.calls.link() as link:
        flat = [word for name, uid in names.items() for word in (name, uid)]
        for start in range(0, len(flat), 4000):
            await link.ask("HSET", key, *flat[start : start + 4000])
    assert "names" in await refused("behind", bench.beat("n2"))
    async with bench.calls.link() as link:
        assert await link.ask("HGETALL", key) == ["train", "u1"]
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    after = await read_after(bench)
    assert after.jobs["u1"] == job
    await refused("name_taken", bench.submit("u2"))


class Reads:
    """Which keys are read whole, on a server in this process; and how often the newest entry of a stream is."""

    def __init__(self) -> None:
        clock = [1_000_000.0]
        self.bench = HereBench(Server(lambda: clock[0]), clock)
        self.data, self.whole, self.newest = self.bench.server.data, list[str](), 0
        for name in ("HGETALL", "HVALS", "HKEYS"):
            self.data.watch(name, partial(self._whole, getattr(Data, name.lower())))
        self.data.watch("XREVRANGE", self._newest)

    def _whole(self, real: Callable[[Data, Word], Any], key: Word) -> Any:
        self.whole.append(str(key).rpartition("}:")[2])
        return real(self.data, key)

    def _newest(self, *words: Word) -> Any:
        self.newest += 1
        return Data.xrevrange(self.data, *words)


async def test_no_step_reads_all_of_what_anybody_can_add_to() -> None:
    reads = Reads()
    bench = reads.bench
    job, view = await trained(bench)
    await bench.store.cordon("n3", Cordon(reason="disk", by="ann", at=1.0), "ann", "c1")
    reads.data.hset(bench.calls.prefix + "meta", "junk", "x")
    reads.whole.clear()
    reads.newest = 0
    reply = view.reply
    for _ in range(9):
        reply = await bench.beat("n1", rev=reply.rev, era=reply.era, runs=("u1",))
    await bench.propose(job, "n1", "n2")
    await bench.submit("u2", "other")
    assert {"meta", "cordons", "names"}.isdisjoint(reads.whole)
    assert reads.newest == 0


async def test_the_newest_event_is_looked_for_once_where_nobody_has_noted_it() -> None:
    """The stream may begin with an entry of any length."""
    reads = Reads()
    bench = reads.bench
    _, view = await trained(bench)
    reads.data.hdel(bench.calls.prefix + "meta", "event")
    reads.newest, reply = 0, view.reply
    for _ in range(9):
        reply = await bench.beat("n1", rev=reply.rev, era=reply.era, runs=("u1",))
        assert reply.event == view.reply.event
    assert reads.newest == 1
