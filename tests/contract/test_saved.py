"""What is on the disks of nodes: how it is told and waited for, and what a store takes that is restored from disks
alone."""

from __future__ import annotations

import asyncio

from nodeagent.model.node import Cordon
from nodeagent.model.timing import millis
from nodeagent.store.messages import Saved
from tests.contract.bench import BOUND, FAST, Bench, head, refused
from tests.contract.test_restore import View, read, read_after, rejoin

LONG_WAIT = 60_000


async def test_what_a_node_saved_is_told_and_raises_no_revision(bench: Bench) -> None:
    await bench.up("n1", "n2")
    assert (await bench.store.saved("", 0.01)).nodes == {}
    before = await bench.beat("n1")
    after = await bench.beat("n2", saved=Saved(era="x", rev=3), rev=before.rev)
    assert (after.rev, after.nodes) == (before.rev, ())
    assert (await bench.store.saved("", 0.01)).nodes == {"n2": Saved(era="x", rev=3)}
    await bench.beat("n2")
    assert (await bench.store.saved("", 0.01)).nodes == {"n2": Saved(era="x", rev=3)}, "a beat without it keeps it"


async def test_what_operators_write_is_asked_for(bench: Bench) -> None:
    await bench.up("n1")
    assert (await bench.beat("n1")).asked == 0
    job = await bench.submit()
    assert (await bench.beat("n1")).asked == job.rev
    again = await bench.submit()
    assert (again.rev, (await bench.beat("n1")).asked) == (job.rev, job.rev)
    await bench.propose(job, "n1")
    assert (await bench.beat("n1")).asked == job.rev, "what agents do nobody waits for"
    node = await bench.store.cordon("n1", Cordon(reason="fan", by="ann", at=1.5), "c1")
    assert (await bench.beat("n1")).asked == node.rev


async def test_the_first_save_that_covers_what_was_asked_wakes(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.submit()
    at = (await bench.store.saved("", 0.01)).at
    waiting = asyncio.ensure_future(bench.store.saved(at, BOUND))
    await bench.beat("n1", saved=Saved(era="x", rev=job.rev - 1))
    await asyncio.sleep(0.05)
    assert not waiting.done(), "an older one wakes nobody"
    await bench.beat("n1", saved=Saved(era="x", rev=job.rev))
    told = await asyncio.wait_for(waiting, BOUND)
    assert told.nodes == {"n1": Saved(era="x", rev=job.rev)}
    assert told.at != at
    await bench.beat("n1", saved=Saved(era="x", rev=job.rev + 5))
    assert (await bench.store.saved(told.at, 0.05)).at == told.at, "nobody asked for that"


async def test_promised_numbers_are_never_given_again(bench: Bench) -> None:
    await bench.up("n1")
    await bench.active(await bench.submit(), "n1")
    view = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(view.offer(numbers={"train": 7}))
    await rejoin(bench, "n1")
    job = (await read_after(bench)).jobs["u1"]
    assert head(await bench.propose(job, "n1")).number == 8


async def left(bench: Bench, view: View, **more: object) -> bool:
    """After an offer: whether the recovery is longer than one from memory."""
    done = await bench.store.restore(view.offer(**more))
    assert done.recovering
    await bench.sleep(FAST.credit)
    usual = millis(FAST.credit + FAST.lease)
    text = await refused("recovering", bench.submit("u9", "late"))
    seconds = float(text.partition("for another ")[2].partition(" s")[0])
    return seconds * 1000 > usual


async def test_a_store_restored_from_disks_waits_for_all_that_were_live(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    view = await read(bench)
    await bench.put_back(None)
    disk = {"regroup": LONG_WAIT, "awaited": ("n1", "n2", "n3")}
    assert await left(bench, view, **disk)
    assert await left(bench, view, **disk, by="n2")
    assert await left(bench, view, **disk, by="n2"), "it was heard before"
    assert not await left(bench, view, **disk, by="n3")
    await rejoin(bench, "n1")
    assert set((await read_after(bench)).nodes) == {"n1", "n2", "n3"}


async def test_a_newer_view_says_who_is_waited_for(bench: Bench) -> None:
    await bench.up("n1", "n2")
    old = await read(bench)
    await bench.submit()
    new = await read(bench)
    await bench.put_back(None)
    assert await left(bench, old, regroup=LONG_WAIT, awaited=("n1", "n2"))
    assert await left(bench, new, regroup=LONG_WAIT, awaited=("n2", "n3"), by="n2"), "n3 is not there"
    assert not await left(bench, old, regroup=LONG_WAIT, awaited=("n3",), by="n3")
    await rejoin(bench, "n1")
    assert set((await read_after(bench)).jobs) == {"u1"}


async def test_a_newer_view_from_memory_ends_the_wait(bench: Bench) -> None:
    await bench.up("n1", "n2")
    old = await read(bench)
    await bench.submit()
    new = await read(bench)
    await bench.put_back(None)
    assert await left(bench, old, regroup=LONG_WAIT, awaited=("n1", "n2"))
    assert not await left(bench, new, by="n2")


async def test_one_node_alone_waits_for_nobody(bench: Bench) -> None:
    await bench.up("n1")
    view = await read(bench)
    await bench.put_back(None)
    assert not await left(bench, view, regroup=LONG_WAIT, awaited=("n1",))


async def test_an_old_copy_that_comes_first_brings_no_removed_job_back(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.submit()
    old = await read(bench)
    job = old.jobs["u1"]
    await bench.end(job, "stopped")
    await bench.store.remove("u1")
    new = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(old.offer(regroup=LONG_WAIT, awaited=("n1", "n2")))
    await bench.store.restore(new.offer(regroup=LONG_WAIT, awaited=("n1", "n2"), by="n2"))
    await rejoin(bench, "n1")
    assert (await read_after(bench)).jobs == {}


async def test_a_late_copy_brings_back_nothing_that_was_removed_here(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.submit()
    kept = await bench.keep()
    await bench.propose(job, "n1")
    late = await read(bench)
    await bench.put_back(kept)
    await bench.recovered("n1")
    await bench.end((await read(bench)).jobs["u1"], "stopped")
    await bench.store.remove("u1")
    done = await bench.store.restore(late.offer(regroup=LONG_WAIT, awaited=("n1", "n2")))
    assert (done.recovering, done.known < late.jobs["u1"].rev) == (False, True)
    assert (await read(bench)).jobs == {}
