"""Failsafe members: nothing newer is active, and no name free, before one of them has let go, left, or is permanently
down."""

from __future__ import annotations

from nodeagent.model.job import JobRecord
from nodeagent.model.node import Cordon, Incarnation
from nodeagent.model.timing import millis
from nodeagent.model.world import Ack, Token
from nodeagent.store.messages import Forgotten
from tests.contract.bench import FAST, Bench, HereBench, generation, refused
from tests.inprocess.data import Data, Word
from tests.inprocess.server import Server

LIMIT = millis(FAST.failsafe_limit)
FAST_LEASE = millis(FAST.lease)


def lives(bench: Bench, *nodes: str) -> dict[str, str]:
    return {node: bench.lives[node].life for node in nodes}


async def active_under(bench: Bench, members: tuple[str, ...], failsafe_members: tuple[str, ...]) -> JobRecord:
    """An active generation of these members under these failsafe members."""
    return await bench.active(await bench.submit(), *members, failsafe_members=lives(bench, *failsafe_members))


async def set_failsafe_members(
    bench: Bench, job: JobRecord, node: str, *failsafe_members: str, expect: dict[str, str] | None = None
) -> JobRecord:
    expect = job.failsafe_members if expect is None else expect
    return await bench.store.set_failsafe_members(
        job.uid, generation(job).token, node, bench.lives[node], expect, lives(bench, *failsafe_members)
    )


async def let_go(bench: Bench, job: JobRecord, node: str, *, lends: bool = False) -> JobRecord:
    life = bench.lives[node]
    ack = Ack(life=life.life, ended=generation(job).state == "ended", address=f"{node}:29500", lends=lends)
    return await bench.store.ack(job.uid, generation(job).token, node, life, ack, None)


# --- who they are


