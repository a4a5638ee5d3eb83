"""Commits of checkpoints: only the newest generation that was active moves the pointer, and only forward."""

from __future__ import annotations

from nodeagent.model.job import Checkpoint, JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.world import Token
from tests.contract.bench import LASTING, Bench, generation, refused
from tests.contract.test_restore import read, read_after, rejoin


async def commit(
    bench: Bench, job: JobRecord, node: str, name: str, *, order: int, step: int = 10, token: Token | None = None
) -> JobRecord:
    assert job.active is not None
    return await bench.store.commit(job.uid, token or job.active, node, bench.lives[node], name, step, order)


async def test_the_pointer_moves_and_everybody_reads_it(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    assert job.checkpoint is None
    first = await commit(bench, job, "n1", "a", order=1, step=100)
    assert first.checkpoint == Checkpoint(name="a", step=100, number=generation(job).number, order=1)
    assert first.rev > job.rev
    assert await commit(bench, job, "n1", "a", order=1, step=100) == first, "sent again"
    second = await commit(bench, job, "n1", "b", order=2, step=50)
    assert second.checkpoint == Checkpoint(name="b", step=50, number=generation(job).number, order=2)
    assert await bench.job() == second


async def test_one_that_comes_late_does_not_turn_it_back(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    newest = await commit(bench, job, "n1", "b", order=2)
    assert "b of job train was committed after a" in await refused("stale", commit(bench, job, "n1", "a", order=1))
    await refused("stale", commit(bench, job, "n1", "c", order=2))
    assert await bench.job() == newest


async def test_the_newest_is_put_back_where_somebody_wrote_another_one(bench: Bench) -> None:
    """A member or not: all members may have started anew. It is no commit: nothing else changes by it."""
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1")
    newest = (await commit(bench, job, "n1", "b", order=2)).checkpoint
    held = (await bench.job()).held
    assert newest is not None and job.active is not None
    older, evil = (newest.model_copy(update={"order": n, "name": f"x{n}", "signature": ""}) for n in (1, 9))
    for wrong in (older, evil, newest.model_copy(update={"order": 7}), None):
        async with bench.calls.link() as link:
            key = bench.calls.prefix + "job:u1"
            text = wrong and wrong.model_dump_json(exclude={"signature"})
            await (link.ask("HSET", key, "checkpoint", text) if text else link.ask("HDEL", key, "checkpoint"))
        if wrong == evil:
            await refused("stale", commit(bench, job, "n1", "c", order=3))
            await refused("stale", bench.store.put_back("u1", job.active, "n2", bench.lives["n2"], newest, older))
        back = await bench.store.put_back("u1", job.active, "n2", bench.lives["n2"], newest, wrong)
        assert (back.checkpoint, back.held) == (newest, held)
        again = await bench.store.put_back("u1", job.active, "n1", bench.lives["n1"], newest, wrong)
        assert again == back, "by the next node"


async def test_what_is_put_back_is_of_no_later_generation_and_turns_nothing_back(bench: Bench) -> None:
    await bench.up("n1", "n2")
    old = await bench.active(await bench.submit(), "n1")
    first = (await commit(bench, old, "n1", "a", order=1)).checkpoint
    job = await bench.active(old, "n1")
    assert first is not None and old.active is not None and job.active is not None
    later = first.model_copy(update={"number": job.active.number + 1, "name": "l"})
    me = bench.lives["n2"]
    await refused("stale", bench.store.put_back("u1", job.active, "n2", me, later, first))
    await refused("stale", bench.store.put_back("u1", old.active, "n2", me, first, None))
    newest = await commit(bench, job, "n1", "b", order=1)
    await refused("stale", bench.store.put_back("u1", job.active, "n2", me, first, None))
    other = Incarnation(life="x", start=1)
    await refused("not_current", bench.store.put_back("u1", job.active, "n2", other, first, None))
    assert await bench.job() == newest


async def test_a_commit_replaces_a_pointer_that_does_not_count(bench: Bench) -> None:
    """One that somebody wrote, of a number that none reaches: no commit counted any more."""
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    evil = Checkpoint(name="evil", step=1, number=999999, order=1)
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "job:u1", "checkpoint", evil.to_json())
    await refused("stale", commit(bench, job, "n1", "a", order=1))
    token, me = generation(job).token, bench.lives["n1"]
    done = await bench.store.commit("u1", token, "n1", me, "a", 10, 1, "", evil)
    assert done.checkpoint is not None and done.checkpoint.name == "a"


async def test_an_older_generation_commits_nothing(bench: Bench) -> None:
    await bench.up("n1", "n2")
    old = await bench.active(await bench.submit(), "n1", "n2")
    await commit(bench, old, "n1", "a", order=1)
    job = await bench.propose(old, "n1", "n2")
    forming = await commit(bench, old, "n1", "b", order=2)
    assert forming.checkpoint is not None and forming.checkpoint.name == "b", "in its grace, before the new one is"
    for node in ("n1", "n2"):
        job = await bench.ack(job, node)
    refusal = await refused("stale", commit(bench, old, "n1", "c", order=3))
    assert "may commit nothing any more" in refusal
    newer = await commit(bench, job, "n1", "d", order=1)
    assert newer.checkpoint == Checkpoint(name="d", step=10, number=generation(job).number, order=1)
    await refused("stale", commit(bench, old, "n1", "e", order=9))
    twin = Token(number=generation(job).number, id="another")
    await refused("stale", commit(bench, job, "n1", "e", order=9, token=twin))
    assert await bench.job() == newer


async def test_who_may_commit(bench: Bench) -> None:
    await bench.up("n1", "n2")
    submitted = await bench.submit()
    await refused("stale", commit_of(bench, submitted, "n1", Token(number=1, id="none yet")))
    job = await bench.active(submitted, "n1")
    await refused("stale", commit(bench, job, "n2", "a", order=1))
    other = Incarnation(life="n1-a", start=2)
    token = generation(job).token
    await refused("not_current", bench.store.commit(job.uid, token, "n1", other, "a", 1, 1))
    await refused("not_found", bench.store.commit("nobody", token, "n1", bench.lives["n1"], "a", 1, 1))
    assert (await bench.job()).checkpoint is None


async def commit_of(bench: Bench, job: JobRecord, node: str, token: Token) -> JobRecord:
    return await bench.store.commit(job.uid, token, node, bench.lives[node], "a", 1, 1)


async def test_workers_that_are_being_stopped_may_commit_their_last(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    ended = await bench.end(job, "pausing")
    done = await commit(bench, ended, "n1", "last", order=7)
    assert done.checkpoint is not None and done.checkpoint.name == "last"


async def test_an_emptied_store_gets_the_pointer_back_and_refuses_the_old_generation_still(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1")
    old = await bench.active(await bench.submit(), "n1")
    job = await bench.active(old, "n1")
    job = await commit(bench, job, "n1", "a", order=1)
    view = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    await refused("recovering", commit(bench, job, "n1", "b", order=2))
    await bench.usual_time_passes()
    again = await read_after(bench)
    assert again.jobs["u1"].checkpoint == job.checkpoint
    await refused("stale", commit(bench, old, "n1", "c", order=9))
    await refused("stale", commit(bench, job, "n1", "c", order=1))
    after = await commit(bench, job, "n1", "b", order=2)
    assert after.checkpoint is not None and after.checkpoint.name == "b"
