"""Join, beat, leave and the served clock: who holds a node's id, for how long, and who sees it lapse."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable

import pytest

from nodeagent.model.node import Cordon, Incarnation, Readiness
from nodeagent.model.pod import PodState
from nodeagent.model.timing import RELEASE, millis
from nodeagent.store.base import KeyMark
from nodeagent.store.client import RedisStore
from nodeagent.store.messages import JoinReply, Note
from tests.contract.bench import BOUND, FAST, LASTING, LONG, Bench, facts, generation, refused


async def test_a_join_gives_a_lease_and_tells_the_cluster(bench: Bench) -> None:
    first = await bench.store.join("n1", Incarnation(life="a", start=1), facts("n1"), FAST)
    second = await bench.store.join("n2", Incarnation(life="b", start=1), facts("n2"), FAST)
    assert first.cluster_uid == second.cluster_uid != ""
    bench.lives = {"n1": Incarnation(life="a", start=1)}
    reply = await bench.beat("n1")
    assert reply.cluster_uid == first.cluster_uid
    assert {node.id for node in reply.nodes} == {"n1", "n2"}
    assert reply.lapsed == ()
    assert reply.next_lapse is not None
    assert 0 < reply.next_lapse <= 300  # n2's
    assert await bench.kinds() == ["NodeJoined", "NodeJoined"]


async def test_the_same_life_may_join_again_and_keeps_its_place(bench: Bench) -> None:
    await bench.up("n1")
    await bench.beat("n1", readiness={"u1": Readiness(state="ready")})
    before = (await bench.beat("n1")).nodes[0]
    await bench.pass_served(50, "n1")
    await bench.join("n1", start=2)
    after = (await bench.beat("n1")).nodes[0]
    assert (after.joined, after.readiness) == (before.joined, before.readiness)
    assert after.incarnation.start == 2
    assert await bench.kinds() == ["NodeJoined"]
    await refused("not_current", bench.join("n1", start=1))
    bench.lives["n1"] = Incarnation(life="n1-a", start=2)
    assert (await bench.beat("n1")).nodes[0] == after


async def test_a_repeated_join_changes_nothing(bench: Bench) -> None:
    await bench.up("n1")
    before = await bench.beat("n1")
    await bench.join("n1")
    after = await bench.beat("n1")
    assert (after.rev, after.nodes) == (before.rev, before.nodes)


async def test_another_life_is_refused_while_the_lease_holds(bench: Bench) -> None:
    await bench.up("n1")
    other = facts("n1", address="10.9.9.9")
    text = await refused("lease_held", bench.store.join("n1", Incarnation(life="x", start=1), other, FAST))
    assert facts("n1").address in text
    assert "10.9.9.9" in text
    assert (await bench.beat("n1")).nodes[0].incarnation.life == "n1-a"


async def test_another_life_takes_a_lapsed_node_and_the_old_one_never_comes_back(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.beat("n2", readiness={"u1": Readiness(state="ready")})
    await bench.lapse("n2", "n1")
    await bench.join("n2", life="n2-b")
    node = next(n for n in (await bench.beat("n1")).nodes if n.id == "n2")
    assert (node.incarnation.life, node.readiness, node.lost) == ("n2-b", {}, False)
    old = Incarnation(life="n2-a", start=1)
    await refused("not_current", bench.beat("n2", incarnation=old))
    await bench.lapse("n2", "n1")
    await refused("lost", bench.store.join("n2", Incarnation(life="n2-a", start=9), facts("n2"), FAST))


async def test_a_lost_life_is_refused_for_ever(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    await bench.lapse("n2", "n1")
    await bench.propose(job, "n1", lost=("n2",))
    await refused("lost", bench.beat("n2"))
    await refused("lost", bench.join("n2", start=2))
    await bench.join("n2", life="n2-b")
    await refused("lost", bench.store.join("n2", Incarnation(life="n2-a", start=3), facts("n2"), FAST))
    assert (await bench.beat("n2")).lapsed == ()


async def test_timing_that_differs_is_refused_with_the_difference(bench: Bench) -> None:
    await bench.up("n1")
    other = FAST.model_copy(update={"lease": 7.0})
    text = await refused("timing", bench.store.join("n2", Incarnation(life="b", start=1), facts("n2"), other))
    assert "lease is 0.3 there and 7.0 here" in text
    assert "gap" not in text


def with_key(bench: Bench, digest: str) -> RedisStore:
    """A client of a node with the key of this digest."""
    return RedisStore(bench.calls, KeyMark(digest, "/etc/nodeagent/cluster.key"))


def joins(bench: Bench, node: str, key: str, life: str = "a") -> Awaitable[JoinReply]:
    return with_key(bench, key).join(node, Incarnation(life=life, start=1), facts(node), FAST)


async def test_another_cluster_key_than_the_first_ones_is_refused(bench: Bench) -> None:
    """Such a node was ready like any other, held all jobs for changed, and advised to delete them."""
    await joins(bench, "n1", "ours")
    text = await refused("key", joins(bench, "n2", "other"))
    assert text.startswith("node n2 has another cluster key than the cluster: copy /etc/nodeagent/cluster.key from")
    await refused("key", joins(bench, "n2", ""))
    await refused("key", joins(bench, "n1", "other", life="b"))
    await joins(bench, "n2", "ours")


async def test_a_new_key_is_taken_once_all_others_have_left_and_all_jobs_have_ended(bench: Bench) -> None:
    bench.store = with_key(bench, "old")
    await bench.up("n1", "n2")
    job = await bench.submit()
    await bench.store.leave("n2", bench.lives["n2"])
    await refused("key", joins(bench, "n2", "new", life="n2-a"))
    await bench.store.leave("n1", bench.lives["n1"])
    await refused("key", joins(bench, "n2", "new", life="n2-a"))
    await bench.up("n1")
    await bench.end(job, "stopped")
    await bench.store.leave("n1", bench.lives["n1"])
    await joins(bench, "n2", "new", life="n2-a")
    await refused("key", joins(bench, "n1", "old", life="n1-a"))


async def test_a_digest_that_somebody_deleted_is_the_next_ones(bench: Bench) -> None:
    await joins(bench, "n1", "ours")
    async with bench.calls.link() as link:
        await link.ask("HDEL", f"{bench.calls.prefix}meta", "key")
    await joins(bench, "n2", "ours")
    await refused("key", joins(bench, "n3", "other"))


async def test_beats_are_refused_when_old_or_not_current(bench: Bench) -> None:
    await refused("behind", bench.beat("n1", incarnation=Incarnation(life="a", start=1)))
    await bench.up("n1")
    await bench.beat("n1", seq=50)
    await refused("stale", bench.beat("n1", seq=50))
    await refused("stale", bench.beat("n1", seq=49))
    await refused("not_current", bench.beat("n1", seq=51, incarnation=Incarnation(life="n1-a", start=2)))
    await refused("not_current", bench.beat("n1", seq=51, incarnation=Incarnation(life="z", start=1)))
    await bench.join("n1", start=2)
    await bench.beat("n1", seq=1)  # a new start counts anew


async def test_a_lapsed_life_that_is_not_lost_is_renewed(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.lapse("n2", "n1")
    assert (await bench.beat("n2", length=5000)).lapsed == ()
    reply = await bench.beat("n1")
    assert reply.lapsed == ()
    assert reply.next_lapse is not None
    assert 4000 < reply.next_lapse <= 5000


async def test_only_changes_raise_a_revision_and_travel(bench: Bench) -> None:
    await bench.up("n1", "n2")
    rev = (await bench.beat("n1")).rev
    ready = {"u1": Readiness(state="ready"), "u2": Readiness(state="unfit", reason="no /shared", code=1)}
    await bench.beat("n2", new_facts=facts("n2"), readiness={})
    reply = await bench.beat("n1", rev=rev)
    assert (reply.rev, reply.nodes, reply.jobs, reply.gone) == (rev, (), (), ())
    await bench.beat("n2", readiness=ready)
    await bench.submit()
    await bench.beat("n2", new_facts=facts("n2", labels={"rack": "r1"}))
    reply = await bench.beat("n1", rev=rev)
    assert [node.id for node in reply.nodes] == ["n2"]
    assert reply.nodes[0].readiness == ready
    assert reply.nodes[0].facts.labels == {"rack": "r1"}
    assert [job.uid for job in reply.jobs] == ["u1"]
    await bench.beat("n2", readiness=dict(reversed(ready.items())))
    again = await bench.beat("n1", rev=reply.rev)
    assert (again.rev, again.nodes) == (reply.rev, ())


async def test_changes_come_in_pages(bench: Bench) -> None:
    await bench.up("n1")
    for number in range(260):
        await bench.submit(f"u{number}", name=f"job{number}")
    first = await bench.beat("n1")
    assert first.more
    assert len(first.jobs) == 256
    second = await bench.beat("n1", rev=first.rev)
    assert not second.more
    assert [j.uid for j in first.jobs + second.jobs] == [f"u{n}" for n in range(260)]
    assert (await bench.beat("n1", rev=second.rev)).jobs == ()


async def test_all_that_are_silent_are_named_however_many_and_only_when_they_are_others(bench: Bench) -> None:
    """Found by strangers: of more than 256 the rest counted as live, for a day; left and lost ones filled the 256."""
    silent = [f"s{number:03}" for number in range(300)]
    await bench.up("n1", *silent[:2])
    for node in silent[2:]:
        await bench.join(node)
        await bench.beat(node, length=1)
    await bench.store.leave("s000", bench.lives["s000"])
    await bench.pass_served(20, "n1")
    reply = await bench.beat("n1")
    assert set(reply.lapsed) == set(silent[2:])
    again = await bench.beat("n1", silent=reply.silent)
    assert (again.lapsed, again.same, again.silent) == ((), True, reply.silent)
    await bench.beat("s007")
    back = await bench.beat("n1", silent=reply.silent)
    assert (set(back.lapsed), back.same) == (set(silent[2:]) - {"s007"}, False)
    await bench.beat("s001", length=1)
    await bench.pass_served(20, "n1")
    other = await bench.beat("n1", silent=back.silent)
    assert (set(other.lapsed), other.same) == (set(silent[1:]) - {"s007"}, False)
    assert (await bench.beat("n1", silent=back.silent)).lapsed == other.lapsed
    await bench.restart()
    sheltered = await bench.beat("n1", silent=other.silent)
    assert (sheltered.lapsed, set(sheltered.sheltered), sheltered.same) == ((), set(other.lapsed), False)
    assert (await bench.beat("n1", silent=sheltered.silent)).sheltered == ()


async def test_a_restarted_server_gives_everybody_an_amnesty(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1", "n2")
    await bench.lapse("n2", "n1")
    await bench.restart()
    reply = await bench.beat("n1")
    assert reply.lapsed == ()
    assert reply.next_lapse is not None
    assert 0 < reply.next_lapse <= millis(LASTING.credit + LASTING.lease)
    await refused("recovering", bench.join("n2", life="n2-b"))
    await bench.beat("n2", incarnation=Incarnation(life="n2-a", start=1))
    await refused("lease_held", bench.join("n2", life="n2-b"))
    bench.lives["n2"] = Incarnation(life="n2-a", start=1)
    await bench.beat("n2", length=1)
    await bench.age(millis(LASTING.lease / 2))
    assert "n2" in (await bench.beat("n1")).sheltered
    await bench.age(millis(LASTING.lease / 2))
    await bench.until_lapsed("n2", "n1")


async def test_a_silent_server_counts_little_time_and_gives_an_amnesty(bench: Bench) -> None:
    bench.timing = FAST.model_copy(update={"gap": 1.5})
    await bench.up("n1", "n2")
    before = await bench.beat("n2", length=350)
    await bench.sleep(1.6)  # longer than gap: nobody can say what happened meanwhile
    began = time.monotonic()
    reply = await bench.beat("n1")  # three calls: the amnesty counts from the first
    took = math.ceil((time.monotonic() - began) * 1000)
    assert reply.served - before.served <= 3 * 100  # credit
    assert reply.lapsed == ()
    await bench.until_lapsed("n2", "n1")
    assert (await bench.beat("n1")).served >= reply.served - took + 300


async def test_lost_and_left_nodes_stay_lapsed_in_an_amnesty(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2")
    await bench.lapse("n2", "n1")
    await bench.propose(job, "n1", lost=("n2",))
    await bench.store.leave("n3", bench.lives["n3"])
    await bench.restart()
    reply = await bench.beat("n1")
    assert (reply.lapsed, reply.sheltered) == ((), ())
    await refused("recovering", bench.join("n2", life="n2-b"))
    await bench.usual_time_passes()
    await bench.recovered("n1")
    await bench.join("n2", life="n2-b")


async def test_a_node_that_leaves_is_lapsed_at_once_and_may_come_back(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.store.leave("n2", bench.lives["n2"])
    reply = await bench.beat("n1")
    assert reply.lapsed == (), "its record says so"
    assert next(n for n in reply.nodes if n.id == "n2").left
    await refused("lost", bench.beat("n2"))
    await bench.store.leave("n2", bench.lives["n2"])  # its reply may have been lost
    assert await bench.kinds() == ["NodeJoined", "NodeJoined", "NodeLeft"]
    await bench.join("n2", start=2)
    assert (await bench.beat("n1")).lapsed == ()
    assert not (await bench.beat("n2")).nodes[-1].left
    await refused("not_current", bench.store.leave("n2", Incarnation(life="n2-a", start=1)))


async def test_leaving_frees_what_the_node_holds(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.end(job, "pausing")
    assert set(generation(job).holders) == {"n1", "n2"}
    await bench.ack(job, "n1")
    await bench.store.leave("n2", bench.lives["n2"])
    job = await bench.job(watcher="n1")
    assert (job.phase, generation(job).holders) == ("paused", {})
    assert (await bench.kinds())[-2:] == ["NodeLeft", "JobPaused"]


async def test_a_member_that_left_is_no_holder_later(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    await bench.store.leave("n2", bench.lives["n2"])
    job = await bench.propose(job, "n1")
    assert set(generation(job).holders) == {"n1"}


async def test_an_agents_restart_keeps_its_holders(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    job = await bench.propose(job, "n1")
    await bench.join("n1", start=2)
    job = await bench.job(watcher="n1")
    assert generation(job).holders["n1"].life == "n1-a"
    assert generation(await bench.ack(job, "n1")).state == "active"


async def test_a_new_life_holds_nothing_of_the_old_one(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.end(job, "pausing")
    await bench.ack(job, "n1")
    await bench.lapse("n2", "n1")
    assert (await bench.job(watcher="n1")).phase == "pausing"
    await bench.join("n2", life="n2-b")
    job = await bench.job(watcher="n1")
    assert (job.phase, generation(job).holders) == ("paused", {})
    await bench.beat("n2")
    await bench.propose(await bench.submit("u2", name="other"), "n1", "n2")  # their devices are free


async def test_a_node_silent_for_longer_than_anything_may_be_lent_is_forgotten_but_for_its_cordon(bench: Bench) -> None:
    await bench.up("n1", "n2")
    cordon = Cordon(reason="fan", by="ann", at=1.0)
    await bench.store.cordon("n2", cordon, "c1")
    await bench.lapse("n2", "n1")
    rev = (await bench.beat("n1")).rev
    await bench.age(millis(RELEASE * FAST.failsafe_limit))
    await bench.beat("n1")
    await bench.join("n3")
    reply = await bench.beat("n1", rev=rev)
    assert reply.gone == ("node:n2",)
    assert reply.lapsed == ()
    await bench.join("n2", life="n2-b")
    assert next(n for n in (await bench.beat("n1")).nodes if n.id == "n2").cordon == cordon


async def test_one_join_forgets_only_some_of_many_silent_nodes(bench: Bench) -> None:
    silent = [f"old{n}" for n in range(12)]
    await bench.up("n0", *silent)
    for node in silent:
        await bench.lapse(node, "n0")
    await bench.age(millis(RELEASE * FAST.failsafe_limit))
    await bench.beat("n0")
    left = []
    for name in ("n1", "n2"):
        await bench.join(name)
        left.append(sum(node.id in silent for node in (await bench.beat("n0")).nodes))
    assert left == [4, 0]


async def test_pods_are_published_by_node_and_expire(bench: Bench) -> None:
    await bench.up("n1", "n2")

    def pod(node: str, uid: str, phase: str) -> PodState:
        return PodState.model_validate({"uid": uid, "job": "train", "role": "worker", "node": node, "phase": phase})

    await bench.beat("n2", pods=(pod("n2", "u1", "ready"), pod("n2", "u2", "stuck")))
    began = time.monotonic()
    await bench.beat("n1", pods=(pod("n1", "u1", "running"),))
    reported = await bench.store.pods({"u1": ["n2", "n1", "n3"], "u2": ["n2"], "u9": ["n1"]})
    assert reported == {
        "u1": (pod("n1", "u1", "running"), pod("n2", "u1", "ready")), "u2": (pod("n2", "u2", "stuck"),), "u9": (),
    }  # fmt: skip
    assert await bench.store.pods({"u1": ["n2"]}) == {"u1": (pod("n2", "u1", "ready"),)}, "only where it is asked for"
    assert await bench.store.pods({}) == {}
    await bench.beat("n2", pods=(pod("n2", "u1", "gone"),))
    reported = await bench.store.pods({"u1": ["n1", "n2"], "u2": ["n2"]})
    assert [p.phase for p in reported["u1"]] == ["running", "gone"]
    assert reported["u2"] == (pod("n2", "u2", "stuck"),)  # not named: left to expire
    left = await bench.pod_ttl("u1", "n1")
    took = math.ceil((time.monotonic() - began) * 1000) + 1  # the server counts whole milliseconds
    assert 30_000 - took <= left <= 30_000


@pytest.mark.parametrize("length", [LONG, 50])
async def test_the_lease_has_the_length_that_was_asked_for(bench: Bench, length: int) -> None:
    await bench.up("n1", "n2")
    before = await bench.beat("n1")
    await bench.renew("n2", length)
    after = await bench.beat("n1")
    if after.next_lapse is None:
        assert "n2" in after.lapsed
    else:
        assert before.served + length <= after.served + after.next_lapse <= after.served + length


async def test_what_a_node_has_to_tell_is_in_the_event_log(bench: Bench) -> None:
    await bench.up("n1")
    notes = (Note(kind="RepairStarted", text="reboot: began"), Note(kind="RepairDone", text="it was 'fine'"))
    await bench.beat("n1", notes=notes)
    events = (await bench.store.events("0-0", 10))[-2:]
    assert [(e.kind, e.node, e.by, e.text) for e in events] == [(n.kind, "n1", "n1", n.text) for n in notes]
    await refused("stale", bench.beat("n1", seq=1, notes=notes))
    assert await bench.kinds() == ["NodeJoined", "RepairStarted", "RepairDone"]


async def test_a_beat_renews_nothing(bench: Bench) -> None:
    """That is the lease process's: a node without one can run nothing."""
    await bench.up("n1")
    await bench.join("n2")
    async with asyncio.timeout(BOUND):
        while "n2" not in (await bench.beat("n1")).lapsed:
            await bench.only_beat("n2")
            await bench.sleep(0.05)


