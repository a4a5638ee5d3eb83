"""What is on the disks of nodes: how it is told and waited for, and what a store takes that is restored from disks
alone."""

from __future__ import annotations

import asyncio

from nodeagent.model.node import Cordon
from nodeagent.store.messages import Restored, Saved
from tests.contract.bench import BOUND, FAST, LASTING, Bench, generation, refused
from tests.contract.test_restore import View, read, read_after, rejoin

LONG_WAIT = 60_000
NODES = ("n1", "n2")


async def test_what_a_node_saved_is_reported_and_raises_no_revision(bench: Bench) -> None:
    await bench.up("n1", "n2")
    assert (await bench.store.saved("", 0.01, NODES)).nodes == {}
    before = await bench.beat("n1")
    after = await bench.beat("n2", saved=Saved(era="x", rev=3), rev=before.rev)
    assert (after.rev, after.nodes) == (before.rev, ())
    assert (await bench.store.saved("", 0.01, NODES)).nodes == {"n2": Saved(era="x", rev=3)}
    await bench.beat("n2")
    kept = await bench.store.saved("", 0.01, NODES)
    assert kept.nodes == {"n2": Saved(era="x", rev=3)}, "a beat without it keeps it"


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
    at = (await bench.store.saved("", 0.01, NODES)).at
    waiting = asyncio.ensure_future(bench.store.saved(at, BOUND, NODES))
    await bench.beat("n1", saved=Saved(era="x", rev=job.rev - 1))
    await asyncio.sleep(0.05)
    assert not waiting.done(), "an older one wakes nobody"
    await bench.beat("n1", saved=Saved(era="x", rev=job.rev))
    reported = await asyncio.wait_for(waiting, BOUND)
    assert reported.nodes == {"n1": Saved(era="x", rev=job.rev)}
    assert reported.at != at
    await bench.beat("n1", saved=Saved(era="x", rev=job.rev + 5))
    assert (await bench.store.saved(reported.at, 0.05, NODES)).at == reported.at, "nobody asked for that"


async def test_promised_numbers_are_never_given_again(bench: Bench) -> None:
    await bench.up("n1")
    await bench.active(await bench.submit(), "n1")
    view = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(view.offer(numbers={"train": 7}))
    await rejoin(bench, "n1")
    job = (await read_after(bench)).jobs["u1"]
    assert generation(await bench.propose(job, "n1")).number == 8


async def left(bench: Bench) -> float:
    """Served seconds until the recovery ends at the latest."""
    return (await bench.beat("watch")).recovers / 1000


async def returns(bench: Bench, view: View, node: str, **more: object) -> Restored:
    """As agents do: it says what it knows, and joins."""
    done = await bench.store.restore(view.offer(by=node, regroup=LONG_WAIT, **more))
    await bench.join(node)
    return done


async def lost(bench: Bench) -> None:
    """The store has lost everything. Someone is there to look who knows nothing of it, and is waited for by nobody."""
    await bench.put_back(None)
    await bench.join("watch")


USUAL = FAST.credit + FAST.lease
LASTS = LASTING.credit + LASTING.lease


