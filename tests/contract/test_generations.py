"""Ack, activate, report and end: how a generation becomes active, what is said of it, and how it ends."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from nodeagent.model.job import BudgetEntry, JobRecord, Outcome, Phase
from nodeagent.model.jobspec import Policy
from nodeagent.model.node import Incarnation
from nodeagent.model.pod import RankFacts, Stall
from nodeagent.model.world import BRIEF, Ack, AloneRestart, PodReport, Token, WorkerExit
from nodeagent.store.messages import Judgement
from tests.contract.bench import Bench, generation, refused, spend


async def test_the_last_ack_activates(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.propose(await bench.submit(), "n2", "n1")
    job = await bench.ack(job, "n1")
    assert (generation(job).state, set(generation(job).missing)) == ("forming", {"n2"})
    job = await bench.ack(job, "n2")
    made = generation(job)
    assert (made.state, made.address, made.store_hosted, made.deadline) == ("active", "n2:29500", True, 0)
    assert (job.phase, job.reason, job.active) == ("running", "generation 1 runs on 2 nodes", made.token)
    assert (job.restarts, job.first_active) == (0, made.since)
    assert job.started is not None
    assert job.started > 0
    assert (await bench.kinds())[-1] == "GenerationActive"
    job = await bench.active(job, "n1")
    assert (job.restarts, job.active) == (1, Token(number=2, id="u1-g2"))
    assert job.first_active == made.since
    assert job.reason == "generation 2 runs on 1 node"


async def test_how_long_it_runs_begins_anew_after_a_wait_only(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1")
    first = job.running_since
    assert first == generation(job).since
    await bench.sleep(0.02)
    job = await bench.active(job, "n1", "n2")
    assert generation(job).since > first
    assert job.running_since == first, "its gang was formed anew"
    job = await bench.end(job, "holding", planned=True)
    assert job.running_since is None
    for node in ("n1", "n2"):
        job = await bench.ack(job, node)
    job = await bench.active(job, "n1")
    assert job.running_since == generation(job).since > first


async def test_how_long_it_stands_begins_anew_when_it_has_run_or_was_paused(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1")
    assert job.stands_since is None
    job = await bench.end(job, "holding")
    first = job.stands_since
    assert first == job.since
    await bench.sleep(0.02)
    job = await bench.ack(job, "n1")
    job = await bench.propose(job, "n2")
    assert (job.phase, job.stands_since) == ("forming", first), "it only tries"
    assert job.since > first
    job = await bench.end(job, "holding")
    assert (job.phase, job.stands_since) == ("holding", first)
    job = await bench.ack(job, "n2")
    job = await bench.end(job, "paused")
    assert (job.phase, job.stands_since) == ("paused", None)
    job = await bench.propose(job, "n1")
    assert job.stands_since == job.since > first
    job = await bench.ack(job, "n1")
    assert (job.phase, job.stands_since) == ("running", None)


async def test_an_ack_again_changes_nothing(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    assert await bench.ack(job, "n1") == job
    job = await bench.propose(job, "n1")
    job = await bench.ack(job, "n2")
    assert await bench.ack(job, "n2") == job
    assert set(generation(job).holders) == {"n1"}


async def test_acks_are_kept_for_all_members_together(bench: Bench) -> None:
    await bench.up("n1", "n2")

    async def say(job: JobRecord, node: str, first: str, **more: object) -> JobRecord:
        signature = first + "0000000f" * 7
        ack = Ack.model_validate({"life": f"{node}-a", "signature": signature, "address": "", **more})
        return await bench.store.ack(job.uid, generation(job).token, node, bench.lives[node], ack, None)

    job = await bench.propose(await bench.submit(), "n1", "n2")
    job = await say(job, "n1", "ffffffff")
    assert (set(generation(job).missing), generation(job).seal) == ({"n1", "n2"}, ""), (
        "the first one has no address for the others"
    )
    job = await say(job, "n1", "ffffffff", address="n1:7", host="10.0.0.1", stopped=0.5, ready=0.25)
    again = await say(job, "n1", "ffffffff", address="n1:8", host="10.9.9.9", stopped=9.5)
    assert again == job, "once is enough"
    job = await say(job, "n2", "00000002", host="10.0.0.2", stopped=0.125, ready=0.375)
    made = generation(job)
    assert (made.state, made.address, made.missing) == ("active", "n1:7", {})
    assert made.seal == " ".join(["4294967297", *["30"] * 7])
    assert made.hosts == {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    assert (made.stopped, made.ready) == (0.5, 0.375)
    job = await bench.propose(job, "n2")
    made = generation(job)
    assert (made.address, made.store_hosted, made.seal, made.stopped, made.ready) == ("", False, "", 0.0, 0.0)
    assert made.hosts == {"n2": "10.0.0.2"}, "mostly it stays as it is"
    job = await say(job, "n2", "00000001", address="n2:7", host="10.0.0.3")
    assert (generation(job).hosts, generation(job).seal) == ({"n2": "10.0.0.3"}, " ".join(["1", *["15"] * 7]))


async def test_a_port_that_is_none_leaves_the_record_readable(bench: Bench) -> None:
    """It came from a pod: as 1e+15 nobody could read it, and all agents restored the store again and again."""
    await bench.up("n1")
    job = await bench.propose(await bench.submit(), "n1")
    with pytest.raises(ValidationError):
        Ack(life="n1-a", ports=(10**15,))
    ports = (29400, 10**15)  # of an agent of an earlier version
    ack = Ack.model_construct(life="n1-a", address="n1:7", signature="0000000f" * 8, ports=ports)
    job = await bench.store.ack(job.uid, generation(job).token, "n1", bench.lives["n1"], ack, None)
    assert generation(job).ports == {"n1": ports}
    assert generation(await bench.job()).ports == {"n1": ports}


async def test_an_ack_that_comes_late_says_nothing_of_what_ran_since(bench: Bench) -> None:
    """n1 sent its ack twice; the first one arrives when the generation that it was for has run and is being ended."""
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2", failsafe_members={"n1": "n1-a"})
    ended = await bench.end(job, "pausing")
    assert (
        await bench.store.ack(job.uid, generation(job).token, "n1", bench.lives["n1"], Ack(life="n1-a"), None) == ended
    )
    assert (set(generation(ended).holders), set(ended.failsafe_members)) == ({"n1", "n2"}, {"n1"})
    stopped = await bench.ack(ended, "n1")
    assert (set(generation(stopped).holders), stopped.failsafe_members) == ({"n2"}, {})


async def test_a_holder_may_tell_which_roles_have_ended(bench: Bench) -> None:
    """It stays a holder, and a member that has yet to acknowledge; nothing else changes."""
    await bench.up("n1", "n2")
    ran = await bench.active(await bench.submit(), "n1", "n2", failsafe_members={"n1": "n1-a"})
    job = await bench.propose(ran, "n1", "n2")
    before = generation(job)
    for down in (("trainer",), ("judge", "trainer")):
        ack = Ack(life="n1-a", address="n1:7", down=down)
        job = await bench.store.ack(job.uid, before.token, "n1", bench.lives["n1"], ack, PodReport(state="left"))
        held = {**before.holders, "n1": before.holders["n1"].model_copy(update={"down": down})}
        assert generation(job) == before.model_copy(update={"holders": held})
        assert job.last_reports == {}
    assert await bench.job() == job
    late = Ack(life="n1-a", ended=True, down=("server",))
    assert await bench.store.ack(job.uid, before.token, "n1", bench.lives["n1"], late, None) == job
    job = await bench.ack(job, "n1")
    assert set(generation(job).holders) == {"n2"}
    job = await bench.ack(job, "n2")
    assert (generation(job).state, generation(job).members["n1"].down) == ("active", ())


async def test_no_generation_is_active_while_a_holder_is_left(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.propose(job, "n1", "n3")
    await bench.ack(job, "n1")
    job = await bench.ack(job, "n3")
    assert (generation(job).state, set(generation(job).holders)) == ("forming", {"n2"})
    assert "n2 may still run" in await refused("not_live", bench.store.activate(job.uid, generation(job).token))
    job = await bench.ack(job, "n2")  # no member: it only stopped what it had
    assert generation(job).state == "active"
    assert generation(job).missing == {}


async def test_acks_need_the_generation_and_a_current_incarnation(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.propose(await bench.submit(), "n1", "n2")
    await refused("stale", bench.ack(job, "n1", token=Token(number=1, id="x")))
    await refused("stale", bench.ack(job, "n1", token=Token(number=2, id=generation(job).id)))
    token, ack = generation(job).token, Ack(life="n1-a")
    other = Incarnation(life="n1-a", start=2)
    await refused("not_current", bench.store.ack(job.uid, token, "n1", other, ack, None))
    await refused("not_found", bench.store.ack("nobody", token, "n1", bench.lives["n1"], ack, None))
    assert await bench.ack(job, "n3") == job  # neither member nor holder: nothing to say


async def test_a_member_of_an_earlier_life_cannot_acknowledge(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.propose(await bench.submit(), "n1", "n2")
    await bench.lapse("n2", "n1")
    await bench.join("n2", life="n2-b")
    job = await bench.ack(job, "n2")
    assert generation(job).missing == {"n1": "n1-a", "n2": "n2-a"}
    await bench.ack(job, "n1")
    text = await refused("not_live", bench.store.activate(job.uid, generation(job).token))
    assert "n2 has not acknowledged" in text


async def test_no_generation_is_active_with_a_lapsed_member(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.propose(await bench.submit(), "n1", "n2")
    await bench.ack(job, "n2")
    await bench.lapse("n2", "n1")
    job = await bench.ack(job, "n1")
    assert generation(job).state == "forming"
    token = generation(job).token
    assert "n2 is not live" in await refused("not_live", bench.store.activate(job.uid, token))
    await bench.beat("n2")
    job = await bench.store.activate(job.uid, token)
    assert generation(job).state == "active"
    assert await bench.store.activate(job.uid, token) == job
    await bench.end(job, "stopped")
    await refused("stale", bench.store.activate(job.uid, token))
    await refused("not_found", bench.store.activate("nobody", token))


async def test_a_member_that_left_cannot_be_activated(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.propose(await bench.submit(), "n1", "n2")
    await bench.ack(job, "n2")
    await bench.store.leave("n2", bench.lives["n2"])
    assert generation(await bench.ack(job, "n1")).state == "forming"


async def test_reports_carry_the_order_of_first_faults(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2", "n3")
    job = await bench.report(job, "n1", "running")
    job = await bench.report(job, "n3", "failed", "exit 3")
    job = await bench.report(job, "n2", "fenced")
    job = await bench.report(job, "n1", "lost")
    job = await bench.report(job, "n3", "failed", "exit 3, with more lines")
    reported = {node: (r.state, r.seq, r.reason) for node, r in generation(job).reports.items()}
    assert reported == {
        "n1": ("lost", 3, ""),
        "n2": ("fenced", 2, ""),
        "n3": ("failed", 1, "exit 3, with more lines"),
    }
    events = (await bench.store.events("0-0", 100))[-3:]
    assert [(e.kind, e.node) for e in events] == [("WorkerFailed", "n3"), ("PodFailed", "n2"), ("PodFailed", "n1")]
    assert events[0].text == "exit 3"
    job = await bench.active(job, "n1", "n2", "n3", spend=spend())
    report, life = PodReport(state="failed"), bench.lives["n2"]
    await bench.store.report(job.uid, generation(job).token, "n2", life, report, "rank 1 failed: exit code 7")
    (event,) = (await bench.store.events("0-0", 100))[-1:]
    assert (event.kind, event.text) == ("WorkerFailed", "rank 1 failed: exit code 7")


async def test_a_stall_is_reported_and_taken_back_and_is_no_fault(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    facts = RankFacts(rank=0, state="stopped", step=41, age=12.5, overdue="long", waits=None, site="f (a.py:3)")
    stall = Stall(limit=10.0, suspects=True, ranks=(facts,))
    job = await bench.report(job, "n1", "running")
    before = await bench.kinds()
    job = await bench.report(job, "n1", "running", stall=stall)
    assert generation(job).reports == {"n1": PodReport(state="running", stall=stall)}
    job = await bench.report(job, "n1", "running")
    assert generation(job).reports == {"n1": PodReport(state="running")}
    assert await bench.kinds() == before
    job = await bench.report(job, "n1", "lost")
    assert generation(job).reports["n1"].seq == 1, "the first fault"
    reported = spend().model_copy(update={"kind": "hang", "step": 41, "progressed": True, "stalled": 12.5})
    job = await bench.propose(job, "n2", spend=reported)
    assert job.budget["1"] == reported


async def test_the_first_report_that_a_pod_runs_is_an_event(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    for node, state in (("n1", "running"), ("n1", "running"), ("n2", "failed"), ("n2", "running")):
        job = await bench.report(job, node, state, f"{state} on {node}")
    reported = [(e.kind, e.node, e.generation, e.text) for e in await bench.store.events("0-0", 100)][-2:]
    assert reported == [
        ("GenerationStarted", "n1", 1, "running on n1"),
        ("WorkerFailed", "n2", 1, "failed on n2"),
    ]


async def test_each_restart_of_a_worker_alone_is_an_event_and_no_start_of_the_generation(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    ends = [AloneRestart(rank=r, order=r, at=5, exit=7, text=f"rank {r} failed: exit code 7") for r in range(3)]
    restarts = [*ends[:2], ends[2].model_copy(update={"round": 1})]
    for until in (1, 3, 3):
        report = PodReport(state="running", alone=tuple(restarts[:until]))
        job = await bench.store.report(job.uid, generation(job).token, "n1", bench.lives["n1"], report)
    assert generation(job).reports["n1"].alone == tuple(restarts)
    reported = [(e.kind, e.text) for e in await bench.store.events("0-0", 100)][-3:]
    assert sorted(reported) == [
        (
            "RoleFailed",
            "rank 2 failed: exit code 7 on n1; all of its role is to be started again while the gang goes on",
        ),
        *(
            ("WorkerRestarted", f"rank {r} failed: exit code 7 on n1; it is to be started again while the gang goes on")
            for r in range(2)
        ),
    ]


async def test_a_promise_of_a_round_wakes_the_gang_once_and_ends_with_the_generation(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    token = generation(job).token
    for rounds in ({}, {"a": 1}, {"a": 1}, {"a": 1, "b": 1}, {"a": 3, "b": 1}):
        report = PodReport(state="running", rounds=rounds)
        job = await bench.store.report(job.uid, token, "n1", bench.lives["n1"], report)
        assert generation(job).reports["n1"].rounds == rounds
    reported = [(e.kind, e.text) for e in await bench.store.events("0-0", 100) if e.kind == "RoleStopped"]
    assert reported == [
        ("RoleStopped", f"no worker of {role} runs on n1: restart {number} of that role in this generation")
        for role, number in (("a", 1), ("b", 1), ("a", 3))
    ]
    job = await bench.propose(job, "n1", "n2")
    late = PodReport(state="running", rounds={"a": 4})
    await refused("stale", bench.store.report(job.uid, token, "n1", bench.lives["n1"], late))
    assert not generation(job).reports, "nothing of it is left"


async def test_reports_are_only_for_members_of_the_active_generation(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.propose(await bench.submit(), "n1")
    await refused("stale", bench.report(job, "n1"))
    job = await bench.ack(job, "n1")
    await refused("stale", bench.report(job, "n2"))
    await refused("stale", bench.report(job, "n1", token=Token(number=1, id="x")))
    formed = await bench.propose(job, "n1")
    await refused("stale", bench.report(job, "n1"))
    assert generation(formed).reports == {}


async def test_success_needs_every_members_report(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.submit()
    await refused("unsupported", bench.end(job, "succeeded"))
    job = await bench.active(job, "n1", "n2")
    job = await bench.report(job, "n1", "succeeded")
    await refused("unsupported", bench.end(job, "succeeded"))
    job = await bench.report(job, "n2", "failed")
    await refused("unsupported", bench.end(job, "succeeded"))
    job = await bench.report(job, "n2", "succeeded")
    job = await bench.end(job, "succeeded", outcome=Outcome(code=0, text="done"))
    assert (job.phase, job.reason, generation(job).state) == ("succeeded", "now succeeded", "ended")
    assert job.ended == bench.wall
    assert job.outcome == Outcome(code=0, text="done")
    assert {n: r.state for n, r in job.last_reports.items()} == {"n1": "succeeded", "n2": "succeeded"}
    assert (job.last_number, generation(job).reports) == (1, {})
    assert (await bench.kinds())[-1] == "JobSucceeded"


async def test_a_fault_that_comes_after_all_success_is_refused(bench: Bench) -> None:
    """Who decides on it has not read yet that the work is done: that the job succeeds is next. An operator's end is
    taken."""
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    before = await bench.report(job, "n1", "succeeded")
    job = await bench.report(before, "n2", "succeeded")
    await refused("stale", bench.propose(job, "n1", spend=spend()))
    await refused("stale", bench.end(before, "failed", spend=spend()))
    await refused("stale", bench.end(before, "holding", spend=spend()))
    assert (await bench.job()) == job
    assert (await bench.end(job, "stopped", planned=True)).phase == "stopped"


async def test_a_fault_is_taken_while_a_worker_that_completes_the_job_runs(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.report(job, "n1", "succeeded")
    assert generation(await bench.propose(job, "n1", "n2", spend=spend())).number == 2


async def test_a_job_succeeds_by_a_policy_only_if_it_has_one_that_says_so(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    await refused("unsupported", bench.end(job, "succeeded", by_policy=True))
    complete = Policy(on=("WorkerFailed",), exit_code=3, do="CompleteJob")
    job = await bench.active(await bench.submit("u2", "other", policies=(complete,)), "n1", first=2)
    await refused("unsupported", bench.end(job, "succeeded"))
    job = await bench.end(job, "succeeded", by_policy=True, outcome=Outcome(code=0, text="done"), planned=True)
    assert (job.phase, generation(job).planned, set(generation(job).holders)) == ("succeeded", True, {"n1"})


async def test_an_end_may_change_what_is_wanted_of_the_job(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    paused = job.control.model_copy(update={"rev": job.control.rev + 1, "desired": "pause", "by": "a policy"})
    again = await bench.end(job, "pausing", control=paused)
    assert (again.phase, again.control) == ("pausing", paused)
    assert await bench.end(job, "pausing", control=paused) == again, "once"
    await refused("stale", bench.set_control(job, "r1"))


@pytest.mark.parametrize("phase", ["holding", "pausing", "paused", "failed", "stopped"])
async def test_ending_makes_members_holders(bench: Bench, phase: Phase) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2", grace=4.5)
    assert generation(job).grace == 4.5
    ending = bench.ending(job, phase, spend=spend(), planned=True, delay_ms=700)
    job = await bench.store.end(ending)
    made = generation(job)
    assert (job.phase, made.state, made.planned, set(made.holders)) == (phase, "ended", True, {"n1", "n2"})
    assert made.grace is None, "it was that one stop's"
    assert (job.budget, job.not_before) == ({"1": spend()}, made.since + 700)
    assert (job.ended == bench.wall) == (phase in ("failed", "stopped"))
    assert (await bench.kinds())[-1] == f"Job{phase.capitalize()}"
    assert await bench.store.end(ending) == job  # its reply was lost, or another agent did the same
    await bench.ack(job, "n1")
    job = await bench.ack(job, "n2")
    assert generation(job).holders == {}
    assert job.phase == ("paused" if phase == "pausing" else phase)
    await bench.active(await bench.submit("u2", name="other"), "n1", "n2")  # all devices are free


async def test_an_end_may_shorten_the_grace(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.end(await bench.active(await bench.submit(), "n1"), "holding", planned=True, grace=2.5)
    assert generation(job).grace == 2.5


async def test_ending_is_refused_when_something_changed(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit(), "n1")
    await refused("stale", bench.end(job, "failed", control_rev=9))
    await refused("stale", bench.end(job, "failed", expect_state="forming"))
    await refused("stale", bench.end(job, "failed", expect=Token(number=1, id="x")))
    await refused("stale", bench.end(job, "failed", expect=None))
    await refused("stale", bench.end(job, "failed", lost=("n1",)))
    await refused("not_found", bench.end(job, "failed", uid="nobody"))
    job = await bench.end(job, "failed")
    await refused("ended", bench.end(job, "stopped"))
    assert (await bench.job()) == job


async def test_a_forming_generation_that_ends_adds_no_holders(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.propose(await bench.submit(), "n1", "n2")
    job = await bench.end(job, "pausing")
    assert (job.phase, generation(job).state, generation(job).holders) == ("paused", "ended", {})
    await bench.propose(await bench.submit("u2", name="other"), "n1", "n2")


async def test_a_job_without_a_generation_may_end(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.submit()
    job = await bench.end(job, "holding")
    assert (job.phase, job.generation) == ("holding", None)
    ending = bench.ending(job, "stopped")
    job = await bench.store.end(ending)
    assert (job.phase, job.ended) == ("stopped", bench.wall)
    assert await bench.store.end(ending) == job


async def test_holders_that_lapse_while_pausing_end_the_pausing(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.end(job, "pausing", planned=True)
    job = await bench.ack(job, "n1")
    await bench.lapse("n2", "n1")
    job = await bench.end(job, "pausing", lost=("n2",))
    assert (job.phase, generation(job).holders, generation(job).planned) == ("paused", {}, True)
    assert next(n for n in (await bench.beat("n1")).nodes if n.id == "n2").lost


async def test_an_ended_generation_carries_its_holders_into_the_next(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.end(job, "pausing")
    job = await bench.ack(job, "n1", last=PodReport(state="failed", reason="exit 1"))
    assert job.last_reports["n1"].seq == 1
    job = await bench.propose(job, "n1", "n3")
    assert set(generation(job).holders) == {"n2"}
    assert (job.last_number, job.last_reports["n1"].reason) == (1, "exit 1")


async def test_how_workers_left_is_kept_and_reported_once(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.report(job, "n1", "running", reason="workers run again after 0.1 s")
    job = await bench.end(job, "pausing")
    left = PodReport(state="left", reason="checkpoint at step 7 in 0.1 s")
    for _ in range(2):
        job = await bench.ack(job, "n1", last=left)
    assert job.last_reports["n1"] == left, "no fault: it takes no place in their order"
    reported = [e for e in await bench.store.events("0-0", 500) if e.kind == "WorkersLeft"]
    assert [(e.node, e.generation, e.uid, e.text) for e in reported] == [
        ("n1", 1, job.uid, "n1: checkpoint at step 7 in 0.1 s")
    ]


async def test_the_phases_age_counts_from_entering_it(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.submit()
    held = await bench.end(job, "holding")
    await bench.pass_served(100, "n1")
    longer = await bench.end(held, "holding", reason="still too few nodes")
    assert (longer.since, longer.reason) == (held.since, "still too few nodes")
    formed = await bench.propose(longer, "n1")
    assert formed.since >= held.since + 100


# --- who has answered since a fault


FREE = spend("node n3 lost").model_copy(update={"kind": "node_lost", "counts": False})


async def test_who_has_yet_to_answer_is_kept_until_they_do(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2", "n3")
    assert job.silent == {}
    job = await bench.report(job, "n1", "failed")
    job = await bench.report(job, "n2", "running")
    job = await bench.propose(job, "n1", "n2", spend=spend())
    assert job.silent == {"n2": "n2-a", "n3": "n3-a"}, "who reported its own fault has answered"
    job = await bench.ack(job, "n2")
    assert job.silent == {"n3": "n3-a"}
    job = await bench.propose(job, "n1", "n2", spend=spend("again"))
    assert job.silent == {"n3": "n3-a"}, "it has still not answered, whatever is proposed"
    for node in ("n1", "n2", "n3"):
        job = await bench.ack(job, node)
    assert (job.silent, generation(job).state) == ({}, "active")


async def test_a_fault_that_a_newcomer_is_taken_for_stays_open_until_the_others_have_answered(bench: Bench) -> None:
    """It costs nothing, but a lost node may have been its cause."""
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2", "n3")
    job = await bench.report(job, "n1", "failed")
    of_newcomer = spend().model_copy(update={"kind": "join_failed", "counts": False})
    job = await bench.propose(job, "n2", "n3", spend=of_newcomer)
    assert job.silent == {"n2": "n2-a", "n3": "n3-a"}
    job = await bench.ack(job, "n2")
    assert job.silent == {"n3": "n3-a"}
    job = await bench.propose(job, "n2", spend=FREE)
    assert (job.silent, job.budget["1"]) == ({}, FREE)


async def test_a_life_that_came_after_the_fault_does_not_answer_for_the_one_before(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.report(job, "n1", "failed")
    job = await bench.end(job, "holding", spend=spend())
    await bench.lapse("n2", "n1")
    await bench.join("n2", life="n2-b")
    job = await bench.ack(job, "n1")
    job = await bench.propose(job, "n1", "n2")
    job = await bench.ack(job, "n2")
    assert job.silent == {"n2": "n2-a"}


@pytest.mark.parametrize("entry", [None, FREE])
async def test_what_costs_nothing_waits_for_no_answer(bench: Bench, entry: BudgetEntry | None) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.propose(job, "n1", "n2", spend=entry)
    assert job.silent == {}


async def test_a_free_entry_that_comes_later_is_the_judgement(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.report(job, "n1", "failed")
    job = await bench.end(job, "holding", spend=spend())
    assert job.silent == {"n2": "n2-a"}
    job = await bench.end(job, "holding", spend=FREE)
    assert (job.silent, job.budget) == ({}, {"1": FREE})


def judgement(job: JobRecord, **more: object) -> Judgement:
    made = generation(job)
    plain = {"uid": job.uid, "expect": made.token, "expect_state": made.state, "control_rev": job.control.rev}
    return Judgement.model_validate(plain | {"number": job.last_number, "spend": FREE, "by": "n1"} | more)


async def test_a_fault_is_judged_once(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2")
    await refused("stale", bench.store.judge(judgement(job)))
    job = await bench.report(job, "n1", "failed")
    job = await bench.active(job, "n1", "n3", spend=spend())
    await refused("stale", bench.store.judge(judgement(job, number=7)))
    await refused("stale", bench.store.judge(judgement(job, expect_state="forming")))
    await refused("stale", bench.store.judge(judgement(job, control_rev=9)))
    await refused("not_found", bench.store.judge(judgement(job, uid="nobody")))
    right = judgement(job)
    job = await bench.store.judge(right)
    assert (job.budget, job.silent, generation(job).state) == ({"1": FREE}, {}, "active")
    last = (await bench.store.events("0-0", 500))[-1]
    assert (last.kind, last.generation, last.by, last.text) == ("FaultJudged", 1, "n1", "node n3 lost")
    assert await bench.store.judge(right) == job
    assert len([k for k in await bench.kinds() if k == "FaultJudged"]) == 1
    job = await bench.end(job, "failed")
    await refused("ended", bench.store.judge(judgement(job, spend=spend())))


async def test_of_a_job_that_has_ended_only_what_costs_nothing_is_judged(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.report(job, "n1", "failed")
    job = await bench.end(job, "holding", spend=spend())
    job = await bench.end(job, "stopped")
    assert (job.silent, job.budget["1"].counts) == ({"n2": "n2-a"}, True)
    await refused("ended", bench.store.judge(judgement(job, spend=spend("another worker"))))
    job = await bench.store.judge(judgement(job))
    assert (job.phase, job.silent, job.budget) == ("stopped", {}, {"1": FREE})


async def test_of_many_faults_the_first_few_keep_all_that_the_workers_wrote(bench: Bench) -> None:
    nodes = [f"n{i}" for i in range(1, 20)]
    await bench.up(*nodes)
    job = await bench.active(await bench.submit(low=1, high=19, target=19), *nodes)
    wrote = WorkerExit(rank=0, local_rank=0, pid=9, code=1, error="x" * 1000 + "the end")
    for node in nodes:
        report = PodReport(state="failed", exits=(wrote,))
        job = await bench.store.report(job.uid, generation(job).token, node, bench.lives[node], report)
    job = await bench.store.report(job.uid, generation(job).token, "n1", bench.lives["n1"], report)
    sizes = {r.seq: len(r.exits[0].error) for r in generation(job).reports.values()}
    assert sizes == {seq: 1007 if seq <= 16 else BRIEF for seq in range(1, 20)}
    assert all(r.exits[0].error.endswith("the end") for r in generation(job).reports.values())
    job = await bench.active(job, *nodes)
    assert {r.seq: len(r.exits[0].error) for r in job.last_reports.values()} == sizes
    job = await bench.ack(job, "n19", PodReport(state="failed", exits=(wrote,)))
    assert len(job.last_reports["n19"].exits[0].error) in (1007, BRIEF)


async def test_time_with_nodes_is_added_up_and_time_without_is_not(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.propose(await bench.submit(), "n1", "n2")
    await bench.age(500)  # it forms for the first time: nothing has run yet
    for node in ("n1", "n2"):
        job = await bench.ack(job, node)
    began = job.since
    assert (job.phase, job.ran) == ("running", 0)
    await bench.age(400)
    job = await bench.end(job, "holding")
    assert job.ran == job.since - began >= 400
    ran = job.ran
    await bench.age(700)
    for node in ("n1", "n2"):
        job = await bench.ack(job, node)
    job = await bench.propose(job, "n1", "n2")
    assert (job.phase, job.ran) == ("forming", ran)
    formed = job.since
    await bench.age(200)
    job = await bench.propose(job, "n1", "n2")
    assert (job.ran, job.since) == (ran, formed), "it forms anew, and is in its phase as before"
    for node in ("n1", "n2"):
        job = await bench.ack(job, node)
    assert (job.phase, job.ran) == ("running", ran + job.since - formed)
    assert job.time_used(job.since + 5) == job.ran + 5
    job = await bench.end(job, "pausing")
    since, ran = job.since, job.ran
    await bench.age(300)
    for node in ("n1", "n2"):
        job = await bench.ack(job, node)
    assert (job.phase, job.ran) == ("paused", ran + job.since - since), "until the last workers have ended"
    assert job.since - since >= 300
