"""Submit, control, remove, cordon, and the stream of events."""

from __future__ import annotations

import asyncio

from nodeagent.model.job import Admission, Control, JobRecord, Scale
from nodeagent.model.node import Cordon
from nodeagent.model.queue import Queue, Queues
from nodeagent.model.window import Windows
from nodeagent.store.messages import Settlement
from tests.contract.bench import BOUND, Bench, generation, refused, spec
from tests.submitting import new_job, submit_one


async def test_a_submitted_job_is_queued(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.submit(target=3)
    assert (job.uid, job.name, job.owner, job.phase, job.submitted) == ("u1", "train", 1000, "queued", 12.25)
    assert job.control == Control(rev=1, target=3, by="ann")
    assert job.spec == spec(target=3)
    assert (job.generation, job.active, job.budget, job.last_reports, job.outcome) == (None, None, {}, {}, None)
    assert (await bench.submit("u2", name="other")).order > job.order


async def test_the_same_request_gives_the_same_job(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.submit("u1", request="r")
    assert await bench.submit("u2", request="r") == job
    assert await bench.submit("u1", request="other") == job
    assert (await bench.kinds()).count("JobSubmitted") == 1


async def test_a_live_name_is_taken(bench: Bench) -> None:
    await bench.up("n1")
    await bench.submit("u1")
    text = await refused("name_taken", bench.submit("u2"))
    assert "u1" in text
    assert "queued" in text


async def test_the_name_of_an_ended_job_is_free_when_nothing_of_it_runs(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit("u1"), "n1", "n2")
    rev = (await bench.beat("n1")).rev
    job = await bench.end(job, "failed")
    assert "failed" in await refused("stopping", bench.submit("u2"))
    await bench.ack(job, "n1")
    assert "n2" in await refused("stopping", bench.submit("u2"))
    await bench.lapse("n2", "n1")
    job = await bench.submit("u2")
    reply = await bench.beat("n1", rev=rev)
    assert (reply.gone, [j.uid for j in reply.jobs]) == (("job:u1",), ["u2"])
    await bench.beat("n2")
    assert generation(await bench.propose(job, "n1", "n2")).number == 2  # the number is the name's


async def test_numbers_outlive_removal(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.active(await bench.submit("u1"), "n1")
    job = await bench.active(job, "n1")
    job = await bench.end(job, "stopped")
    await bench.ack(job, "n1")
    await bench.store.remove("u1")
    job = await bench.propose(await bench.submit("u2"), "n1")
    assert generation(job).number == 3
    assert generation(await bench.propose(await bench.submit("u3", name="other"), "n1", first=2)).number == 1


async def test_only_ended_jobs_without_holders_are_removed(bench: Bench) -> None:
    await bench.up("n1", "n2")
    await bench.store.remove("nobody")
    job = await bench.submit()
    await refused("stale", bench.store.remove("u1"))
    job = await bench.end(await bench.active(job, "n1", "n2"), "failed")
    await refused("stale", bench.store.remove("u1"))
    await bench.ack(job, "n1")
    await bench.lapse("n2", "n1")
    rev = (await bench.beat("n1")).rev
    await bench.store.remove("u1", "ann")
    await bench.store.remove("u1", "ann")
    reply = await bench.beat("n1", rev=rev)
    assert reply.gone == ("job:u1",)
    assert (await bench.beat("n1")).jobs == ()
    last = (await bench.store.events("0-0", 1000))[-1]
    assert (last.kind, last.by, last.text) == ("JobDeleted", "ann", "job train deleted (by ann)")
    await bench.beat("n2")
    await bench.propose(await bench.submit("u2", name="other"), "n1", "n2")
    again = new_job("u3", spec("train"), "ann")
    assert (await bench.store.submit([again], 1000, 1.0, "ann", "submit-u1"))[0] == "u1", "it was answered with u1"
    assert [job.uid for job in (await bench.beat("n1")).jobs] == ["u2"]


async def test_control_is_replaced_under_its_revision(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.submit()
    scaled = await bench.set_control(job, "r1", target=3)
    assert scaled.control == Control(rev=2, target=3, by="ann")
    assert await bench.set_control(job, "r1", target=1) == scaled  # the same request
    await refused("stale", bench.set_control(job, "r2", target=1))
    paused = await bench.set_control(scaled, "r2", "pause")
    assert (paused.control.rev, paused.control.desired) == (3, "pause")
    last = (await bench.store.events("0-0", -1))[0]
    assert (last.kind, last.by, last.text, last.job) == ("JobChanged", "ann", "changed", "train")
    missing = paused.model_copy(update={"uid": "nobody"})
    await refused("not_found", bench.set_control(missing, "r3"))


async def test_a_control_may_skip_revisions_and_never_falls_back(bench: Bench) -> None:
    """Where an older one was written back, the next is above the newest that anybody has seen."""
    await bench.up("n1")
    job = await bench.submit()
    jumped = await bench.store.control("u1", 1, job.control.model_copy(update={"rev": 9}), "r1", "JobChanged", "so")
    assert jumped.control.rev == 9
    after = await bench.store.control("u1", 9, job.control, "r2", "JobChanged", "so")
    assert after.control.rev == 10


def _admission(signature: str, issued: int = 1000) -> Admission:
    return Admission(by="n1", issued=issued, expires=issued + 60, signature=signature)


async def test_what_was_signed_at_submit_is_kept_as_it_is(bench: Bench) -> None:
    await bench.up("n1")
    control = Control(rev=1, target=2, by="ann", signature="c")
    await submit_one(bench.store, "u1", spec("train"), 1, 1.0, "ann", "", control=control, admission=_admission("a"))
    job = await bench.job("u1")
    assert (job.control, job.admission) == (control, _admission("a"))
    assert (await bench.submit("u2", "other")).admission is None, "nobody signed it"


async def test_an_admission_is_renewed_once_by_one_that_knows_it(bench: Bench) -> None:
    await bench.up("n1")
    job = await submit_one(bench.store, "u1", spec("train"), 1, 1.0, "ann", "", admission=_admission("a"))
    renewed = await bench.store.renew("u1", "a", _admission("b", 2000))
    assert renewed == job.model_copy(update={"admission": _admission("b", 2000), "rev": renewed.rev})
    assert renewed.rev > job.rev
    assert await bench.store.renew("u1", "a", _admission("b", 2000)) == renewed, "its reply was lost"
    await refused("stale", bench.store.renew("u1", "a", _admission("c", 3000)))
    await refused("not_found", bench.store.renew("nobody", "a", _admission("b")))
    ended = await bench.end(await bench.store.renew("u1", "b", _admission("c", 3000)), "stopped")
    assert ended.admission == _admission("c", 3000)
    await refused("ended", bench.store.renew("u1", "c", _admission("d")))


async def test_a_job_without_an_admission_is_given_none(bench: Bench) -> None:
    await bench.up("n1")
    await bench.submit()
    await refused("stale", bench.store.renew("u1", "", _admission("b")))


async def kept(bench: Bench, request: str) -> tuple[str, str] | None:
    """What the store keeps of this request: its subject, and what it did."""
    answer = await bench.store.request(request)
    return None if answer is None else (answer.subject, answer.did)


async def test_what_a_request_did_is_remembered(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.submit(request="r0")
    assert await kept(bench, "r0") == ("u1", "")
    assert await bench.store.request("r1") is None
    did = "scale:3 1 3"
    new = job.control.model_copy(update={"target": 3})
    scaled = await bench.store.control("u1", 1, new, "r1", "JobScaled", "3", did)
    assert await kept(bench, "r1") == ("u1", did)
    await bench.store.control("u1", 2, new, "r1", "JobScaled", "3", "scale:3 3 3")
    assert await kept(bench, "r1") == ("u1", did), "what the first one did"
    kinds = await bench.kinds()
    assert await bench.store.control("u1", 2, None, "r2", "", "", did) == scaled, "it is so already"
    assert await kept(bench, "r2") == ("u1", did)
    assert await bench.kinds() == kinds
    await refused("stale", bench.store.control("u1", 1, None, "r3", "", "", did))
    assert await bench.store.request("r3") is None
    await bench.end(scaled, "stopped")
    await refused("ended", bench.store.control("u1", 2, None, "r4", "", "", did))
    before = await bench.beat("n1")
    assert before.asked < before.rev, "what came after the last request is saved by and by"
    await bench.store.request("r9")
    assert (await bench.beat("n1")).asked == before.asked, "an id that nobody used asks for nothing"
    answer = await bench.store.request("r1")
    assert answer is not None and answer.rev == (await bench.beat("n1")).asked >= before.rev, (
        "who asks again waits for all that there is by now"
    )


async def test_a_request_is_of_one_change(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.submit(request="r0")
    store, cordon, tree = bench.store, Cordon(reason="disk", by="ann", at=1.0), Queues(queues=(Queue(name="a"),))
    assert (await store.cordon("n1", cordon, "r1", "cordon:n1")).cordon == cordon
    stop = job.control.model_copy(update={"desired": "stop"})
    others = (
        lambda: store.cordon("n1", None, "r1", "uncordon:n1"),
        lambda: store.control("u1", 1, stop, "r1", "JobStopRequested", "stop", "stop:u1"),
        lambda: submit_one(store, "u2", spec("other"), 0, 1.0, "ann", "r1", did="submit:other"),
        lambda: store.queues(0, tree, "r1", "queue a created", "create:a"),
        lambda: store.windows(0, Windows(rev=1, by="ann"), "r1", "reserved", "reserve:n1"),
    )
    kinds = await bench.kinds()
    for other in others:
        assert "r1 was used for another change before" in await refused("stale", other())
        assert await kept(bench, "r1") == ("n1", "cordon:n1")
    assert await bench.kinds() == kinds, "nothing was done"
    assert (await store.cordon("n1", None, "r2", "uncordon:n1")).cordon is None
    assert (await store.cordon("n1", cordon, "r1", "cordon:n1")).cordon is None, "the same again does nothing"


def _settlement(job: JobRecord, **more: object) -> Settlement:
    """A rollback to one node of what the job's control wants."""
    scale = Scale(request="r", want=3, before=1, deadline=9000, leaving=(), state="rolled_back", reason="n3 is slow")
    control = job.control.model_copy(update={"target": 1, "scale": scale})
    plain = {
        "uid": job.uid, "expect": job.generation.token if job.generation else None,
        "expect_state": job.generation.state if job.generation else "",
        "control_rev": job.control.rev, "control": control,
        "event": "JobScaleRolledBack", "text": "back to 1", "by": "n1",
    }  # fmt: skip
    return Settlement.model_validate(plain | more)


async def test_a_scale_is_settled_once_under_the_control_it_was_judged_by(bench: Bench) -> None:
    await bench.up("n1")
    scale = Scale(request="r", want=3, before=1, deadline=9000, grace=2.5, leaving=("n2",))
    job = await bench.set_control(await bench.submit(), "r", target=3, scale=scale)
    assert job.control.scale == scale
    settled = await bench.store.settle(_settlement(job))
    assert (settled.control.rev, settled.control.target, settled.rev) == (3, 1, job.rev + 1)
    assert settled.control.scale is not None
    assert settled.control.scale.reason == "n3 is slow"
    last = (await bench.store.events("0-0", -1))[0]
    assert (last.kind, last.by, last.text, last.job) == ("JobScaleRolledBack", "n1", "back to 1", "train")
    assert await bench.store.settle(_settlement(job)) == settled, "its reply was lost"
    again = await bench.set_control(settled, "r2", target=2)
    await refused("stale", bench.store.settle(_settlement(job)))
    assert (await bench.set_control(again, "r2", target=1)).control == again.control
    await refused("not_found", bench.store.settle(_settlement(job, uid="nobody")))


async def test_a_scale_is_not_settled_over_a_gang_that_formed_meanwhile(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1")
    late = _settlement(job)
    formed = await bench.propose(job, "n1", "n2")
    await refused("stale", bench.store.settle(late))
    await refused("stale", bench.store.settle(_settlement(formed, expect_state="active")))
    settled = await bench.store.settle(_settlement(formed))
    assert settled.generation == formed.generation
    await bench.store.settle(_settlement(formed))
    ended = await bench.end(settled, "stopped")
    await refused("ended", bench.store.settle(_settlement(ended)))


async def test_a_job_waits_for_nodes_from_when_others_have_ended(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.submit()
    await bench.pass_served(20, "n1")
    met = job.control.model_copy(update={"met": ("u0",)})
    settled = await bench.store.settle(_settlement(job, control=met, event="JobAfterMet"))
    assert (job.not_before, settled.since) == (0, job.since)
    assert settled.not_before >= job.since + 20
    assert (await bench.active(settled, "n1")).phase == "running"


async def test_of_an_ended_job_only_deletion_can_be_wanted(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.end(await bench.submit(), "stopped")
    await refused("ended", bench.set_control(job, "r1", "pause"))
    await refused("ended", bench.set_control(job, "r2", target=3, delete=True))
    await refused("ended", bench.set_control(job, "r3"))
    assert (await bench.set_control(job, "r4", delete=True)).control.delete


async def test_a_cordon_outlives_the_nodes_lives(bench: Bench) -> None:
    await bench.up("n1", "n2")
    cordon = Cordon(reason="fan broke", by="ann", at=3.5, drain=True)
    await refused("not_found", bench.store.cordon("n9", cordon, "c0"))
    node = await bench.store.cordon("n2", cordon, "c1")
    assert (node.id, node.cordon) == ("n2", cordon)
    assert await bench.store.cordon("n2", None, "c1") == node  # the same request
    assert await bench.store.cordon("n2", cordon, "c2") == node
    await bench.join("n2", start=2)
    await bench.lapse("n2", "n1")
    await bench.join("n2", life="n2-b")
    assert (await bench.beat("n1")).nodes[-1].cordon == cordon
    assert (await bench.store.cordon("n2", None, "c3", by="olga")).cordon is None
    found = [event for event in await bench.store.events("0-0", 1000) if "ordoned" in event.kind]
    assert [(event.kind, event.by, event.text) for event in found] == [
        ("NodeCordoned", "ann", "to be drained (by ann): fan broke"),
        ("NodeUncordoned", "olga", "node n2 takes new work again (by olga)"),
    ]


async def test_requests_are_remembered_up_to_a_cap(bench: Bench) -> None:
    await bench.up("n1")
    cordon = Cordon(reason="x", by="ann", at=1.0)
    for number in range(1025):
        await bench.store.cordon("n1", None, f"c{number}")
    assert (await bench.store.cordon("n1", cordon, "c1")).cordon is None  # still known
    assert (await bench.store.cordon("n1", cordon, "c0")).cordon == cordon  # forgotten


async def test_a_users_requests_push_out_no_others_and_idle_ones_no_change(bench: Bench) -> None:
    await bench.up("n1")
    await bench.submit("u1", name="root", request="submitted", owner=0)
    own = await bench.submit("u2", name="own", owner=1000)
    own = await bench.set_control(own, "changed", target=1)
    for number in range(1025):
        await bench.store.control("u2", own.control.rev, None, f"idle{number}", "", "", "pause")
    request = bench.store.request
    assert await request("idle0") is None
    assert await request("idle1") is not None, "as many are kept as ever"
    assert await request("changed") is not None, "a change is pushed out by changes alone"
    for number in range(1024):
        own = await bench.set_control(own, f"change{number}", target=1)
    assert await request("changed") is None
    assert await request("change0") is not None
    assert await kept(bench, "submitted") == ("u1", ""), "whatever another user does"


async def test_lists_of_requests_that_nobody_uses_are_forgotten(bench: Bench) -> None:
    """At some number of users."""
    await bench.up("n1")
    for owner in range(513):
        await bench.submit(f"u{owner}", name=f"job{owner}", request=f"r{owner}", owner=owner)
    assert await bench.store.request("r0") is None
    assert await bench.store.request("r512") is not None
    await bench.submit("again", name="again", request="again", owner=0)
    assert await kept(bench, "again") == ("again", "")


async def test_events_come_in_order_from_where_one_asks(bench: Bench) -> None:
    assert await bench.store.events("0-0", 10) == ()
    assert await bench.store.wait("0-0", 0.01) == "0-0"
    await bench.up("n1")
    for number in range(5):
        await bench.submit(f"u{number}", name=f"job{number}")
    every = await bench.store.events("0-0", 100)
    assert [e.kind for e in every] == ["NodeJoined", *["JobSubmitted"] * 5]
    assert await bench.store.events("0-0", 2) == every[:2]
    assert await bench.store.events(every[2].id, 2) == every[3:5]
    assert await bench.store.events("0-0", -2) == every[-2:]
    assert await bench.store.events(every[-1].id, 10) == ()
    assert await bench.store.events(every[-2].id, -10) == every[-1:]
    assert await bench.store.events("0-0", 0) == ()
    assert await bench.store.events("0-0", -2, every[3].id) == every[1:3]
    assert await bench.store.events(every[0].id, 10, every[3].id) == every[1:3]
    assert (await bench.beat("n1")).event == every[-1].id
    assert await bench.store.wait("0-0", BOUND) == every[-1].id


async def test_a_new_event_wakes_those_that_wait(bench: Bench) -> None:
    await bench.up("n1")
    newest = (await bench.beat("n1")).event
    assert await bench.store.wait(newest, 0.02) == newest
    async with asyncio.timeout(BOUND), asyncio.TaskGroup() as group:
        waiting = [group.create_task(bench.store.wait(newest, BOUND)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        await bench.submit()
    woken = (await bench.beat("n1")).event
    assert [task.result() for task in waiting] == [woken] * 3
    assert woken != newest