async def test_only_the_life_that_holds_the_lease_renews_it(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    assert await bench.renew("n2") == {}
    await refused("lost", bench.renew("n2", life="n2-b"))
    await refused("unknown", bench.renew("n9", life="n9-a"))
    await bench.store.leave("n3", bench.lives["n3"])
    await refused("lost", bench.renew("n3"))
    job = await bench.active(await bench.submit(), "n1", "n2")
    await bench.lapse("n2", "n1")
    await bench.propose(job, "n1", lost=("n2",))
    await refused("lost", bench.renew("n2"))


async def test_nothing_is_renewed_in_another_era(bench: Bench) -> None:
    """An agent has to have been heard first: it may know of writes that were lost."""
    await bench.up("n1")
    era = await bench.era()
    await bench.restart()
    await refused("era", bench.renew("n1", era=era))
    await refused("era", bench.renew("n1", era=era))
    reply = await bench.only_beat("n1")
    assert reply.era != era
    await bench.renew("n1", era=reply.era)


async def test_a_renewal_says_nothing_for_what_its_node_knows(bench: Bench) -> None:
    """A store that may have lost writes still waits for the node's agent."""
    for node in ("n1", "n2", "n3", "n4"):
        await bench.join(node, regroup=5000)
        await bench.beat(node)
    await bench.restart()
    awaited = (await bench.only_beat("n2")).awaited
    for node in ("n1", "n3", "n4"):
        await bench.renew(node)
    assert (await bench.only_beat("n2")).awaited == awaited == ("n1", "n3", "n4")


async def test_who_asks_learns_which_jobs_wait_for_its_node(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2")
    assert await bench.renew("n1", asks=True) == {}
    job = await bench.propose(job, "n2", "n3")
    assert await bench.renew("n1", asks=True) == {job.uid: 1}, "it may still run the old generation"
    assert await bench.renew("n3", asks=True) == {}, "the job goes on without one that has not acknowledged"
    assert await bench.renew("n1") == {}
    await bench.ack(job, "n1")
    assert await bench.renew("n1", asks=True) == {}


async def mute(bench: Bench, node: str) -> bool:
    """What another node's agent reads."""
    return next(one.mute for one in (await bench.beat("n2")).nodes if one.id == node)


async def test_a_node_whose_agent_is_silent_is_mute_until_that_speaks(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.renew("n1")
    assert not await mute(bench, "n1"), "nobody asked"
    before = (await bench.beat("n2")).rev
    await bench.renew("n1", asks=True)
    seen = await bench.beat("n2")
    assert await mute(bench, "n1") and not await mute(bench, "n2")
    assert seen.rev == before + 1
    await bench.renew("n1", asks=True)
    assert (await bench.beat("n2")).rev == seen.rev, "it is said once"
    await bench.renew("n1")
    assert await mute(bench, "n1"), "the lease process alone is not the agent"
    await bench.only_beat("n1")
    assert not await mute(bench, "n1")
    assert (await bench.beat("n2")).rev == seen.rev + 1
    assert (await bench.kinds())[2:] == ["AgentSilent", "AgentBack"]


async def test_where_answers_come_late_a_node_is_mute_only_for_a_job_that_waits(bench: Bench) -> None:
    """Answers may come late to all nodes, and each mark wakes all agents."""
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2")
    before = (await bench.beat("n2")).rev
    assert await bench.renew("n1", asks=True, late=True) == {}
    assert (await bench.beat("n2")).rev == before
    await bench.propose(job, "n2", "n3")
    assert await bench.renew("n1", asks=True, late=True) == {job.uid: 1}
    assert await mute(bench, "n1")
    assert (await bench.kinds())[-1] == "AgentSilent"


async def test_a_beat_of_an_agent_whose_answers_may_be_lost_does_not_end_that(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.renew("n1", asks=True)
    view = await bench.beat("n2")
    for _ in range(3):
        await bench.beat("n1", rev=view.rev, era=view.era, silent=view.silent, unanswered=True)
    assert (await bench.beat("n2")).rev == view.rev
    await bench.beat("n1", new_facts=facts("n1", cpu_slots=5), unanswered=True)
    assert await mute(bench, "n1")
    await bench.only_beat("n1")
    assert not await mute(bench, "n1")
    assert (await bench.kinds())[2:] == ["AgentSilent", "AgentBack"]


async def test_what_an_agent_brings_with_the_beat_that_ends_its_silence_is_kept(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.renew("n1", asks=True)
    ready = {"u1": Readiness(state="ready")}
    await bench.beat("n1", readiness=ready)
    (node,) = (one for one in (await bench.beat("n2")).nodes if one.id == "n1")
    assert (node.mute, node.readiness) == (False, ready)


async def test_a_node_that_comes_and_goes_pushes_out_no_events_but_its_own(bench: Bench) -> None:
    """Two events each time, without end, would empty the audit log for everybody else."""
    await bench.up("n1", "n2")
    await bench.renew("n2", asks=True)
    await bench.submit()
    for _ in range(15):
        await bench.renew("n1", asks=True)
        await bench.only_beat("n1")
    kinds = ["AgentSilent", "AgentBack"] * 10
    assert [(event.kind, event.node) for event in await bench.store.events("0-0", 1000)] == [
        ("NodeJoined", "n2"), ("AgentSilent", "n2"), ("JobSubmitted", ""), *((kind, "n1") for kind in kinds),
    ]  # fmt: skip
    for life in range(15):
        await bench.leave("n1", "its life ends")
        await bench.join("n1", f"n1-{life}")
    assert await bench.kinds() == [
        "NodeJoined", "AgentSilent", "JobSubmitted", *["NodeLeft", "NodeJoined"] * 10
    ]  # fmt: skip


@pytest.mark.parametrize("life", ["n1-a", "another"])
async def test_an_agent_that_starts_speaks(bench: Bench, life: str) -> None:
    await bench.up("n1", "n2")
    await bench.renew("n1", asks=True)
    if life == "another":
        await bench.leave("n1", "its life ends")
    bench.lives["n1"] = Incarnation(life=life, start=2)
    await bench.store.join("n1", bench.lives["n1"], facts("n1"), FAST)
    assert not await mute(bench, "n1")
    last = (await bench.kinds())[-1]
    assert last == ("AgentBack" if life == "n1-a" else "NodeJoined")


async def test_what_somebody_wrote_of_it_holds_until_the_next_beat(bench: Bench) -> None:
    await bench.up("n1", "n2")
    view = await bench.beat("n1")
    async with bench.calls.link() as link:
        await link.ask("HSET", bench.calls.prefix + "node:n1", "mute", "1")
    for _ in range(2):  # the usual case must not overlook it
        view = await bench.beat("n1", rev=view.rev, era=view.era, silent=view.silent)
    async with bench.calls.link() as link:
        assert await link.ask("HGET", bench.calls.prefix + "node:n1", "mute") is None
    assert not await mute(bench, "n1")


async def test_nobody_becomes_mute_in_another_era_or_after_its_life(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await refused("era", bench.renew("n1", era="another", asks=True))
    await refused("lost", bench.renew("n1", life="another", asks=True))
    assert not await mute(bench, "n1")


async def test_a_lease_process_leaves_with_its_reason(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await refused("era", bench.leave("n2", "its agent is silent", era="another"))
    await bench.leave("n2", "its agent is silent")
    assert next(node.left for node in (await bench.beat("n1")).nodes if node.id == "n2")
    texts = [event.text for event in await bench.store.events("0-0", 100)]
    assert "node n2 left: its agent is silent" in texts