async def test_a_generation_has_its_failsafe_members_once_it_is_active(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    first = lives(bench, "n1", "n2")
    job = await bench.propose(await bench.submit(), "n1", "n2", failsafe_members=first)
    assert (job.failsafe_members, generation(job).failsafe_members) == ({}, first)
    for node in ("n1", "n2"):
        job = await bench.ack(job, node)
    assert (generation(job).state, job.failsafe_members) == ("active", first)
    job = await bench.propose(job, "n1", "n3", failsafe_members=lives(bench, "n3"))
    assert job.failsafe_members == first, "those of what may still run"
    for node in ("n1", "n2", "n3"):
        job = await bench.ack(job, node)
    assert (generation(job).state, job.failsafe_members) == ("active", lives(bench, "n3"))
    assert (await bench.job()).failsafe_members == lives(bench, "n3"), "as everybody reads it"


async def test_a_failsafe_member_may_have_the_failsafe_members_replaced(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n1", "n2"), ("n1", "n3"))
    by_member = await set_failsafe_members(bench, job, "n1", "n1", "n2")
    assert by_member.failsafe_members == lives(bench, "n1", "n2")
    assert by_member.rev > job.rev
    assert await bench.job() == by_member
    by_outsider = await set_failsafe_members(bench, by_member, "n2", "n3")
    by_outsider = await set_failsafe_members(bench, by_outsider, "n3", "n1", "n3")
    assert by_outsider.failsafe_members == lives(bench, "n1", "n3")
    assert generation(by_outsider) == generation(job), "nothing else changed"


async def test_nobody_else_may(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n1", "n2"), ("n1", "n3"))
    assert "n2 may not choose" in await refused("stale", set_failsafe_members(bench, job, "n2", "n2"))
    other = Incarnation(life="n1-a", start=2)
    token, expect, step = generation(job).token, job.failsafe_members, bench.store.set_failsafe_members
    await refused("not_current", step(job.uid, token, "n1", other, expect, {}))
    await refused("not_found", step("nobody", token, "n1", bench.lives["n1"], expect, {}))
    assert (await bench.job()).failsafe_members == job.failsafe_members


async def test_where_there_are_none_a_member_chooses(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n1", "n2"), ())
    assert "n3 may not choose" in await refused("stale", set_failsafe_members(bench, job, "n3", "n3"))
    job = await set_failsafe_members(bench, job, "n2", "n2", "n3")
    assert job.failsafe_members == lives(bench, "n2", "n3")
    assert (await set_failsafe_members(bench, job, "n3")).failsafe_members == {}


async def test_they_are_replaced_only_as_they_were_seen(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await active_under(bench, ("n1", "n2"), ("n1",))
    now = await set_failsafe_members(bench, job, "n1", "n1", "n2")
    for seen in (job.failsafe_members, {}, {"n1": "another life", "n2": "n2-a"}, {**now.failsafe_members, "n3": "x"}):
        assert "have changed" in await refused("stale", set_failsafe_members(bench, job, "n1", "n1", expect=seen))
    assert (await bench.job()).failsafe_members == now.failsafe_members


async def test_only_an_active_generation_gets_other_failsafe_members(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await active_under(bench, ("n1",), ("n1",))
    old = generation(job).token
    forming = await bench.propose(job, "n1", "n2")
    assert "is forming, not active" in await refused("stale", set_failsafe_members(bench, forming, "n1", "n1", "n2"))
    step, me = bench.store.set_failsafe_members, bench.lives["n1"]
    await refused("stale", step(job.uid, old, "n1", me, job.failsafe_members, {}))
    await refused("stale", step(job.uid, Token(number=2, id="x"), "n1", me, {}, {}))
    ended = await bench.end(forming, "holding")
    assert "is ended, not active" in await refused("stale", set_failsafe_members(bench, ended, "n1", "n1", "n2"))


# --- what forms


async def test_activation_waits_for_one_failsafe_member_that_does_not_lend(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n1", "n2"), ("n1", "n2", "n3"))
    job = await bench.propose(job, "n1", "n2")
    for node in ("n1", "n2"):
        job = await let_go(bench, job, node, lends=True)
    assert (generation(job).state, generation(job).holders) == ("forming", {})
    assert (generation(job).missing, generation(job).released) == ({}, False)
    text = await refused("not_live", bench.store.activate(job.uid, generation(job).token))
    assert "no failsafe member of generation 1 (n1, n2, n3) has let go" in text
    again = await let_go(bench, job, "n1", lends=True)
    assert generation(again).state == "forming"
    job = await let_go(bench, job, "n1")
    assert (generation(job).state, job.failsafe_members) == ("active", {})


async def test_a_failsafe_member_outside_lets_go_by_its_ack(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n1",), ("n2",))
    job = await bench.propose(job, "n1", "n3")
    for node in ("n1", "n3"):
        job = await bench.ack(job, node)
    assert generation(job).state == "forming"
    lending = await let_go(bench, job, "n2", lends=True)
    assert (generation(lending).state, generation(lending).released) == ("forming", False)
    job = await let_go(bench, job, "n2")
    assert generation(job).state == "active"
    assert set(generation(job).members) == {"n1", "n3"}


async def test_who_lets_go_first_is_waited_for_no_more(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n1",), ("n2",))
    job = await bench.propose(job, "n1", "n3")
    job = await let_go(bench, job, "n2")
    assert (generation(job).state, generation(job).released) == ("forming", True)
    assert "n1 may still run" in await refused("not_live", bench.store.activate(job.uid, generation(job).token))
    for node in ("n1", "n3"):
        job = await bench.ack(job, node)
    assert generation(job).state == "active"


async def test_each_new_attempt_is_let_go_of_anew(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n1",), ("n2",))
    job = await let_go(bench, await bench.propose(job, "n1", "n3"), "n2")
    job = await bench.propose(job, "n1")
    job = await bench.ack(job, "n1")
    assert (generation(job).state, job.failsafe_members) == ("forming", lives(bench, "n2"))
    assert generation(await let_go(bench, job, "n2")).state == "active"


async def test_a_failsafe_member_of_an_active_generation_has_nothing_to_say(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await active_under(bench, ("n1",), ("n1", "n2"))
    assert await let_go(bench, job, "n2") == job
    assert (await let_go(bench, job, "n1")).failsafe_members == job.failsafe_members


# --- what has ended


async def test_an_ended_job_has_its_name_until_one_lets_go(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n1",), ("n1", "n2"))
    job = await bench.end(job, "stopped")
    assert await let_go(bench, job, "n3") == job, "neither holder nor failsafe member"
    job = await let_go(bench, job, "n1", lends=True)
    assert (generation(job).holders, set(job.failsafe_members)) == ({}, {"n1", "n2"})
    assert "n1" in await refused("stopping", bench.submit("u2"))
    await refused("stale", bench.store.remove(job.uid))
    job = await let_go(bench, job, "n2", lends=True)
    assert set(job.failsafe_members) == {"n1", "n2"}
    job = await let_go(bench, job, "n2")
    assert job.failsafe_members == {}
    assert (await bench.job()).failsafe_members == {}
    assert (await bench.submit("u2")).phase == "queued"


async def test_an_ended_job_that_nobody_keeps_can_be_removed(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.end(await active_under(bench, ("n1",), ("n2",)), "failed")
    await bench.ack(job, "n1")
    assert "n2" in await refused("stale", bench.store.remove(job.uid))
    await let_go(bench, job, "n2")
    await bench.store.remove(job.uid)
    assert (await bench.kinds())[-1] == "JobDeleted"


async def test_a_paused_job_waits_for_that_as_well(bench: Bench) -> None:
    """The next generation waits for a failsafe member of the one before the pause."""
    await bench.up("n1", "n2")
    job = await bench.end(await active_under(bench, ("n1",), ("n2",)), "pausing")
    job = await bench.ack(job, "n1")
    assert job.phase == "paused"
    job = await bench.ack(await bench.propose(job, "n1"), "n1")
    assert generation(job).state == "forming"
    assert generation(await let_go(bench, job, "n2")).state == "active"


async def test_silence_of_all_failsafe_members_for_the_limit_frees_the_name(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.end(await active_under(bench, ("n1", "n2"), ("n1", "n2")), "stopped")
    for node in ("n1", "n2"):
        await bench.lapse(node, "n3")
    await refused("stopping", bench.submit("u2"))
    await bench.age(LIMIT)
    await refused("stopping", bench.submit("u2"))
    await refused("stale", bench.store.remove(job.uid))
    await bench.age(LIMIT // 20 - 60_000)
    await refused("stopping", bench.submit("u2"))
    await bench.age(60_000 + FAST_LEASE)
    assert (await bench.submit("u2")).phase == "queued"


async def test_one_failsafe_member_that_answers_keeps_it(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.end(await active_under(bench, ("n1",), ("n1", "n2")), "stopped")
    await let_go(bench, job, "n1", lends=True)
    await bench.lapse("n1", "n2")
    await bench.age(2 * LIMIT)
    await bench.beat("n2")
    assert "n2" in await refused("stopping", bench.submit("u2"))


# --- those who go


async def test_one_that_leaves_lends_nothing_any_more(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n1",), ("n2", "n3"))
    other = await bench.active(
        await bench.submit("u2", name="other"), "n1", first=2, failsafe_members=lives(bench, "n3")
    )
    rev = (await bench.beat("n1")).rev
    await bench.store.leave("n2", bench.lives["n2"])
    changed = {j.uid: j.failsafe_members for j in (await bench.beat("n1", rev=rev)).jobs}
    assert changed == {job.uid: {}}, "nobody can lend under failsafe members that one has left"
    assert (await bench.job(other.uid)).failsafe_members == lives(bench, "n3")
    job = await bench.ack(await bench.propose(await bench.job(), "n1"), "n1")
    assert generation(job).state == "active"


async def test_one_that_leaves_frees_what_has_ended(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.end(await active_under(bench, ("n1",), ("n2",)), "stopped")
    await bench.ack(job, "n1")
    await refused("stopping", bench.submit("u2"))
    await bench.store.leave("n2", bench.lives["n2"])
    assert (await bench.submit("u2")).phase == "queued"


async def test_a_lapsed_node_can_be_forgotten(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n2", "n3"), ("n2", "n3"))
    assert "no node n9" in await refused("not_found", bench.store.forget("n9", "ann"))
    assert "holds its lease" in await refused("not_live", bench.store.forget("n2", "ann"))
    assert (await bench.job()).failsafe_members == job.failsafe_members
    for node in ("n2", "n3"):
        await bench.lapse(node, "n1")
    forgotten = await bench.store.forget("n2", "ann")
    gone = forgotten.node
    assert gone is not None
    assert (gone.id, gone.lost, gone.left, forgotten.removed) == ("n2", True, False, False)
    job = await bench.job(watcher="n1")
    assert job.failsafe_members == {}
    event = (await bench.store.events("0-0", -1))[0]
    assert (event.kind, event.node, event.by) == ("NodeForgotten", "n2", "ann")
    assert "permanently down" in event.text
    await refused("lost", bench.beat("n2"))
    assert "n3" in (await bench.beat("n1")).lapsed
    job = await bench.ack(await bench.propose(job, "n1", lost=("n2", "n3")), "n1")
    assert generation(job).state == "active"


async def test_a_forgotten_node_lends_to_no_job_whatever_the_names_say(bench: Bench) -> None:
    """Of a job whose members are all silent nobody notices that its name is missing: it waited for ever."""
    await bench.up("n1", "n2", "n3")
    await active_under(bench, ("n2", "n3"), ("n2", "n3"))
    for node in ("n2", "n3"):
        await bench.lapse(node, "n1")
    await bench.take("names")
    await bench.store.forget("n2", "ann")
    assert (await bench.job(watcher="n1")).failsafe_members == {}


async def test_a_forgotten_node_holds_nothing(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n1", "n2"), ("n2",))
    job = await bench.propose(job, "n1", "n3")
    assert set(generation(job).holders) == {"n1", "n2"}
    await bench.lapse("n2", "n1")
    await bench.store.forget("n2", "ann")
    assert set(generation(await bench.job()).holders) == {"n1"}
    for node in ("n1", "n3"):
        job = await bench.ack(job, node)
    assert generation(job).state == "active"


async def test_forgetting_again_or_what_has_left_removes_the_record(bench: Bench) -> None:
    """Its cordon goes with it: whoever joins under that name begins anew, and takes work."""
    await bench.up("n1", "n2", "n3")
    drain = Cordon(reason="nodeagent is removed from it", by="ann", at=1.0, drain=True)
    for node in ("n2", "n3"):
        await bench.store.cordon(node, drain, "")
    await bench.lapse("n2", "n1")
    first = (await bench.store.forget("n2", "ann")).node
    assert first is not None
    assert first.cordon == drain, "its machine may come back"
    await bench.store.leave("n3", bench.lives["n3"])
    rev = (await bench.beat("n1")).rev
    for node in ("n2", "n3"):
        forgotten = await bench.store.forget(node, "bob")
        assert forgotten.node is not None
        assert (forgotten.removed, forgotten.node.id, forgotten.node.cordon) == (True, node, None)
        assert "no node" in await refused("not_found", bench.store.forget(node, "bob"))
    reply = await bench.beat("n1", rev=rev)
    assert (reply.gone, reply.rev, reply.nodes) == (("node:n2", "node:n3"), forgotten.rev, ())
    assert reply.lapsed == ()
    event = (await bench.store.events("0-0", -1))[0]
    assert (event.kind, event.node, event.by) == ("NodeRemoved", "n3", "bob")
    assert (await bench.kinds()).count("NodeForgotten") == 1
    await bench.up("n3")
    (back,) = (node for node in (await bench.beat("n1", rev=reply.rev)).nodes if node.id == "n3")
    assert (back.cordon, back.left, back.lost) == (None, False, False)


async def test_the_same_request_forgets_once(bench: Bench) -> None:
    """The answer to it may be lost: sent again, it must not remove what it marked lost."""
    await bench.up("n1", "n2")
    await bench.store.cordon("n2", Cordon(reason="fan", by="ann", at=1.0), "")
    await bench.lapse("n2", "n1")
    lost = await bench.store.forget("n2", "ann", "f1", "forget:n2")
    assert await bench.store.forget("n2", "ann", "f1", "forget:n2") == lost
    assert (lost.removed, lost.node is not None and lost.node.lost) == (False, True)
    assert "another change" in await refused("stale", bench.store.forget("n2", "ann", "f1", "forget:n1"))

    removed = await bench.store.forget("n2", "ann", "f2", "forget:n2")
    again = await bench.store.forget("n2", "ann", "f2", "forget:n2")
    assert (removed.removed, again) == (True, Forgotten(node=None, removed=True, rev=removed.rev))
    await bench.up("n2")
    for request in ("f1", "f2"):
        await bench.store.forget("n2", "ann", request, "forget:n2")
    assert "n2" in {node.id for node in (await bench.beat("n1")).nodes}, "its new life is not meant"
    kinds = await bench.kinds()
    assert (kinds.count("NodeForgotten"), kinds.count("NodeRemoved")) == (1, 1)


async def test_a_removed_record_holds_up_no_job(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await active_under(bench, ("n1", "n2"), ("n2",))
    await bench.lapse("n2", "n1")
    for _ in range(2):
        await bench.store.forget("n2", "ann")
    job = await bench.job(watcher="n1")
    assert job.failsafe_members == {}
    job = await bench.propose(job, "n1", "n3", lost=("n2",))
    for node in ("n1", "n3"):
        job = await bench.ack(job, node)
    assert generation(job).state == "active"


async def test_a_forgotten_node_comes_back_with_a_new_life(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.lapse("n2", "n1")
    await bench.store.forget("n2", "ann")
    await refused("lost", bench.join("n2", start=2))
    await bench.join("n2", life="n2-b")
    await bench.beat("n2")
    assert "n2" not in (await bench.beat("n1")).lapsed


async def test_a_failsafe_member_that_came_back_with_a_new_life_may_let_go(bench: Bench) -> None:
    """It is the same machine, which has booted: its agent knows when an earlier one's promises are over."""
    await bench.up("n1", "n2")
    job = await active_under(bench, ("n1",), ("n2",))
    await bench.lapse("n2", "n1")
    await bench.join("n2", life="n2-b")
    assert set((await bench.job()).failsafe_members) == {"n2"}, "a boot is no vow of an operator"
    job = await bench.ack(await bench.propose(job, "n1"), "n1")
    assert generation(job).state == "forming"
    assert generation(await let_go(bench, job, "n2")).state == "active"


async def test_of_a_node_that_leaves_only_the_jobs_that_it_keeps_are_read() -> None:
    clock = [1_000_000.0]
    bench = HereBench(Server(lambda: clock[0]), clock)
    await bench.up("n1", "n2")
    await active_under(bench, ("n1",), ("n2",))
    for n in range(2, 6):
        await bench.submit(f"u{n}", name=f"other{n}")
    data, read = bench.server.data, list[str]()

    def hgetall(key: Word) -> list[str]:
        read.append(str(key).rpartition(":")[2])
        return Data.hgetall(data, key)

    data.watch("HGETALL", hgetall)
    await bench.store.leave("n2", bench.lives["n2"])
    assert {uid for uid in read if uid.startswith("u")} == {"u1"}
    assert (await bench.job()).failsafe_members == {}
