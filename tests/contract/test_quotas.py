"""What one user may keep in the store, and how much travels at once."""

from __future__ import annotations

import pytest

from nodeagent.model.job import Control, Quota
from nodeagent.store import client, recordroom
from nodeagent.store.messages import PAGE_BYTES, NewJob
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


async def test_an_agent_whose_link_is_slow_is_sent_less_at_a_time(bench: Bench) -> None:
    await bench.up("n1")
    for number in range(6):
        await bench.submit(f"u{number}", f"job-{number}", env=LARGE)
    pages, rev, more = list[list[str]](), 0, True
    while more:
        reply = await bench.beat("n1", rev=rev, room=3 * 250_000)
        pages.append([job.name for job in reply.jobs])
        rev, more = reply.rev, reply.more
    assert [len(page) for page in pages] == [3, 3]
    assert [name for page in pages for name in page] == [f"job-{number}" for number in range(6)]


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


MUCH = Quota(jobs=100, bytes=100_000_000)


async def fill(bench: Bench, first: int, count: int) -> None:
    """Jobs of as many users, none near a limit of his own."""
    for number in range(first, first + count):
        await bench.submit(f"u{number}", f"job-{number}", quota=MUCH, owner=1000 + number % 3)


async def test_all_users_together_leave_room_among_what_agents_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of them, each within his limits, had more than an agent reads: then nothing was decided for anybody."""
    monkeypatch.setattr(client, "MOST_JOBS", 16)
    await bench.up("n1")
    await fill(bench, 0, 8)
    size = len(spec("job-0").to_json())
    text = await refused("full", bench.submit("u8", "job-8", quota=MUCH, owner=1002))
    assert text == (
        f"all users together have 8 jobs of {8 * size} bytes, and with this job more than 8 jobs or {32 << 20} bytes, "
        f"which is what users may fill of the 16 jobs of {64 << 20} bytes that agents read. Most have "
        f"uid 1000 (3 jobs of {3 * size} bytes), uid 1001 (3 jobs of {3 * size} bytes), uid 1002 (2 jobs of {2 * size} "
        "bytes)"
    )
    for number in range(8, 12):
        await bench.submit(f"u{number}", f"job-{number}")  # an operator
    text = await refused("full", bench.submit("u12", "job-12"))
    assert "more than 12 jobs" in text and "which is what operators may fill" in text
    reply = await bench.beat("n1")
    assert (len(reply.jobs), reply.beyond) == (12, ())


async def test_whom_of_them_the_refusal_names(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with most of either, by what part it is of what is read."""
    monkeypatch.setattr(client, "MOST_JOBS", 16)
    monkeypatch.setattr(client, "MOST_OF_JOBS", 1_000_000)
    await bench.up("n1")
    await fill(bench, 0, 6)
    await bench.submit("u6", "job-6", quota=MUCH, owner=2000, env=LARGE)
    await bench.submit("u7", "job-7", quota=MUCH, owner=2001)
    text = await refused("full", bench.submit("u8", "job-8", quota=MUCH, owner=2002))
    assert [part.split(" ")[0] for part in text.split("uid ")[1:]] == ["2000", "1000", "1001"]


async def test_nor_more_of_their_bytes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_OF_JOBS", 2_000_000)
    await bench.up("n1")
    for number in range(4):
        await bench.submit(f"u{number}", f"job-{number}", quota=MUCH, owner=1000 + number, env=LARGE)
    await refused("full", bench.submit("u4", "job-4", quota=MUCH, owner=1004, env=LARGE))
    await bench.submit("u5", "job-5", quota=MUCH, owner=1004)
    await bench.submit("u6", "job-6", owner=0, env=LARGE)
    await bench.submit("u7", "job-7", owner=0, env=LARGE)
    await refused("full", bench.submit("u8", "job-8", owner=0, env=LARGE))


async def test_who_has_few_may_submit_when_others_have_filled_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two users with all that they may have would keep everybody else from submitting."""
    monkeypatch.setattr(client, "MOST_JOBS", 16)
    monkeypatch.setattr(recordroom, "FEW", 1 / 8)
    await bench.up("n1")
    await fill(bench, 0, 8)
    for number in (8, 9):
        await bench.submit(f"u{number}", f"job-{number}", quota=MUCH, owner=2000)
    assert "than 8 jobs" in await refused("full", bench.submit("u10", "job-10", quota=MUCH, owner=2000))
    assert "than 10 jobs" in await refused("full", bench.submit("u11", "job-11", quota=MUCH, owner=2001))
    await bench.submit("u12", "job-12")


async def test_each_job_of_a_batch_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_JOBS", 16)
    await bench.up("n1")
    await fill(bench, 0, 6)

    async def submit(*numbers: int) -> tuple[str, int]:
        jobs = [
            NewJob(uid=f"u{number}", spec=spec(f"job-{number}"), control=Control(rev=1, target=1, by="ann"))
            for number in numbers
        ]
        return await bench.store.submit(jobs, 3000, 12.25, "ann", f"r{numbers}", quota=MUCH)

    assert "with these 3 jobs more than 8 jobs" in await refused("full", submit(6, 7, 8))
    assert len((await bench.beat("n1")).jobs) == 6, "all or none"
    await submit(6, 7)


async def test_what_is_not_there_any_more_takes_no_room(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced, deleted, moved into the history, or gone with the store's data: the records themselves are counted."""
    monkeypatch.setattr(client, "MOST_JOBS", 16)
    await bench.up("n1")
    await fill(bench, 0, 5)
    kept = await bench.keep()
    await fill(bench, 5, 3)
    for number in range(3):
        await bench.end(await bench.job(f"u{number}"), "failed")
    await bench.submit("u8", "job-0", quota=MUCH)
    await refused("full", bench.submit("u9", "job-9", quota=MUCH))
    await bench.store.remove("u1")
    await bench.submit("u9", "job-9", quota=MUCH)
    await refused("full", bench.submit("u10", "job-10", quota=MUCH))
    await bench.store.shelve(["u2"], 0.0, 100)
    await bench.submit("u10", "job-10", quota=MUCH)
    await refused("full", bench.submit("u11", "job-11", quota=MUCH))
    await bench.put_back(kept)
    await bench.recovered("n1")
    await fill(bench, 20, 3)
    await refused("full", bench.submit("u23", "job-23", quota=MUCH))


async def test_what_a_large_gang_has_made_of_its_record_counts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.up("n1")
    size = len(spec("train").to_json())
    monkeypatch.setattr(client, "MOST_OF_JOBS", 6 * size)
    job = await bench.submit(quota=MUCH, low=1, high=32)
    nodes = [f"m{number}" for number in range(32)]
    await bench.up(*nodes)
    await bench.submit("u2", "two", quota=MUCH)
    await bench.active(job, *nodes)
    text = await refused("full", bench.submit("u3", "three", quota=MUCH))
    async with bench.calls.link() as link:
        record = await link.ask("HGETALL", f"{bench.calls.prefix}job:{job.uid}")
    specs = len(spec("train", 1, 32).to_json()) + len(spec("two").to_json())
    grown = 256 * (len(record) // 2 - 64)
    assert grown > 1000 and f"have 2 jobs of {specs + grown} bytes" in text
