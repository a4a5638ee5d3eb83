"""Propose: what it refuses, what it carries over, what it books."""

from __future__ import annotations

from nodeagent.model.job import Setback
from nodeagent.model.node import Cordon
from nodeagent.model.world import PodReport, Token
from tests.contract.bench import Bench, cause, generation, refused, spec, spend
from tests.submitting import submit_one


async def test_a_first_generation_is_formed(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.submit()
    job = await bench.propose(
        job, "n1", "n2", planned=True, grace=2.5, outside={"n9": "cordoned"}, cause=cause("first start")
    )
    made = generation(job)
    assert (job.phase, job.reason, job.restarts) == ("forming", "first start", 0)
    assert (made.number, made.state, made.holders, made.reports) == (1, "forming", {}, {})
    assert made.missing == {"n1": "n1-a", "n2": "n2-a"}
    assert (made.planned, made.grace, made.outside, made.control_rev) == (True, 2.5, {"n9": "cordoned"}, 1)
    assert made.members == bench.members("n1", "n2")
    assert made.deadline == made.since + 1000
    last = (await bench.store.events("0-0", -1))[0]
    assert (last.kind, last.job, last.uid, last.generation, last.by, last.text) == (
        "GenerationForming", "train", "u1", 1, "n1", "first start",
    )  # fmt: skip


async def test_the_same_id_again_returns_the_generation(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.submit()
    proposal = bench.proposal(job, bench.members("n1"))
    first = await bench.store.propose(proposal)
    assert await bench.store.propose(proposal) == first
    active = await bench.ack(first, "n1")
    assert await bench.store.propose(proposal) == active


async def test_what_changed_meanwhile_is_refused(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await refused("not_found", bench.store.propose(bench.proposal(await bench.submit(), {}, uid="nobody")))
    job = await bench.job()
    await refused("stale", bench.propose(job, "n1", expect=Token(number=1, id="x"), expect_state="forming"))
    await refused("stale", bench.propose(job, "n1", control_rev=2))
    formed = await bench.propose(job, "n1")
    await refused("stale", bench.propose(job, "n1", id="other"))
    await refused("stale", bench.propose(formed, "n1", expect_state="active"))
    await refused("stale", bench.propose(formed, "n1", expect=Token(number=1, id="x")))
    ended = await bench.end(formed, "stopped")
    await refused("ended", bench.propose(ended, "n1"))
    assert (await bench.job()) == ended


async def test_sizes_out_of_range_are_refused(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.submit(low=2, high=2)
    await refused("unsupported", bench.propose(job, "n1"))
    await refused("unsupported", bench.propose(job, "n1", "n2", "n3"))
    await bench.propose(job, "n1", "n2")


async def test_several_roles_may_come_to_have_more_places_or_fewer(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    one = spec("train", low=2, high=2).role
    roles = tuple(one.model_copy(update={"name": name}) for name in ("server", "trainer"))
    asked = spec("train").model_copy(update={"roles": roles})
    job = await submit_one(bench.store, "u1", asked, 1000, 12.25, "ann", "submit-u1")
    job = await bench.propose(job, "n1", "n2", "n3")
    job = await bench.store.control(
        "u1", 1, job.control.model_copy(update={"rev": 2, "target": 2, "sizes": {"server": 1, "trainer": 1}}), "s1",
        "JobScaled", "fewer",
    )  # fmt: skip
    formed = await bench.propose(job, "n1", id="fewer")
    assert list(generation(formed).members) == ["n1"] and formed.sized.nodes.target == 2


async def test_members_must_be_live_in_that_life_and_not_cordoned(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.submit()
    strange = {"n9": bench.members("n1")["n1"].model_copy(update={"node": "n9"})}
    await refused("not_live", bench.store.propose(bench.proposal(job, strange)))
    old = {"n1": bench.members("n1")["n1"].model_copy(update={"life": "before"})}
    await refused("not_live", bench.store.propose(bench.proposal(job, old)))
    await bench.store.cordon("n2", Cordon(reason="fan broke", by="ann", at=1.0), "c1")
    assert "fan broke" in await refused("not_live", bench.propose(job, "n1", "n2"))
    await bench.store.cordon("n2", None, "c2")
    await bench.lapse("n2", "n1")
    await refused("not_live", bench.propose(job, "n1", "n2"))
    await bench.beat("n2")
    await bench.store.leave("n2", bench.lives["n2"])
    await refused("not_live", bench.propose(job, "n1", "n2"))
    assert (await bench.job(watcher="n1")).generation is None


async def test_lost_nodes_must_be_named_by_the_generation_and_lapsed(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2")
    assert "n2 holds its lease" in await refused("stale", bench.propose(job, "n1", lost=("n2",)))
    await bench.lapse("n3", "n1")
    await refused("stale", bench.propose(job, "n1", lost=("n3",)))
    assert not any(n.lost for n in (await bench.beat("n1")).nodes)


async def test_members_of_an_active_generation_become_holders(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    old = await bench.active(await bench.submit(), "n1", "n2")
    await bench.report(old, "n2", "failed", "exit 1")
    job = await bench.propose(old, "n1", "n3", spend=spend())
    made = generation(job)
    assert made.number == 2
    assert made.holders == generation(old).members
    assert made.reports == {}
    assert (job.last_number, job.last_reports["n2"].reason) == (1, "exit 1")
    assert job.budget == {"1": spend()}


async def test_lost_nodes_are_marked_and_hold_nothing(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    await bench.lapse("n2", "n1")
    job = await bench.propose(job, "n1", lost=("n2",))
    assert set(generation(job).holders) == {"n1"}
    assert next(n for n in (await bench.beat("n1")).nodes if n.id == "n2").lost
    assert (await bench.kinds())[-2:] == ["NodeLost", "GenerationForming"]


async def test_a_node_that_came_back_with_another_life_may_be_lost_and_member_at_once(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    await bench.lapse("n2", "n1")
    await bench.join("n2", life="n2-b")
    await bench.beat("n2")
    job = await bench.propose(job, "n1", "n2", lost=("n2",))
    assert set(generation(job).holders) == {"n1"}
    assert generation(job).members["n2"].life == "n2-b"
    assert not any(n.lost for n in (await bench.beat("n1")).nodes)
    await bench.ack(job, "n2")
    assert generation(await bench.ack(job, "n1")).state == "active"


async def test_a_superseded_forming_generation_adds_no_holders_and_carries_the_old_ones(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.propose(job, "n1", "n3", spend=spend("first"))
    job = await bench.ack(job, "n1")
    assert set(generation(job).holders) == {"n2"}
    job = await bench.propose(job, "n1", spend=spend("second"))
    assert set(generation(job).holders) == {"n2"}
    assert (generation(job).number, set(generation(job).missing)) == (3, {"n1"})
    assert job.last_number == 1
    assert job.budget == {"1": spend("second")}  # one slot for each generation that was active
    job = await bench.propose(job, "n1")
    assert job.budget == {"1": spend("second")}


async def test_spend_before_anything_was_active_is_dropped(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.propose(await bench.submit(), "n1")
    job = await bench.propose(job, "n1", spend=spend())
    assert job.budget == {}


async def test_the_budget_keeps_its_last_64_entries(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.submit()
    for _ in range(67):
        job = await bench.active(job, "n1", spend=spend())
    assert sorted(map(int, job.budget)) == list(range(3, 67))


async def test_devices_are_one_jobs_until_its_holders_are_gone(bench: Bench) -> None:
    await bench.up("n1", "n2")
    one = await bench.active(await bench.submit("u1", name="one"), "n1", "n2")
    two = await bench.submit("u2", name="two")
    assert "u1" in await refused("busy", bench.propose(two, "n1"))
    await bench.propose(two, "n1", first=2)
    two = await bench.propose(await bench.job("u2"), "n2", first=2)  # n1's are free again
    one = await bench.propose(one, "n1", first=2)  # so they are one's now, with those it still holds
    await refused("busy", bench.propose(two, "n1"))
    await refused("busy", bench.propose(two, "n1", first=2))
    await bench.ack(one, "n1")
    two = await bench.propose(two, "n1")  # only member's devices are left to one
    await refused("busy", bench.propose(two, "n2"))
    await bench.ack(one, "n2")
    await bench.propose(two, "n2")


async def test_a_job_may_use_what_its_own_holders_are_freeing(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    job = await bench.propose(job, "n1")
    assert set(generation(job).holders) == {"n1"}


async def test_restart_is_answered_and_the_backoff_is_over(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    job = await bench.set_control(job, "r1", restart=3)
    job = await bench.end(job, "holding", delay_ms=5000)
    assert job.not_before == generation(job).since + 5000
    job = await bench.propose(job, "n1")
    assert (job.restart_done, job.not_before, job.phase) == (3, 0, "forming")


async def test_losing_a_node_frees_it_in_every_job(bench: Bench) -> None:
    await bench.up("n1", "n2")
    one = await bench.active(await bench.submit("u1", name="one"), "n1", "n2")
    two = await bench.active(await bench.submit("u2", name="two"), "n2", first=2)
    two = await bench.end(two, "pausing")
    await bench.lapse("n2", "n1")
    await bench.propose(one, "n1", lost=("n2",))
    two = await bench.job("u2", watcher="n1")
    assert (two.phase, generation(two).holders) == ("paused", {})


async def test_last_reports_take_the_final_word_of_an_ack(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    await bench.report(job, "n1", "failed", "exit 1")
    job = await bench.propose(job, "n1", "n2")
    job = await bench.ack(job, "n2", last=PodReport(state="failed", reason="exit 9"))
    job = await bench.ack(job, "n1", last=PodReport(state="failed", reason="exit 1, with its last lines"))
    assert {n: (r.seq, r.reason) for n, r in job.last_reports.items()} == {
        "n1": (1, "exit 1, with its last lines"),
        "n2": (2, "exit 9"),
    }


async def test_what_a_job_remembers_of_late_nodes_stays_until_a_step_brings_other(bench: Bench) -> None:
    await bench.up("n1", "n2")
    late = tuple(Setback(node=f"n{i}", kind="unanswered", life=f"n{i}-a", times=i, at=10**12 + i) for i in (1, 2))
    job = await bench.submit()
    assert job.setbacks == ()
    job = await bench.propose(job, "n1", setbacks=late)
    assert job.setbacks == late
    job = await bench.ack(job, "n1")
    job = await bench.propose(job, "n1")
    assert (generation(job).number, job.setbacks) == (2, late), "a step that says nothing of it leaves it"
    job = await bench.end(job, "holding")
    assert job.setbacks == late
    job = await bench.propose(job, "n1", setbacks=())
    assert job.setbacks == ()
    job = await bench.end(job, "holding", setbacks=late[:1])
    assert job.setbacks == late[:1] == (await bench.job()).setbacks
