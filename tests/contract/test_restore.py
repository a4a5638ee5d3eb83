"""Restore: what an emptied store, or one that went back in time, takes from agents, and what it refuses meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from nodeagent.model.job import Admission, Control, JobRecord, Setback
from nodeagent.model.node import Cordon, Incarnation, NodeRecord, Readiness
from nodeagent.model.timing import Timing, millis
from nodeagent.store.base import KeyMark
from nodeagent.store.client import RedisStore
from nodeagent.store.messages import BeatReply, Restored, StoreCopy
from tests.contract.bench import FAST, LASTING, LONG, Bench, facts, generation, refused, spec
from tests.submitting import submit_one


@dataclass
class View:
    """What one agent has read."""

    reply: BeatReply
    timing: Timing = FAST

    @property
    def jobs(self) -> dict[str, JobRecord]:
        return {job.uid: job for job in self.reply.jobs}

    @property
    def nodes(self) -> dict[str, NodeRecord]:
        return {node.id: node for node in self.reply.nodes}

    def offer(self, **more: object) -> StoreCopy:
        """The whole view in one page."""
        plain: dict[str, object] = {
            "cluster_uid": self.reply.cluster_uid,
            "timing": self.timing,
            "era": self.reply.era,
            "rev": self.reply.rev,
            "served": self.reply.served,
            "by": "n1",
            "nodes": self.reply.nodes,
            "jobs": self.reply.jobs,
            "queues": self.reply.queues,
            "windows": self.reply.windows,
            "uids": tuple(self.jobs),
        }
        return StoreCopy.model_validate(plain | more)


async def read(bench: Bench, node: str = "n1") -> View:
    return View(await bench.beat(node), bench.timing)


async def read_after(bench: Bench, node: str = "n1") -> View:
    """Everything, once the recovery is over."""
    await bench.recovered(node)
    return await read(bench, node)


async def rejoin(bench: Bench, *nodes: str) -> None:
    """The same lives, as agents do after their offer; with leases that hold."""
    for node in nodes:
        await bench.join(node)
        await bench.beat(node)


async def test_an_emptied_store_is_given_everything_back(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.beat("n2", readiness={"u1": Readiness(state="ready")})
    await bench.store.cordon("n2", Cordon(reason="fan", by="ann", at=1.5), "c1")
    first = await bench.active(await bench.submit(), "n1")
    first = await bench.report(first, "n1", "failed", "exit 1")
    late = (Setback(node="n2", kind="unanswered", life="n2-a", times=2, at=7),)
    second = await bench.ack(await bench.propose(first, "n1", setbacks=late), "n1")
    assert second.setbacks == late
    await bench.report(second, "n1", "running")
    await bench.submit("u2", "other")
    view = await read(bench)
    await bench.put_back(None)
    await refused("behind", bench.beat("n1", era=view.reply.era, rev=view.reply.rev))
    done = await bench.store.restore(view.offer())
    assert (done.recovering, done.known) == (True, view.reply.rev)
    await rejoin(bench, "n1", "n2")
    after = await read_after(bench)
    assert after.jobs == view.jobs
    assert after.reply.cluster_uid == view.reply.cluster_uid
    assert after.reply.era == done.era != view.reply.era
    assert after.reply.served >= view.reply.served
    assert after.nodes["n2"].model_copy(update={"rev": 0}) == view.nodes["n2"].model_copy(update={"rev": 0})
    assert "StoreRestored" in await bench.kinds()


async def test_what_forms_is_acknowledged_anew_by_all(bench: Bench) -> None:
    """A view may have some of the acknowledgements, and not what all of them come to."""
    await bench.up("n1", "n2")
    first = await bench.active(await bench.submit(), "n1", "n2", failsafe_members={"n1": "n1-a"})
    job = await bench.ack(await bench.propose(first, "n1", "n2"), "n1")
    assert (set(generation(job).missing), generation(job).released) == ({"n2"}, True)
    view = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1", "n2")
    await bench.recovered("n1")
    job = await bench.job("u1")
    made = generation(job)
    assert (made.state, made.missing, set(made.holders)) == ("forming", {"n1": "n1-a", "n2": "n2-a"}, {"n2"})
    assert (made.address, made.store_hosted, made.seal, made.released) == ("", False, "", False)
    job = await bench.ack(job, "n2")
    assert generation(job).state == "forming"
    job = await bench.ack(job, "n1")
    assert (generation(job).state, generation(job).address) == ("active", "n1:29500")


async def test_what_was_signed_is_given_back_and_can_be_renewed(bench: Bench) -> None:
    await bench.up("n1")
    first, second = (Admission(by="né", issued=n, expires=n + 60, signature=f"s{n}") for n in (1000, 2000))
    control = Control(rev=1, target=2, by="ann", signature="c")
    await submit_one(bench.store, "u1", spec("train"), 1, 1.0, "ann", "", control=control, admission=first)
    view = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    await bench.recovered("n1")
    job = await bench.job("u1")
    assert (job.control, job.admission) == (control, first)
    assert (await bench.store.renew("u1", "s1000", second)).admission == second


async def test_after_it_numbers_names_devices_and_the_queue_go_on(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.active(await bench.submit(), "n1"), "n1")
    view = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    await bench.recovered("n1")
    await refused("name_taken", bench.submit("u9"))
    other = await bench.submit("u2", "other")
    assert other.order > job.order
    await refused("busy", bench.propose(other, "n1"))
    assert generation(await bench.propose(job, "n1")).number == 3


async def test_nothing_is_decided_while_it_recovers(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1")
    queued = await bench.submit("u2", "other")
    await bench.restart()
    for call in (
        bench.propose(job, "n1", "n2"),
        bench.ack(job, "n1"),
        bench.store.activate(job.uid, generation(job).token),
        bench.report(job, "n1"),
        bench.end(job, "holding"),
        bench.submit("u3", "third"),
        bench.set_control(queued, "c9", desired="stop"),
        bench.store.remove("u2"),
        bench.store.cordon("n2", None, "c1"),
        bench.store.leave("n2", bench.lives["n2"]),
    ):
        text = await refused("recovering", call)
    assert "try again" in text
    reply = await bench.beat("n1")
    assert (reply.recovering, reply.jobs, reply.nodes, reply.rev) == (True, (), (), 0)
    await bench.usual_time_passes()
    await bench.recovered("n1")
    assert (await bench.job()) == job
    await bench.propose(job, "n1", "n2")


async def test_a_restart_that_lost_nothing_is_the_same_history(bench: Bench) -> None:
    await bench.up("n1")
    await bench.submit()
    view = await read(bench)
    await bench.restart()
    known = {"era": view.reply.era, "rev": view.reply.rev}
    reply = await bench.beat("n1", **known)  # type: ignore[arg-type]
    assert reply.era != view.reply.era
    done = await bench.store.restore(view.offer(nodes=(), jobs=(), uids=None))
    assert done.known >= view.reply.rev, "nothing is wanted of this agent"
    assert done.era == reply.era
    while (reply := await bench.beat("n1", **known)).recovering:  # type: ignore[arg-type]
        await bench.sleep(0.05)
    assert (reply.jobs, reply.gone) == ((), ())


async def test_what_was_lost_comes_back_and_nothing_is_undone(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2")
    await bench.submit("u2", "gone")
    kept = await bench.keep()
    old = await read(bench, "n3")
    job = await bench.active(job, "n1")
    doomed = await bench.job("u2")
    await bench.set_control(doomed, "c9", desired="stop")
    await bench.end(await bench.job("u2"), "stopped")
    await bench.store.remove("u2")
    await bench.submit("u3", "new")
    new = await read(bench)
    await bench.put_back(kept)
    await refused("behind", bench.beat("n1", era=new.reply.era, rev=new.reply.rev))
    await bench.beat("n3", era=old.reply.era, rev=old.reply.rev)  # had read no more than the store has
    done = await bench.store.restore(new.offer())
    await refused("behind", bench.beat("n3", era=old.reply.era, rev=old.reply.rev))  # it must read all again
    assert await bench.store.restore(old.offer()) == done
    await bench.usual_time_passes()
    after = await read_after(bench)
    assert after.jobs == new.jobs
    assert generation(await bench.propose(after.jobs["u1"], "n1", "n2")).number == 3


async def test_a_lost_life_with_a_new_lease_is_outlasted(bench: Bench) -> None:
    """It ran on lent time, and came before the view that knows of its loss: its workers may run on that lease."""
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    old = await read(bench)
    await bench.lapse("n2", "n1")
    await bench.propose(job, "n1", lost=("n2",))
    new = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(old.offer(regroup=60_000, awaited=("n1", "n2", "n3")))
    await rejoin(bench, "n1", "n2")
    await bench.pass_served(millis(FAST.credit + FAST.lease), "n1")
    await bench.renew("n2", millis(FAST.lease))
    later = new.reply.served + 10_000  # served time jumps, and the lease is not shorter for that
    await bench.store.restore(new.offer(regroup=60_000, awaited=("n1",), served=later))
    await bench.join("n1")
    await refused("lost", bench.join("n2"))
    await bench.recovered("n1")
    assert (await bench.beat("n1")).served > later + 100


async def test_the_newest_view_wins_in_any_order(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    await bench.submit("u2", "gone")
    old = await read(bench)
    await bench.end(await bench.job("u2"), "stopped")
    await bench.store.remove("u2")
    await bench.active(job, "n2")
    new = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(old.offer())
    await bench.store.restore(new.offer())
    await bench.store.restore(old.offer())
    await rejoin(bench, "n1", "n2")
    assert (await read_after(bench)).jobs == new.jobs


async def test_a_step_that_only_its_taker_has_seen_is_kept(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.submit()
    view = await read(bench)
    newer = await bench.active(job, "n1", "n2")
    await bench.put_back(None)
    await bench.store.restore(view.offer())
    await bench.store.restore(view.offer(rev=view.reply.rev - 1, nodes=(), jobs=(newer,), uids=None))
    await rejoin(bench, "n1", "n2")
    assert (await read_after(bench)).jobs == {"u1": newer}


async def test_a_node_whose_agent_was_silent_stays_mute_until_that_speaks(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.renew("n2", asks=True)
    view = await read(bench)
    assert view.nodes["n2"].mute
    await bench.put_back(None)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    assert (await read_after(bench)).nodes["n2"].mute
    await rejoin(bench, "n2")
    assert not (await read(bench)).nodes["n2"].mute


async def test_a_step_that_only_its_taker_has_seen_is_missed(bench: Bench) -> None:
    """The store went back by that one step."""
    bench.timing = LASTING
    await bench.up("n1", "n2")
    job = await bench.submit()
    kept, view = await bench.keep(), await read(bench)
    newer = await bench.active(job, "n1", "n2")
    await bench.put_back(kept)
    await bench.beat("n2", era=view.reply.era, rev=view.reply.rev)
    await refused("behind", bench.beat("n1", era=view.reply.era, rev=view.reply.rev, top=newer.rev))
    one = view.offer(top=newer.rev, nodes=(), jobs=(), uids=None)
    assert (await bench.store.restore(one)).known == view.reply.rev, "what is newer is wanted"
    await bench.store.restore(one.model_copy(update={"jobs": (newer,)}))
    await refused("behind", bench.beat("n2", era=view.reply.era, rev=view.reply.rev))
    await rejoin(bench, "n1", "n2")
    await bench.usual_time_passes()
    assert (await read_after(bench)).jobs == {"u1": newer}


async def test_a_view_that_is_not_complete_makes_no_later_revision_lower(bench: Bench) -> None:
    """Else its job would go on with revisions lower than the one that agents know, and they would not see it change."""
    await bench.up("n1")
    await bench.submit()
    for _ in range(3):  # eras
        await bench.restart()
        await bench.recovered("n1")
    await bench.set_control(await bench.job(), "c1", target=1)
    view = await read(bench)
    await bench.put_back(None)
    partial = view.offer(rev=0, top=view.jobs["u1"].rev, uids=None)
    await bench.store.restore(partial.model_copy(update={"nodes": (), "jobs": ()}))  # asks first
    await bench.store.restore(partial)
    await rejoin(bench, "n1")
    after = await read_after(bench)
    assert after.jobs == view.jobs
    assert after.reply.rev > view.reply.rev
    job = await bench.set_control(after.jobs["u1"], "c2", target=2)
    assert job.rev > view.jobs["u1"].rev


async def test_a_view_may_come_in_pages(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1")
    for n in range(3):
        await bench.submit(f"u{n}", f"job{n}")
    view = await read(bench)
    await bench.put_back(None)
    one = view.offer(jobs=(), nodes=(), uids=None)
    assert (await bench.store.restore(one)).known == 0
    for job in view.jobs.values():
        done = await bench.store.restore(one.model_copy(update={"jobs": (job,)}))
        assert done.known == 0
    done = await bench.store.restore(one.model_copy(update={"nodes": view.reply.nodes, "uids": tuple(view.jobs)}))
    assert done.known == view.reply.rev
    await rejoin(bench, "n1")
    await bench.usual_time_passes()
    assert (await read_after(bench)).jobs == view.jobs


async def test_an_agent_without_a_memory_may_come_first(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    view = await read(bench)
    await bench.put_back(None)
    await bench.join("n2", start=2)  # restarted at that moment: it writes another cluster's identity
    await bench.beat("n2")
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    await bench.beat("n2")
    after = await read_after(bench)
    assert after.reply.cluster_uid == view.reply.cluster_uid
    assert after.jobs == {"u1": job}
    assert after.nodes["n2"].incarnation == Incarnation(life="n2-a", start=2)


async def test_a_cluster_that_an_offer_named_is_not_renamed_before_its_jobs_are_there(bench: Bench) -> None:
    await bench.up("n1")
    await bench.submit()
    view = await read(bench)
    await bench.put_back(None)
    await bench.join("n2")
    founded = View(await bench.beat("n2"))
    await bench.store.restore(view.offer(nodes=(), jobs=(), uids=None))  # asks first
    await refused("foreign", bench.store.restore(founded.offer()))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    after = await read_after(bench)
    assert (after.reply.cluster_uid, set(after.jobs)) == (view.reply.cluster_uid, {"u1"})


async def test_a_view_without_jobs_gives_way_to_one_with_jobs(bench: Bench) -> None:
    """An agent that had begun a cluster in an emptied store comes first to the next one that is emptied."""
    await bench.up("n1")
    await bench.submit()
    view = await read(bench)
    await bench.put_back(None)
    await bench.join("n2")
    founded = View(await bench.beat("n2"))
    await bench.put_back(None)
    await bench.store.restore(founded.offer(by="n2", holds=False))
    await bench.put_back(None)
    await bench.join("n3")
    other = View(await bench.beat("n3"))
    await bench.store.restore(founded.offer(by="n2", holds=False))
    await refused("foreign", bench.store.restore(other.offer(by="n3", holds=False)))
    await bench.store.restore(view.offer())
    await refused("foreign", bench.store.restore(founded.offer(by="n2", holds=False)))
    await rejoin(bench, "n1")
    after = await read_after(bench)
    assert (after.reply.cluster_uid, after.jobs) == (view.reply.cluster_uid, view.jobs)


async def test_who_knows_of_another_store_submits_nothing_to_an_emptied_one(bench: Bench) -> None:
    """Else the store would be another cluster's, and the first one's jobs would be lost."""
    await bench.up("n1")
    await bench.submit()
    view = await read(bench)
    await bench.put_back(None)
    await refused("stale", bench.submit("u2", "next", era=view.reply.era))
    await bench.join("n2")
    await refused("stale", bench.submit("u2", "next", era=view.reply.era))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    after = await read_after(bench)
    assert after.jobs == view.jobs
    assert (await bench.submit("u2", "next", era=after.reply.era)).name == "next"
    assert (await bench.submit("u2", "next", era=view.reply.era)).name == "next", "the same request again"


async def test_who_has_not_seen_a_restart_yet_may_submit(bench: Bench) -> None:
    await bench.up("n1")
    before = await read(bench)
    await bench.restart()
    await bench.recovered("n1")
    assert (await bench.submit(era=before.reply.era)).name == "train"


async def test_another_cluster_with_jobs_is_left_alone(bench: Bench) -> None:
    await bench.up("n1")
    await bench.submit()
    view = await read(bench)
    await bench.put_back(None)
    await bench.join("n2")
    await bench.beat("n2")
    other = await bench.submit("u9", "theirs")
    await refused("foreign", bench.store.restore(view.offer()))
    assert (await read(bench, "n2")).jobs == {"u9": other}
    await refused("timing", bench.store.restore(view.offer(timing=FAST.model_copy(update={"lease": 9.0}))))
    own, foreign = (RedisStore(bench.calls, KeyMark(key, "f")) for key in ("own", "foreign"))
    await own.join("n1", Incarnation(life="n1-a", start=1), facts("n1"), FAST)
    assert "node n1 has another cluster key" in await refused("key", foreign.restore(view.offer()))


async def test_an_offer_brings_the_digest_of_the_key_into_an_emptied_store(bench: Bench) -> None:
    own, foreign = (RedisStore(bench.calls, KeyMark(key, "f")) for key in ("own", "foreign"))
    bench.store = own
    await bench.up("n1")
    view = await read(bench)
    await bench.put_back(None)
    await own.restore(view.offer())
    await refused("key", foreign.join("n2", Incarnation(life="b", start=1), facts("n2"), FAST))


async def test_a_life_that_was_lost_stays_lost(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1", "n2")
    await bench.usual_time_passes()  # else nobody lapses yet
    job = await bench.active(await bench.submit(), "n1", "n2")
    kept = await bench.keep()
    await bench.lapse("n2", "n1")
    await bench.active(job, "n1", lost=("n2",))
    view = await read(bench)
    await bench.put_back(kept)
    await bench.beat("n2", readiness={"u1": Readiness(state="ready")})
    await bench.store.restore(view.offer())
    await refused("lost", bench.beat("n2"))
    await refused("lost", bench.join("n2"))


async def test_a_node_that_does_not_come_lapses_with_the_amnesty(bench: Bench) -> None:
    bench.timing = LASTING
    await bench.up("n1", "n2")
    view = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    reply = await bench.beat("n1")
    assert (reply.recovering, reply.lapsed) == (True, ())
    await bench.usual_time_passes()
    assert (await read_after(bench)).reply.lapsed == ("n2",)


async def test_who_comes_late_brings_back_lost_jobs_but_not_their_generations(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1")
    kept = await bench.keep()
    await bench.active(job, "n2")
    lost = await bench.active(await bench.submit("u2", "other"), "n2", first=2)
    view = await read(bench)
    await bench.put_back(kept)
    await bench.recovered("n1")
    await refused("behind", bench.beat("n2", era=view.reply.era, rev=view.reply.rev))
    done = await bench.store.restore(view.offer())
    assert not done.recovering
    jobs = (await read(bench)).jobs
    assert jobs["u1"] == job
    assert (jobs["u2"].phase, generation(jobs["u2"]).state, generation(jobs["u2"]).holders) == ("holding", "ended", {})
    assert jobs["u2"].spec == lost.spec
    assert generation(await bench.propose(jobs["u1"], "n1")).number == 3, "2 was given away in the lost history"
    assert await bench.store.restore(view.offer()) == done
    assert (await read(bench)).jobs["u2"] == jobs["u2"]


async def test_it_may_go_back_again_while_it_recovers(bench: Bench) -> None:
    await bench.up("n1")
    kept = await bench.keep()
    await bench.submit()
    view = await read(bench)
    await bench.put_back(kept)
    await bench.store.restore(view.offer())
    await bench.put_back(kept)
    await refused("behind", bench.beat("n1", era=view.reply.era, rev=view.reply.rev))
    done: Restored = await bench.store.restore(view.offer())
    assert done.recovering
    assert (await read_after(bench)).jobs == view.jobs


async def test_the_served_clock_never_goes_back(bench: Bench) -> None:
    await bench.up("n1")
    await bench.age(LONG)
    view = await read(bench)
    await bench.put_back(None)
    await bench.store.restore(view.offer())
    await bench.join("n1", timing=Timing.model_validate(FAST.model_dump()))
    assert (await bench.beat("n1")).served >= LONG