async def test_a_store_that_lost_writes_waits_for_all_that_were_live(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1", "n2", "n3")
    view = await read(bench)
    await lost(bench)
    everybody = ("n1", "n2", "n3")
    done = await returns(bench, view, "n1", awaited=everybody)
    assert done.recovering
    assert await left(bench) > LASTS
    assert (await bench.beat("n1")).awaited == ("n2", "n3")
    text = await refused("recovering", bench.submit("u9", "late"))
    assert "waits for nodes that may know it: n2, n3;" in text
    await returns(bench, view, "n2", awaited=everybody)
    await returns(bench, view, "n2", awaited=everybody)  # was heard before
    assert await left(bench) > LASTS
    await returns(bench, view, "n3", awaited=everybody)
    reply = await bench.beat("n1")
    assert (reply.recovering, reply.awaited, await left(bench) <= LASTS) == (True, (), True)
    await bench.beat("n1")
    await bench.usual_time_passes()
    assert {"n1", "n2", "n3"} <= set((await read_after(bench)).nodes)


async def test_all_that_come_in_time_cost_no_time(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1", "n2")
    view = await read(bench)
    await lost(bench)
    await returns(bench, view, "n1", awaited=("n1", "n2"))
    await bench.sleep(LASTING.credit)
    await returns(bench, view, "n2", awaited=("n1", "n2"))
    assert 0 < await left(bench) <= LASTS - LASTING.credit


async def test_who_comes_after_the_usual_time_ends_the_wait_at_once_and_nobody_lapses(bench: Bench) -> None:
    await bench.up("n1", "n2")
    view = await read(bench)
    await lost(bench)
    await returns(bench, view, "n1", awaited=("n1", "n2"))
    await bench.pass_served(round(1000 * USUAL) + 50, "watch")
    assert (await bench.beat("n1")).recovering
    await bench.store.restore(view.offer(by="n2", regroup=LONG_WAIT, awaited=("n1", "n2")))
    assert (await bench.beat("n1")).recovering, "what it knows may come in pages"
    await bench.join("n2")
    reply = await bench.beat("n1")
    assert (reply.recovering, reply.lapsed) == (False, ())


async def test_a_silent_node_is_waited_for_within_the_bound(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1", "n2")
    view = await read(bench)
    await lost(bench)
    await bench.store.restore(view.offer(regroup=LONG_WAIT, awaited=("n1", "n2")))
    await rejoin(bench, "n1")
    await bench.usual_time_passes()
    assert (await bench.beat("watch")).awaited == ("n2",)
    await bench.age(LONG_WAIT)
    after = await read_after(bench)
    assert (after.reply.awaited, after.reply.lapsed) == ((), ("n2",))


async def test_a_newer_view_says_who_is_waited_for(bench: Bench) -> None:
    await bench.up("n1", "n2")
    old = await read(bench)
    await bench.submit()
    new = await read(bench)
    await lost(bench)
    await returns(bench, old, "n1", awaited=("n1", "n2", "n4"))
    await returns(bench, new, "n2", awaited=("n2", "n3"))
    assert (await bench.beat("n1")).awaited == ("n3",)
    await returns(bench, old, "n3", awaited=("n4",))
    assert await left(bench) <= USUAL
    await bench.beat("n1")
    assert set((await read_after(bench)).jobs) == {"u1"}


async def test_a_newer_view_counts_when_all_of_it_is_there(bench: Bench) -> None:
    await bench.up("n1")
    old = await read(bench)
    await bench.submit()
    new = await read(bench)
    await lost(bench)
    await returns(bench, old, "n1", awaited=("n1",))
    await bench.store.restore(new.offer(regroup=LONG_WAIT, awaited=("n1",), jobs=(), nodes=(), uids=None))
    assert (await bench.beat("watch")).awaited == ("n1",), "it was heard with its older view only"
    await returns(bench, new, "n1", awaited=("n1",))
    assert await left(bench) <= USUAL


async def test_an_agent_that_knows_nothing_any_more_is_not_waited_for(bench: Bench) -> None:
    """Its machine has booted, without its disk: it may not join yet, and has nothing to say."""
    await bench.up("n1", "n2")
    view = await read(bench)
    await lost(bench)
    await returns(bench, view, "n1", awaited=("n1", "n2"))
    await refused("recovering", bench.join("n2", life="another"))
    assert await left(bench) <= USUAL


async def test_a_restart_meanwhile_asks_all_of_them_again(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    view = await read(bench)
    await lost(bench)
    everybody = ("n1", "n2", "n3")
    await returns(bench, view, "n1", awaited=everybody)
    await returns(bench, view, "n2", awaited=everybody)
    await bench.restart()
    reply = await bench.beat("watch")
    assert (reply.awaited, reply.recovers > 1000 * USUAL) == (everybody, True)
    for node in everybody:
        await returns(bench, view, node, awaited=everybody)
    assert await left(bench) <= USUAL


async def test_a_store_that_went_back_waits_for_those_who_may_know_more(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1", "n2")
    kept = await bench.keep()
    old = await read(bench, "n2")
    await bench.submit()
    new = await read(bench)
    await bench.put_back(kept)
    await bench.beat("n2", era=old.reply.era, rev=old.reply.rev)
    assert (await bench.beat("n2", era=old.reply.era, rev=old.reply.rev)).awaited == (), "nobody knows of a loss yet"
    await returns(bench, new, "n1", awaited=("n1", "n2"))
    reply = await bench.beat("n1")
    assert (reply.awaited, reply.recovers > 1000 * LASTS) == (("n2",), True)
    await returns(bench, old, "n2", awaited=("n1", "n2"))
    assert (await bench.beat("n1")).recovers <= 1000 * LASTS


async def test_one_node_alone_waits_for_nobody(bench: Bench) -> None:
    await bench.up("n1")
    view = await read(bench)
    await lost(bench)
    await returns(bench, view, "n1", awaited=("n1",))
    assert await left(bench) <= USUAL


async def test_an_old_copy_that_comes_first_brings_no_removed_job_back(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.submit()
    old = await read(bench)
    job = old.jobs["u1"]
    await bench.end(job, "stopped")
    await bench.store.remove("u1")
    new = await read(bench)
    await bench.put_back(None)
    await returns(bench, old, "n1", awaited=("n1", "n2"))
    await returns(bench, new, "n2", awaited=("n1", "n2"))
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
