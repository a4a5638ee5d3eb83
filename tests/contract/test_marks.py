"""Marks of removals are bounded; whoever may have missed one reads everything anew."""

from __future__ import annotations

from nodeagent.store.messages import BeatReply
from tests.contract.bench import Bench, refused

KEPT, EACH = 1024, 64


async def remove(bench: Bench, uid: str) -> None:
    job = await bench.submit(uid, uid)
    await bench.end(job, "stopped")
    await bench.store.remove(uid)


async def marks(bench: Bench) -> list[str]:
    async with bench.calls.link() as link:
        listed = await link.ask("ZRANGE", bench.calls.prefix + "changes", 0, -1)
    return [record for record in listed if str(record).startswith("gone:")]


async def removed_before(bench: Bench, count: int) -> None:
    """As ``count`` removals leave the store, the last of which is just not the one that looks for old marks."""
    prefix = bench.calls.prefix
    async with bench.calls.link() as link:
        rev = int(await link.ask("HINCRBY", prefix + "meta", "rev", count))
        for i in range(count):
            await link.ask("ZADD", prefix + "changes", rev - count + 1 + i, f"gone:job:old{i}")
        await link.ask("HSET", prefix + "meta", "buried", EACH - 1)


async def test_only_the_newest_marks_are_kept(bench: Bench) -> None:
    await bench.up("n1")
    await removed_before(bench, KEPT + 100)
    await remove(bench, "u1")
    kept = await marks(bench)
    assert (len(kept), kept[0], kept[-1]) == (KEPT + 1, "gone:job:old100", "gone:job:u1")
    await remove(bench, "u2")
    assert len(await marks(bench)) == KEPT + 2, "they are looked for now and then"


async def test_who_may_have_missed_a_mark_reads_everything_anew(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.submit("u1", "a")
    old = await bench.beat("n2")
    assert [job.uid for job in old.jobs] == ["u1"]
    await bench.end(old.jobs[0], "stopped")
    await bench.store.remove("u1")
    await removed_before(bench, KEPT + 100)
    just = await bench.beat("n1", rev=old.rev, era=old.era)
    while just.more:
        just = await bench.beat("n1", rev=just.rev, era=just.era)
    await remove(bench, "u2")
    assert "gone:job:u1" not in await marks(bench)
    await refused("behind", bench.beat("n2", rev=old.rev, era=old.era))
    assert (await bench.beat("n1", rev=just.rev, era=just.era)).gone == ("job:u2",)
    assert not (await bench.beat("n2")).jobs


async def test_who_reads_everything_is_not_too_old_for_its_first_pages(bench: Bench) -> None:
    """Records that nobody has changed for long have lower revisions than the oldest mark."""
    await bench.up("n1")
    for i in range(300):
        await bench.submit(f"u{i}", f"a{i}")
    await removed_before(bench, KEPT + 100)
    await remove(bench, "gone")
    read: list[BeatReply] = [await bench.beat("n1")]
    while read[-1].more:
        assert len(read) < 20
        read.append(await bench.beat("n1", rev=read[-1].rev, era=read[-1].era))
    assert len(read) > 2
    assert {job.uid for reply in read for job in reply.jobs} == {f"u{i}" for i in range(300)}
