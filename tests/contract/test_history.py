"""Jobs that ended a while ago: beside what agents view, read when somebody asks for them, and gone in the end."""

from __future__ import annotations

import pytest

from nodeagent.model.job import JobRecord, Quota
from nodeagent.store.base import StoreUnavailableError
from nodeagent.store.messages import StoreCopy
from tests.contract.bench import FAST, Bench, refused, spec
from tests.contract.test_restore import read, read_after, rejoin


async def ended(bench: Bench, uid: str, wall: float = 100.0, name: str = "", request: str = "") -> JobRecord:
    job = await bench.active(await bench.submit(uid, name=name or f"job-{uid}", request=request), "n1")
    return await bench.ack(await bench.end(job, "failed", wall=bench.wall + wall - 1000), "n1")


@pytest.mark.parametrize("off", [-1e9, -8 * 86_400.0, 365 * 86_400.0])
async def test_a_clock_that_is_far_off_does_not_say_when_a_job_ended(bench: Bench, off: float) -> None:
    """It had ended long ago for every other node: its record, the history and its logs were removed at once."""
    await bench.up("n1")
    job = await ended(bench, "u1", 1000 + off)
    assert job.started is not None
    assert job.ended is not None
    assert -1 < job.ended - job.started < 3600
    near = await ended(bench, "u2", -2000)
    assert near.ended == bench.wall - 3000, "a clock that is a little off is as good as the server's"


async def names(bench: Bench) -> list[str]:
    return [job.name for job in (await bench.store.history("", 1000)).jobs]


async def shelved(bench: Bench, *uids: str, before: float = 0.0, most: int = 1000) -> bool:
    return await bench.store.shelve(uids, bench.wall + before - 1000, most)


async def test_a_job_of_the_history_is_as_it_was_and_no_view_has_it(bench: Bench) -> None:
    await bench.up("n1")
    job = await ended(bench, "u1")
    other = await ended(bench, "u2")
    rev = (await bench.beat("n1")).rev
    assert not await shelved(bench, "u1")
    reply = await bench.beat("n1", rev=rev)
    assert (reply.gone, reply.jobs) == (("job:u1",), ())
    assert [j.uid for j in (await bench.beat("n1")).jobs] == ["u2"]
    assert (await bench.store.past("u1")).jobs == (job,)
    assert (await bench.store.past("u2")).jobs == ()
    assert (await bench.store.history("", 10)).jobs == (job,)
    await shelved(bench, "u1", "nobody")
    assert (await bench.store.history("", 10)).jobs == (job,)
    assert (await bench.store.past(other.name)).jobs == ()


async def test_only_what_has_ended_and_runs_nowhere_is_shelved(bench: Bench) -> None:
    await bench.up("n1", "n2")
    live = await bench.submit("u1", name="a")
    job = await bench.end(await bench.active(await bench.submit("u2", name="b"), "n1", "n2"), "failed")
    await bench.ack(job, "n1")
    await shelved(bench, live.uid, job.uid)
    assert await names(bench) == []
    assert {j.uid for j in (await bench.beat("n1")).jobs} == {"u1", "u2"}
    await bench.lapse("n2", "n1")
    await shelved(bench, live.uid, job.uid)
    assert await names(bench) == ["b"]


async def test_names_are_free_and_numbers_go_on(bench: Bench) -> None:
    await bench.up("n1")
    await ended(bench, "u1", 100, "train")
    await shelved(bench, "u1")
    second = await ended(bench, "u2", 101, "train")
    assert second.generation is not None
    assert second.generation.number == 2
    await shelved(bench, "u2")
    third = await bench.submit("u3", name="train")
    assert third.phase == "queued"
    assert [j.uid for j in (await bench.store.past("train")).jobs] == ["u2"], "the one that ended last"
    assert [j.uid for j in (await bench.store.past("u1")).jobs] == ["u1"]


async def test_an_ended_job_that_another_user_takes_the_name_of_goes_into_the_history(bench: Bench) -> None:
    """Its record was deleted: with it went its owner's way to what it had written."""
    await bench.up("n1")
    job = await ended(bench, "u1", 100, "prep")
    size = len(spec("prep").to_json())
    other = await bench.submit("u2", name="prep", owner=7)
    reply = await bench.beat("n1")
    assert [j.uid for j in reply.jobs] == ["u2"]
    assert (await bench.store.past("u1")).jobs == (await bench.store.history("", 10)).jobs == (job,)
    assert await bench.store.history_bytes([7, 1000]) == {7: 0, 1000: size}
    await bench.end(other, "stopped", wall=bench.wall)
    await bench.submit("u3", name="prep", owner=7)
    assert await names(bench) == ["prep"], "his own is replaced, and nothing goes with it"
    assert (await bench.store.past("prep")).jobs == (job,)
    assert not (await bench.beat("n1")).recovering


