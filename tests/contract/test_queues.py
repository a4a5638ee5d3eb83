"""The record of the queues, and what keeps two jobs of a queue from being given the same room."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord
from nodeagent.model.queue import Queue, Queues, QueuesRecord
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError
from nodeagent.store.messages import QuotaClaims
from tests.contract.bench import Bench, refused
from tests.contract.test_restore import View, read, read_after, rejoin


def tree(*names: str, by: str = "ann") -> Queues:
    return Queues(by=by, queues=tuple(Queue(name=name) for name in names))


async def write(bench: Bench, rev: int, *names: str, request: str = "") -> QueuesRecord:
    return await bench.store.queues(rev, tree(*names), request or f"q{rev}", "queue a created")


async def names(bench: Bench) -> list[str]:
    reply = await bench.beat("n1")
    assert reply.queues is not None
    return [queue.name for queue in reply.queues.tree.queues]


async def test_who_writes_no_queues_has_no_record(bench: Bench) -> None:
    await bench.up("n1")
    assert (await bench.beat("n1")).queues is None


async def test_the_tree_is_written_whole_and_comes_with_the_next_beat(bench: Bench) -> None:
    await bench.up("n1")
    before = await bench.beat("n1")
    record = await write(bench, 0, "a", "b")
    assert record.tree == tree("a", "b").model_copy(update={"rev": 1})
    reply = await bench.beat("n1", rev=before.rev, era=before.era)
    assert (reply.queues, reply.unread, reply.jobs) == (record, (), ())
    assert reply.rev == record.rev == reply.asked
    assert (await bench.beat("n1", rev=reply.rev, era=reply.era)).queues is None
    assert (await bench.kinds()).count("QueueChanged") == 1


async def test_only_who_has_read_the_newest_may_write(bench: Bench) -> None:
    await bench.up("n1")
    await write(bench, 0, "a")
    await write(bench, 1, "a", "b")
    text = await refused("stale", write(bench, 1, "c", request="other"))
    assert text == "the queues have revision 2 by now, not 1"
    assert await names(bench) == ["a", "b"]


async def test_the_same_request_changes_nothing(bench: Bench) -> None:
    await bench.up("n1")
    first = await write(bench, 0, "a", request="r")
    assert await write(bench, 0, "b", request="r") == first
    assert (await bench.kinds()).count("QueueChanged") == 1


async def test_a_revision_may_be_skipped_but_never_lowered(bench: Bench) -> None:
    await bench.up("n1")
    ahead = tree("a").model_copy(update={"rev": 9})
    assert (await bench.store.queues(0, ahead, "r1", "x")).tree.rev == 9
    assert (await bench.store.queues(9, tree("b"), "r2", "x")).tree.rev == 10


async def test_an_emptied_store_is_given_them_back(bench: Bench) -> None:
    await bench.up("n1", "n2")
    record = await write(bench, 0, "a")
    view = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2")
    assert (await read_after(bench)).reply.queues == record
    assert (await write(bench, 1, "a", "b")).tree.rev == 2


async def test_the_newest_view_of_them_wins(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await write(bench, 0, "a")
    old = await read(bench)
    await write(bench, 1, "a", "b")
    new = await read(bench)
    await bench.put_back(None)
    for view in (new, old):
        await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2")
    await bench.recovered("n1")
    assert await names(bench) == ["a", "b"]


async def test_who_comes_late_brings_them_where_nobody_had_them(bench: Bench) -> None:
    await bench.up("n1", "n2")
    before = await read(bench)
    await write(bench, 0, "a")
    after = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(before.offer())
    await rejoin(bench, "n1", "n2")
    await bench.recovered("n1")
    assert (await bench.beat("n1")).queues is None
    await bench.store.restore(after.offer())
    assert await names(bench) == ["a"]
    newer = await write(bench, 1, "a", "b")
    await bench.store.restore(after.offer())
    assert (await bench.beat("n1")).queues == newer


async def found_out(bench: Bench, view: View) -> str:
    """Beats of a node that knows of no job, until one is refused."""
    for _ in range(20):
        try:
            await bench.beat("n1", rev=view.reply.rev, era=view.reply.era)
        except StoreRefusedError as refusal:
            assert refusal.code == "behind"
            return str(refusal)
    raise AssertionError("nobody notices")


@pytest.mark.parametrize("damage", ["removed", "of another type"])
async def test_a_damaged_record_is_noticed_and_given_back(bench: Bench, damage: str) -> None:
    await bench.up("n1", "n2", "n3")
    record = await write(bench, 0, "a")
    view = await read(bench)
    if damage == "removed":
        await bench.take("queues")
        assert "damaged queues" in await found_out(bench, view)
    else:
        await bench.spoil("queues")
        with pytest.raises(StoreUnavailableError):  # the step failed, and what it stumbled over is looked for
            await write(bench, 1, "b")
        await found_out(bench, view)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2", "n3")
    assert (await read_after(bench)).reply.queues == record


async def claim(bench: Bench, uid: str, view: View, *claims: str, first: int = 0) -> None:
    members = bench.members("n1", first=first)
    await bench.store.propose(bench.proposal(view.jobs[uid], members, claims=claims, read=view.reply.rev))


async def test_two_jobs_of_a_queue_take_of_it_one_after_the_other(bench: Bench) -> None:
    await bench.up("n1")
    await bench.submit("u1", "one")
    await bench.submit("u2", "two")
    view = await read(bench)
    await claim(bench, "u1", view, "team", "vision")
    text = await refused("stale", claim(bench, "u2", view, "vision", first=2))
    assert text == "another job of queue vision has been given nodes meanwhile"
    await claim(bench, "u2", await read(bench), "vision", first=2)


async def test_jobs_of_different_queues_do_not_wait_for_each_other(bench: Bench) -> None:
    await bench.up("n1")
    await bench.submit("u1", "one")
    await bench.submit("u2", "two")
    view = await read(bench)
    await claim(bench, "u1", view, "vision")
    await claim(bench, "u2", view, "speech", first=2)


async def submit(bench: Bench, number: int, read: int, *queues: str) -> None:
    claims = QuotaClaims(queues=queues, read=read)
    await bench.submit(f"u{number}", f"j{number}", claims=claims)


async def test_two_submits_that_users_quotas_judge_come_one_after_the_other(bench: Bench) -> None:
    await bench.up("n1")
    rev = (await bench.beat("n1")).rev
    await submit(bench, 1, rev, "team", "vision")
    text = await refused("stale", submit(bench, 2, rev, "vision"))
    assert text == "another job has been submitted to queue vision, or has grown there, meanwhile"
    assert [job.uid for job in (await bench.beat("n1")).jobs] == ["u1"], "nothing was submitted"
    await submit(bench, 2, (await bench.beat("n1")).rev, "vision")


async def test_a_scale_out_is_judged_by_users_quotas_as_a_submit_is(bench: Bench) -> None:
    await bench.up("n1")
    rev = (await bench.beat("n1")).rev
    await submit(bench, 1, rev, "team")
    job = await bench.job("u1", "n1")

    async def grow(request: str, read: int, to: int, rev: int = 1) -> JobRecord:
        new = job.control.model_copy(update={"target": to})
        claims = QuotaClaims(queues=("team",), read=read)
        return await bench.store.control("u1", rev, new, request, "JobScaled", "more", claims=claims)

    text = await refused("stale", grow("r1", rev, 3))
    assert text == "another job has been submitted to queue team, or has grown there, meanwhile"
    rev = (await bench.beat("n1")).rev
    assert (await grow("r1", rev, 3)).control.target == 3
    assert (await grow("r1", rev, 3)).control.target == 3, "the same request again is answered"
    await refused("stale", submit(bench, 2, rev, "team"))
    await refused("stale", grow("r2", rev, 4, rev=2))
    await submit(bench, 2, (await bench.beat("n1")).rev, "team")


async def test_submits_to_other_queues_and_without_quotas_do_not_wait(bench: Bench) -> None:
    await bench.up("n1")
    rev = (await bench.beat("n1")).rev
    await submit(bench, 1, rev, "vision")
    await submit(bench, 2, rev, "speech")
    await bench.submit("u3", "j3")
    await submit(bench, 4, (await bench.beat("n1")).rev, "vision")


async def test_a_repeated_submit_is_not_judged_by_itself(bench: Bench) -> None:
    """Its reply was lost, and the view is as old as it was."""
    await bench.up("n1")
    rev = (await bench.beat("n1")).rev
    await submit(bench, 1, rev, "vision")
    await submit(bench, 1, rev, "vision")
    assert len((await bench.beat("n1")).jobs) == 1


async def test_nodes_that_are_given_to_a_queue_do_not_disturb_submits_to_it(bench: Bench) -> None:
    await bench.up("n1")
    await bench.submit("u1", "one")
    view = await read(bench)
    await claim(bench, "u1", view, "vision")
    await submit(bench, 2, view.reply.rev, "vision")
