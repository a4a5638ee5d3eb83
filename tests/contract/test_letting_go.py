"""A lease process whose agent is silent lets one job go that waits for its node: what the store takes from it."""

from __future__ import annotations

from tests.contract.bench import Bench, generation, refused, spend


async def test_one_job_is_let_go_and_the_node_stays(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")
    job = await bench.active(await bench.submit(), "n1", "n2", failsafe_members={"n1": "n1-a", "n3": "n3-a"})
    await bench.let_go("n1", job.uid, 1)
    assert (await bench.job()).rev == job.rev, "nobody waits for it"
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
