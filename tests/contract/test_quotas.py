"""What one user may keep in the store, and how much travels at once."""

from __future__ import annotations

from nodeagent.model.job import Quota
from nodeagent.store.messages import PAGE_BYTES
from tests.contract.bench import Bench, refused, spec

FEW = Quota(jobs=2, bytes=1_000_000)
LARGE = {"TEXT": "x" * 240_000}


async def test_an_owner_has_so_many_live_jobs(bench: Bench) -> None:
    await bench.up("n1")
    first = await bench.submit("u1", "one", quota=FEW)
    await bench.submit("u2", "two", quota=FEW)
    text = await refused("limit", bench.submit("u3", "three", quota=FEW))
    assert text == "ann has 2 live jobs, as many as limits.jobs allows"
    assert await bench.submit("u1", "one", quota=FEW) == first, "asked again, nothing new"
    await bench.submit("u4", "four", quota=FEW, owner=1001)
    await bench.end(first, "failed")
    await bench.submit("u3", "three", quota=FEW)
    assert len([job for job in (await bench.beat("n1")).jobs if job.owner == 1000]) == 3


async def test_who_has_no_quota_is_refused_nothing(bench: Bench) -> None:
    await bench.up("n1")
    for number in range(4):
        await bench.submit(f"u{number}", f"job-{number}")
    await refused("limit", bench.submit("u9", "job-9", quota=FEW))
    await bench.submit("u9", "job-9")


async def test_bytes_of_ended_jobs_count_until_they_are_deleted(bench: Bench) -> None:
    await bench.up("n1")
    size = len(spec("job-0").model_copy(update={"env": LARGE}).to_json())
    quota = Quota(jobs=100, bytes=3 * size)
    for number in range(3):
        job = await bench.submit(f"u{number}", f"job-{number}", quota=quota, env=LARGE)
    await bench.end(job, "failed")
    text = await refused("limit", bench.submit("u3", "job-3", quota=quota, env=LARGE))
    assert text == (
        f"with this job, the stored jobs of ann (ended ones too) would take {4 * size} bytes, and "
        f"limits.job_bytes allows {3 * size}"
    )
    await bench.submit("u4", "job-2", quota=quota, env=LARGE)  # in the place of the ended one of that name
    assert job.uid not in {j.uid for j in (await bench.beat("n1")).jobs}


async def test_an_ended_job_stays_when_the_one_in_its_place_is_refused(bench: Bench) -> None:
    await bench.up("n1")
    job = await bench.submit("u1", "one")
    await bench.end(job, "failed")
    await bench.submit("u2", "two")
    await refused("limit", bench.submit("u3", "one", quota=Quota(jobs=1, bytes=1_000_000)))
    assert {j.uid for j in (await bench.beat("n1")).jobs} == {"u1", "u2"}


async def test_a_page_of_records_is_bounded_in_bytes(bench: Bench) -> None:
    await bench.up("n1")
    for number in range(30):
        await bench.submit(f"u{number}", f"job-{number}", env=LARGE)
    names, rev, pages = list[str](), 0, 0
    while True:
        reply = await bench.beat("n1", rev=rev)
        taken = sum(len(job.spec.to_json()) for job in reply.jobs)
        assert taken <= PAGE_BYTES
        names += [job.name for job in reply.jobs]
        assert reply.rev > rev
        rev, pages = reply.rev, pages + 1
        if not reply.more:
            break
    assert names == [f"job-{number}" for number in range(30)]
    assert 30 * 240_000 / PAGE_BYTES < pages <= 10
    assert not (await bench.beat("n1", rev=rev)).jobs


async def test_a_record_larger_than_a_page_travels_alone(bench: Bench) -> None:
    await bench.up("n1")
    huge = {"TEXT": "x" * (PAGE_BYTES + 1)}
    await bench.submit("u1", "one", env=huge)
    await bench.submit("u2", "two", env=huge)
    pages, reply = list[tuple[int, list[str]]](), await bench.beat("n1")
    while reply.more:
        pages.append((len(reply.nodes), [job.name for job in reply.jobs]))
        reply = await bench.beat("n1", rev=reply.rev)
    assert [*pages, (len(reply.nodes), [job.name for job in reply.jobs])] == [(1, ["one"]), (0, ["two"])]