async def test_an_ended_job_that_its_owner_wants_deleted_does_not_go_there(bench: Bench) -> None:
    await bench.up("n1")
    job = await ended(bench, "u1", 100, "prep")
    await bench.set_control(job, "c", delete=True)
    await bench.submit("u2", name="prep", owner=7)
    assert await names(bench) == []


@pytest.mark.parametrize("key", ["history", "history:index"])
async def test_nothing_is_submitted_where_the_history_cannot_take_what_was_there(bench: Bench, key: str) -> None:
    await bench.up("n1")
    job = await ended(bench, "u1", 100, "prep")
    await bench.spoil(key)
    with pytest.raises(StoreUnavailableError):
        await bench.submit("u2", name="prep", owner=7)
    assert (await bench.beat("n1")).jobs == (job,)


async def test_the_beginning_of_a_uid_finds_a_few(bench: Bench) -> None:
    await bench.up("n1")
    for i in range(7):
        await ended(bench, f"abc{i}")
    await shelved(bench, *(f"abc{i}" for i in range(7)))
    assert len((await bench.store.past("abc")).jobs) == 5
    assert [j.uid for j in (await bench.store.past("abc3")).jobs] == ["abc3"]
    assert (await bench.store.past("abc%d")).jobs == ()
    assert (await bench.store.past("xyz")).jobs == ()


async def test_pages_of_the_history(bench: Bench) -> None:
    await bench.up("n1")
    for uid, wall in (("u1", 105), ("u2", 101), ("u3", 103), ("u4", 103), ("u5", 103), ("u6", 109.25)):
        await ended(bench, uid, wall)
    await shelved(bench, "u1", "u2", "u3", "u4", "u5", "u6")
    for size in (1, 2, 3, 4, 100):
        place, found = "", list[str]()
        while (page := await bench.store.history(place, size)).place:
            assert len(page.jobs) <= size
            found += [job.uid for job in page.jobs]
            place = page.place
        assert found == ["u2", "u3", "u4", "u5", "u1", "u6"]


async def test_a_page_of_large_records_is_short(bench: Bench) -> None:
    await bench.up("n1")
    uids = [f"u{i}" for i in range(5)]
    for uid in uids:
        job = await bench.submit(uid, name=f"job-{uid}", env={"A": "x" * 600_000})
        await bench.end(job, "stopped", wall=bench.wall)
    await shelved(bench, *uids)
    place, sizes = "", list[int]()
    while (page := await bench.store.history(place, 100)).place:
        sizes.append(len(page.jobs))
        place = page.place
    assert sizes == [1, 1, 1, 1, 1]


async def test_the_oldest_go_for_good(bench: Bench) -> None:
    await bench.up("n1")
    for i in range(5):
        await ended(bench, f"u{i}", 100 + i)
    assert not await shelved(bench, *(f"u{i}" for i in range(5)), before=101.5)
    assert await names(bench) == ["job-u2", "job-u3", "job-u4"]
    assert not await shelved(bench, most=1)
    assert await names(bench) == ["job-u4"]
    assert (await bench.store.past("u0")).jobs == (await bench.store.past("job-u0")).jobs == ()
    gone = [e for e in await bench.store.events("0-0", 1000) if e.kind == "JobDeleted"]
    assert [e.job for e in gone] == ["job-u0", "job-u1", "job-u2", "job-u3"]
    assert {e.by for e in gone} == {"retention"}
    assert gone[0].text == "job job-u0 deleted from the history (by retention)"


async def test_as_many_stay_of_each_owner_and_those_that_never_ran_go_first(bench: Bench) -> None:
    await bench.up("n1")
    await bench.end(await bench.submit("other", name="other", owner=7), "failed", wall=bench.wall - 950.0)
    await ended(bench, "ran", 100)
    for i in range(3):
        await bench.end(await bench.submit(f"u{i}", name=f"job-u{i}"), "stopped", wall=bench.wall - 899.0 + i)
    await shelved(bench, "other", "ran", "u0", "u1", "u2", most=2)
    assert await names(bench) == ["other", "job-ran", "job-u2"]


async def test_of_all_owners_ten_times_as_many_stay(bench: Bench) -> None:
    await bench.up("n1")
    uids = [f"u{i}" for i in range(21)]
    for i, uid in enumerate(uids):
        job = await bench.submit(uid, name=f"job-{uid}", owner=(1000 + i) if i < 19 else 7)
        await bench.end(job, "stopped", wall=bench.wall - 900.0 + i)
    await shelved(bench, *uids, most=2)
    assert await names(bench) == [f"job-{uid}" for uid in uids if uid != "u19"], "of the owner with most"


