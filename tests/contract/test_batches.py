"""Jobs that are submitted together, begin later, or are members of an array."""

from __future__ import annotations

import pytest

from nodeagent.model.job import Control, JobRecord, Quota
from nodeagent.model.jobspec import Array
from nodeagent.model.world import MOST_ALONE, AloneRestart, PodReport
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.messages import NewJob
from tests.contract.bench import Bench, generation, refused, spec


def new(name: str, uid: str = "", *, array: Array | None = None, begin: float | None = None) -> NewJob:
    of = spec(name, low=1, high=1, target=1).model_copy(update={"array": array, "begin": begin})
    return NewJob(uid=uid or f"u-{name}", spec=of, control=Control(rev=1, target=1, by="ann"))


async def submit(
    bench: Bench, *jobs: NewJob, did: str = "s", request: str = "r1", quota: Quota | None = None
) -> tuple[str, int]:
    return await bench.store.submit(jobs, 1000, 12.25, "ann", request, did, quota=quota)


async def names(bench: Bench) -> list[str]:
    reply = await bench.beat("n1")
    return [job.name for job in sorted(reply.jobs, key=lambda job: job.order)]


async def test_several_jobs_in_one_step_and_once(bench: Bench) -> None:
    await bench.up("n1")
    assert await submit(bench, new("a"), new("b"), new("c")) == ("u-a", (await bench.job("u-c")).rev)
    assert await names(bench) == ["a", "b", "c"]
    again = await submit(bench, new("a", "v-a"), new("b", "v-b"), new("c", "v-c"))
    assert again == ("u-a", (await bench.beat("n1")).rev), "of the first time, and of a revision that has them all"
    assert (await submit(bench, new("a"), new("b"), request="r2"))[0] == "u-a", "its first uid is known"
    await refused("stale", submit(bench, new("d"), did="other"))
    assert await names(bench) == ["a", "b", "c"]
    assert (await bench.kinds()).count("JobSubmitted") == 3
    assert {(await bench.job(f"u-{name}")).phase for name in "abc"} == {"queued"}


async def test_events_of_one_users_jobs_push_out_no_others(bench: Bench) -> None:
    """Who submits and deletes in a loop would empty the audit log for everybody else."""
    await bench.up("n1")
    await bench.submit("u1", name="root", owner=0)
    for part in range(3):
        jobs = [new(f"{part}-{number}") for number in range(834)]
        await submit(bench, *jobs, request=f"r{part}")
    every = await bench.store.events("0-0", 9000)
    assert [event.job for event in every[:3]] == ["", "root", "0-2"], "the oldest of its own are gone"
    assert len(every) == 2502
    await bench.submit("u2", name="again", owner=0)
    assert len(await bench.store.events("0-0", 9000)) == 2503


async def test_events_of_what_the_nodes_of_one_users_jobs_report_push_out_no_others(bench: Bench) -> None:
    """Of workers that fail without end in a job that runs: the steps that take reports read a part of its record, and
    did not know whose it is."""
    await bench.up("n1")
    await bench.submit("u1", name="root", owner=0)
    job = await bench.active(await bench.submit("u2", name="fails"), "n1")
    token = generation(job).token
    for part in range(2600 // MOST_ALONE):
        orders = range(part * MOST_ALONE, (part + 1) * MOST_ALONE)
        ends = tuple(AloneRestart(rank=0, order=n, at=5, exit=7, text=f"failed: {n}") for n in orders)
        await bench.store.report("u2", token, "n1", bench.lives["n1"], PodReport(state="running", alone=ends))
    every = await bench.store.events("0-0", 9000)
    assert [event.job for event in every[:2]] == ["", "root"]
    assert len([event for event in every if event.job == "fails"]) == 2500


async def test_all_or_none(bench: Bench) -> None:
    await bench.up("n1")
    await bench.submit("u1", "b")
    await refused("name_taken", submit(bench, new("a"), new("b"), new("c")))
    assert await names(bench) == ["b"]
    ended = await bench.end(await bench.job("u1"), "stopped")
    assert ended.phase == "stopped"
    await submit(bench, new("a"), new("b"))
    assert await names(bench) == ["a", "b"], "one that has ended gives way"


async def test_quotas_hold_for_the_sum(bench: Bench) -> None:
    await bench.up("n1")
    await bench.submit("u1", "x")
    with pytest.raises(StoreRefusedError, match=r"ann has 1 live jobs, with these 4, more than limits\.jobs allows"):
        await submit(bench, new("a"), new("b"), new("c"), quota=Quota(jobs=3, bytes=1_000_000))
    size = len(new("a").spec.to_json())
    with pytest.raises(StoreRefusedError, match=r"limits\.job_bytes"):
        await submit(bench, new("a"), new("b"), quota=Quota(jobs=9, bytes=2 * size))
    assert await names(bench) == ["x"]
    await submit(bench, new("a"), new("b"), quota=Quota(jobs=3, bytes=4 * size))


async def test_a_job_begins_later_even_if_it_is_paused_meanwhile(bench: Bench) -> None:
    await bench.up("n1")
    await submit(bench, new("later", begin=12.25 + 60), new("past", begin=1.0))
    later, past = await bench.job("u-later"), await bench.job("u-past")
    assert (later.not_before, past.not_before) == (later.since + 60_000, 0)
    assert later.reason == "submitted, begins at 1970-01-01 00:01:12 UTC"
    paused = await bench.end(later, "paused")
    assert (paused.phase, paused.not_before) == ("paused", later.not_before)


async def test_no_more_members_of_an_array_have_nodes_than_may_at_once(bench: Bench) -> None:
    await bench.up("n1", "n2", "n3")

    def of(i: int, at_once: int = 2) -> NewJob:
        return new(f"s-{i}", array=Array(name="s", id="a1", index=i, count=4, first=0, last=3, at_once=at_once))

    await submit(bench, *(of(i) for i in range(4)), new("alone"))

    async def start(name: str, node: str, first: int = 0) -> JobRecord:
        return await bench.propose(await bench.job(f"u-{name}"), node, first=first)

    one = await start("s-0", "n1")
    two = await start("s-1", "n2")
    text = "the array of job s-2 runs at most 2 jobs at once, and 2 run now"
    assert await refused("busy", start("s-2", "n3")) == text
    await start("alone", "n3", first=2)
    two = await bench.ack(two, "n2")
    again = await bench.propose(two, "n2", "n2")
    assert generation(again).number == 2, "who has nodes already is no one more"
    await bench.end(one, "holding")
    await start("s-2", "n3")
    await refused("busy", start("s-0", "n1"))
