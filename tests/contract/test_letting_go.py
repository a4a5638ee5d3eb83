"""A lease process whose agent is silent lets one job go that waits for its node: what the store takes from it."""

from __future__ import annotations

from tests.contract.bench import Bench, generation, refused, spend


async def test_one_job_is_let_go_and_the_node_stays(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2", failsafe_members={"n1": "n1-a", "n3": "n3-a"})
    job = await bench.propose(job, "n2", "n3")
    for other in (0, 2):
        await bench.let_go("n1", job.uid, other)
        assert "n1" in generation(await bench.job()).holders
    await refused("era", bench.let_go("n1", job.uid, 1, era="another"))
    await refused("lost", bench.let_go("n1", job.uid, 1, life="another"))
    assert await bench.let_go("n1", job.uid, 1) == {job.uid: 1}
    job = await bench.job()
    assert generation(job).holders.keys() == {"n2"}
    assert generation(job).released, "it lends nothing any more"
    event = (await bench.store.events("0-0", 500))[-1]
    assert (event.kind, event.node, event.generation, event.by) == ("NodeLetGo", "n1", 1, "n1")
    assert await bench.let_go("n1", job.uid, 1) == {job.uid: 1}, "its answer was lost on the way"
    assert (await bench.job()).rev == job.rev
    await bench.active(await bench.submit("u2", "other"), "n1")
    for node in ("n2", "n3"):
        job = await bench.ack(job, node)
    assert generation(job).state == "active"
    assert not next(node for node in (await bench.beat("n2")).nodes if node.id == "n1").left


async def test_who_lets_go_has_answered_and_is_not_at_fault(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.report(job, "n2", "failed")
    job = await bench.propose(job, "n2", spend=spend())
    assert job.silent == {"n1": "n1-a"}
    await bench.let_go("n1", job.uid, 1)
    job = await bench.job()
    assert job.silent == {}
    last = job.last_reports["n1"]
    why = "n1 let go of it, since its agent is silent or cut off from the store"
    assert (last.state, last.reason, last.seq) == ("fenced", why, 2)
    assert (await bench.ack(job, "n2")).phase == "running"


async def test_a_job_that_is_paused_is_let_go_too(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2", failsafe_members={"n1": "n1-a"})
    job = await bench.end(job, "pausing", planned=True)
    await bench.ack(job, "n2")
    assert await bench.renew("n1", asks=True) == {job.uid: 1}
    await bench.let_go("n1", job.uid, 1)
    job = await bench.job()
    assert (job.phase, job.failsafe_members) == ("paused", {})


async def test_of_many_jobs_that_wait_a_renewal_names_few_and_the_next_ones_the_others(bench: Bench) -> None:
    await bench.up("n1", "n2")
    jobs = {}
    for number in range(20):
        job = await bench.submit(f"u{number}", f"j{number}")
        job = await bench.active(job, "n1", first=2 * number)
        jobs[job.uid] = await bench.end(job, "pausing", planned=True)
    gone = dict[str, int]()
    while waiting := await bench.renew("n1", asks=True):
        assert len(waiting) <= 16
        for uid, number in waiting.items():
            gone |= await bench.let_go("n1", uid, number)
    assert gone == dict.fromkeys(jobs, 1)


# --- of a generation that is active


async def test_a_member_that_stands_still_is_let_go_if_its_gang_may_wait_for_it(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2", failsafe_members={"n1": "n1-a", "n2": "n2-a"})
    standing = {job.uid: 1, "of no job": 1}
    assert await bench.renew("n1", standing=standing) == {}, "its agent speaks, and is not cut off"
    for other in (None, {}, {job.uid: 2}, {"of no job": 1}):
        assert await bench.renew("n1", asks=True, standing=other) == {}
    assert await bench.renew("n3", asks=True, standing=standing) == {}, "no member"
    assert await bench.renew("n1", asks=True, standing=standing) == {job.uid: 1}
    before = (await bench.job()).rev
    await bench.let_go("n1", job.uid, 2)
    await bench.let_go("n3", job.uid, 1)
    assert (await bench.job()).rev == before
    assert await bench.let_go("n1", job.uid, 1) == {job.uid: 1}
    job = await bench.job()
    found = generation(job)
    why = "n1 let go of it, since its agent is silent or cut off from the store"
    report = found.reports["n1"]
    assert (report.state, report.reason, report.seq) == ("fenced", why, 1)
    assert (found.state, sorted(found.members), len(found.holders)) == ("active", ["n1", "n2"], 0)
    event = (await bench.store.events("0-0", 500))[-1]
    assert (event.kind, event.node, event.generation) == ("NodeLetGo", "n1", 1)
    assert await bench.let_go("n1", job.uid, 1) == {job.uid: 1}, "its answer was lost on the way"
    assert await bench.renew("n1", asks=True, standing=standing) == {}, "nobody waits for it any more"
    assert (await bench.job()).rev == job.rev


async def let_go_events(bench: Bench) -> list[tuple[str, int | None]]:
    events = await bench.store.events("0-0", 500)
    return [(event.node, event.generation) for event in events if event.kind == "NodeLetGo"]


async def test_it_is_a_holder_of_the_next_generation_until_it_lets_go_again(bench: Bench) -> None:
    """What has let go once is no proof that no agent has started it since: the gang waits for the node as for any."""
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2", failsafe_members={"n1": "n1-a", "n2": "n2-a"})
    await bench.let_go("n1", job.uid, 1)
    job = await bench.propose(await bench.job(), "n2", "n3")
    assert generation(job).holders.keys() == {"n1", "n2"}
    for node in ("n2", "n3"):
        job = await bench.ack(job, node)
    assert generation(job).state == "forming"
    assert await bench.renew("n1", asks=True, standing={job.uid: 1}) == {job.uid: 1}
    await bench.let_go("n1", job.uid, 1)
    job = await bench.store.activate(job.uid, generation(job).token)
    assert generation(job).state == "active"
    assert await let_go_events(bench) == [("n1", 1)], "it is said once of one generation"
    job = await bench.propose(job, "n3", failsafe_members={})
    await bench.let_go("n2", job.uid, generation(job).number - 1)
    assert await let_go_events(bench) == [("n1", 1), ("n2", 2)]


async def test_what_it_has_reported_itself_stands(bench: Bench) -> None:
    await bench.up("n1", "n2")
    job = await bench.active(await bench.submit(), "n1", "n2")
    job = await bench.report(job, "n1", "running")
    assert await bench.renew("n1", asks=True, standing={job.uid: 1}) == {job.uid: 1}
    job = await bench.report(job, "n1", "failed")
    assert await bench.renew("n1", asks=True, standing={job.uid: 1}) == {}
    await bench.let_go("n1", job.uid, 1)
    assert generation(await bench.job()).reports == generation(job).reports


async def test_a_generation_that_forms_waits_for_no_member_that_is_mute(bench: Bench) -> None:
    """It is proposed anew; one that has acknowledged it is let go when it is active."""
    await bench.up("n1", "n2")
    job = await bench.ack(await bench.propose(await bench.submit(), "n1", "n2"), "n1")
    assert await bench.renew("n1", asks=True, standing={job.uid: 1}) == {}
    await bench.ack(job, "n2")
    assert await bench.renew("n1", asks=True, standing={job.uid: 1}) == {job.uid: 1}