async def test_nothing_goes_by_a_time_that_has_not_come(bench: Bench) -> None:
    await bench.up("n1")
    await ended(bench, "u1")
    assert not await shelved(bench, "u1", before=365 * 86_400.0)
    assert await names(bench) == ["job-u1"]


async def test_many_go_in_parts(bench: Bench) -> None:
    await bench.up("n1")
    uids = [f"u{i}" for i in range(70)]
    for uid in uids:
        await ended(bench, uid)
    await shelved(bench, *uids)
    assert await shelved(bench, most=0)
    assert len(await names(bench)) == 6
    assert not await shelved(bench, most=0)
    assert await names(bench) == []


async def test_one_is_removed_by_hand(bench: Bench) -> None:
    await bench.up("n1")
    await ended(bench, "u1")
    await ended(bench, "u2")
    size = len((await bench.job("u1")).spec.to_json()) + len((await bench.job("u2")).spec.to_json())
    assert await bench.store.history_bytes([1000]) == {1000: 0}
    await shelved(bench, "u1", "u2")
    assert await bench.store.history_bytes([7, 1000]) == {7: 0, 1000: size}
    assert await bench.store.history_bytes([]) == {}
    await bench.store.remove("u1", "ann")
    await bench.store.remove("u1", "ann")
    assert await names(bench) == ["job-u2"]
    assert [e.by for e in await bench.store.events("0-0", 1000) if e.kind == "JobDeleted"] == ["ann"]


async def test_a_request_that_comes_again_is_answered_from_the_history(bench: Bench) -> None:
    await bench.up("n1")
    job = await ended(bench, "u1", request="r")
    await shelved(bench, "u1")
    assert await bench.submit("u9", request="r") == job
    assert await bench.submit("u9", request="r") == job
    assert await bench.submit("u1", request="other") == job
    await refused("not_found", bench.set_control(job, "c", desired="stop"))


async def test_specs_of_the_history_count_for_the_owner(bench: Bench) -> None:
    await bench.up("n1")
    await ended(bench, "u1")
    await shelved(bench, "u1")
    size = len(spec("job-u1").to_json())
    assert "ended ones too" in await refused(
        "limit", bench.submit("u2", name="job-u2", quota=Quota(jobs=1, bytes=2 * size - 1))
    )
    await bench.submit("u2", name="job-u2", quota=Quota(jobs=1, bytes=2 * size))


@pytest.mark.parametrize("key", ["history:index", "history:bytes"])
async def test_what_follows_from_the_history_is_made_anew(bench: Bench, key: str) -> None:
    await bench.up("n1")
    size = len(spec("job-u1").to_json())
    for uid in ("u1", "u2"):
        await bench.end(await bench.submit(uid, name=f"job-{uid}"), "stopped", wall=bench.wall)
    await shelved(bench, "u1", "u2")
    for harm in (bench.take, bench.spoil):
        await harm(key)
        if harm == bench.spoil:
            with pytest.raises(StoreUnavailableError):
                await shelved(bench)
        await shelved(bench)
        for ref in ("job-u1", "u1"):
            assert [j.uid for j in (await bench.store.past(ref)).jobs] == ["u1"]
        assert len((await bench.store.past("u")).jobs) == 2
        await refused("limit", bench.submit("u3", name="job-u3", quota=Quota(jobs=1, bytes=3 * size - 1)))
    assert not (await bench.beat("n1")).recovering


async def test_what_goes_counts_no_more_and_is_found_no_more(bench: Bench) -> None:
    await bench.up("n1")
    size = len(spec("job-u1").to_json())
    for uid in ("u1", "u2", "u3"):
        await bench.end(await bench.submit(uid, name="train"), "stopped", wall=bench.wall)
        await shelved(bench, uid)
    assert [j.uid for j in (await bench.store.past("train")).jobs] == ["u3"]
    await bench.store.remove("u3")
    assert [j.uid for j in (await bench.store.past("train")).jobs] == ["u2"]
    await refused("limit", bench.submit("u4", name="job-u4", quota=Quota(jobs=1, bytes=2 * size)))
    await shelved(bench, most=0)
    assert (await bench.store.past("train")).jobs == (await bench.store.past("u")).jobs == ()
    await bench.submit("u4", name="job-u4", quota=Quota(jobs=1, bytes=size))


async def test_what_is_in_the_history_no_older_view_brings_back(bench: Bench) -> None:
    await bench.up("n1")
    await ended(bench, "u1")
    view = await bench.beat("n1")
    await shelved(bench, "u1")
    rev, era = (await bench.beat("n1")).rev, view.era
    kept = await bench.keep()
    await bench.put_back(kept)
    offer = StoreCopy(
        cluster_uid=view.cluster_uid, timing=FAST, era=era, rev=rev + 50, served=view.served, by="n1",
        jobs=view.jobs, nodes=view.nodes,
    )  # fmt: skip
    await bench.store.restore(offer)
    await bench.recovered("n1")
    assert (await bench.beat("n1")).jobs == ()
    assert await names(bench) == ["job-u1"]


@pytest.mark.parametrize("how", ["moved", "moved and ended", "a text"])
async def test_a_job_that_no_step_has_moved_into_the_history_is_given_back(bench: Bench, how: str) -> None:
    """Its record was restored no more, and missed again at once: the store decided nothing from then on."""
    await bench.up("n1")
    job = await bench.active(await bench.submit("u1"), "n1")
    view = await read(bench)
    async with bench.calls.link() as link:
        past = bench.calls.prefix + "past:u1"
        record = await link.ask("HGETALL", bench.calls.prefix + "job:u1")
        await link.ask("DEL", bench.calls.prefix + "job:u1")
        if how == "a text":
            await link.ask("SET", past, "x")
        else:
            await link.ask("HSET", past, *record, *(("phase", "failed") if how == "moved and ended" else ()))
    reply = view.reply
    assert "job:u1" in await refused("behind", bench.beat("n1", rev=reply.rev, era=reply.era, damaged=("job:u1",)))
    await bench.store.restore(view.offer())
    await rejoin(bench, "n1")
    after = await read_after(bench)
    assert after.jobs["u1"].model_copy(update={"rev": job.rev}) == job
    assert (await bench.store.past("u1")).jobs == ()
    assert not (await bench.beat("n1", rev=after.reply.rev, era=after.reply.era, runs=("u1",))).recovering


async def test_a_store_that_lost_everything_has_no_history(bench: Bench) -> None:
    await bench.up("n1")
    await ended(bench, "u1")
    await shelved(bench, "u1")
    await bench.put_back(None)
    await bench.join("n1")
    assert await names(bench) == []


@pytest.mark.parametrize("key", ["history", "past:u1"])
async def test_keys_that_somebody_takes_away(bench: Bench, key: str) -> None:
    await bench.up("n1")
    await ended(bench, "u1")
    await ended(bench, "u2", 200)
    await shelved(bench, "u1", "u2")
    await bench.take(key)
    left = await names(bench)
    assert left == ([] if key == "history" else ["job-u2"])
    assert not await shelved(bench, most=0)
    assert await names(bench) == []
    assert (await bench.store.past("job-u1")).jobs == (await bench.store.past("u1")).jobs == ()
    assert not (await bench.beat("n1")).recovering


async def test_a_damaged_record_of_the_history_is_named_and_hides_no_other(bench: Bench) -> None:
    """Also where a page has no other."""
    await bench.up("n1")
    for i, uid in enumerate(("abc0", "abc1", "abc2", "abc3")):
        await ended(bench, uid, 100 + i)
    await shelved(bench, "abc0", "abc1", "abc2", "abc3")
    await bench.spoil("past:abc0")
    await bench.take("past:abc1")
    async with bench.calls.changing() as link:
        await link.ask("HSET", f"{bench.calls.prefix}past:abc2", "spec", '{"env": "secret"}')
    for size in (1, 100):
        place, found, unread = "", list[str](), dict[str, str]()
        while (page := await bench.store.history(place, size)).place:
            assert len(page.jobs) + len(page.unread) <= size
            found += [job.uid for job in page.jobs]
            unread |= {one.key: one.why for one in page.unread}
            place = page.place
        assert found == ["abc3"]
        assert list(unread) == ["past:abc0", "past:abc1", "past:abc2"]
        assert "WRONGTYPE" in unread["past:abc0"]
        assert unread["past:abc1"] == "there is no such key"
        assert "spec" in unread["past:abc2"] and "secret" not in unread["past:abc2"]
    begins = await bench.store.past("abc")
    assert ([j.uid for j in begins.jobs], len(begins.unread), begins.exact) == (["abc3"], 3, False)
    named = await bench.store.past("job-abc0")
    assert ([one.key for one in named.unread], named.exact) == (["past:abc0"], True)
    await bench.store.remove("abc0")
    assert not await shelved(bench, most=0)
    assert not (await bench.store.history("", 10)).place
    assert not (await bench.beat("n1")).recovering


async def test_a_history_of_another_type_goes_and_disturbs_nobody(bench: Bench) -> None:
    await bench.up("n1")
    await ended(bench, "u1")
    await bench.spoil("history")
    with pytest.raises(StoreUnavailableError):
        await shelved(bench, "u1")
    await shelved(bench, "u1")
    assert await names(bench) == ["job-u1"]
    assert not (await bench.beat("n1")).recovering
