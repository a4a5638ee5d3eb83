"""Limits as they are shown: the values in force, and what of them the owner of a job uses; and quotas under a race."""

from __future__ import annotations

import grp
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from nodeagent.api import intents, limits
from nodeagent.api.admission import with_quotas
from nodeagent.api.auth import Caller, UserDatabase
from nodeagent.api.doctor import DoctorRoutes
from nodeagent.api.errors import ApiError
from nodeagent.api.jobs import JobRoutes
from nodeagent.api.limits import JobSizes, limits_json, owned, owner_json, spec_bytes
from nodeagent.api.requests import WRITE_TRIES
from nodeagent.api.submit import SubmitRoutes
from nodeagent.api.throttle import Throttle
from nodeagent.model.job import JobRecord, Quota
from nodeagent.model.jobspec import JobSpec, Submission, Submitter
from nodeagent.model.queue import Queue, Queues, UserQuota
from nodeagent.spec.sections import LimitsConfig
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.client import MOST_JOBS
from nodeagent.store.messages import QuotaClaims
from tests.submitting import first_control, new_job, submit_one
from tests.unit.api.fakes import FakeView, spec, spec_of_roles

ALICE = 54321


def sizes_of_jobs() -> JobSizes:
    return JobSizes(MOST_JOBS, spec_bytes)


def test_every_limit_is_shown_with_its_value() -> None:
    shown = limits_json(LimitsConfig(jobs=7, restarts_per_job=5))
    assert set(shown) == set(LimitsConfig.model_fields)
    assert (shown["jobs"], shown["job_bytes"], shown["restarts_per_job"], shown["nodes_per_job"]) == (
        7, 16 * 1024**2, 5, None,
    )  # fmt: skip


async def test_what_the_owner_of_a_job_uses(tmp_path: Path) -> None:
    view, names = FakeView(tmp_path), UserDatabase(lambda _uid: "alice", time.monotonic)
    throttle = Throttle(lambda: view.config.limits, time.monotonic)
    await view.join()
    await submit_one(view.store, "u1", spec("one"), ALICE, 1.0, "alice", "r1")
    await submit_one(view.store, "u2", spec("two"), ALICE, 1.0, "alice", "r2")
    await submit_one(view.store, "u3", spec("other"), ALICE + 1, 1.0, "bob", "r3")
    await view.refresh()
    await view.end(view.job("two"), "stopped", "by hand")
    await view.refresh()
    assert throttle.begin(ALICE, follows=True) == ""
    await names.learn([ALICE])
    shown = await owner_json(view, throttle, sizes_of_jobs(), names, view.job("one"))
    assert shown is not None
    size = sum(len(view.job(name).spec.to_json()) for name in ("one", "two"))
    assert shown["used"] == {"jobs": 1, "job_bytes": size, "concurrent": 1, "followers": 1}
    assert (shown["owner"], shown["node"], shown["values"]["jobs"]) == ("alice", "n1", 100)
    other = await owner_json(view, throttle, sizes_of_jobs(), names, view.job("other"))
    assert other is not None
    assert other["used"]["followers"] == 0


async def test_bytes_are_counted_as_where_a_job_is_submitted(tmp_path: Path) -> None:
    """There, jobs in the history count too: `describe` and `doctor` showed room that there was not."""
    view, sizes = FakeView(tmp_path), sizes_of_jobs()
    names = UserDatabase(lambda _uid: "alice", time.monotonic)
    await view.join()
    for number, name in enumerate(("one", "two")):
        await submit_one(view.store, f"u{number}", spec(name), ALICE, 1.0, "alice", f"r{number}")
    await view.refresh()
    size = sum(len(view.job(name).spec.to_json()) for name in ("one", "two"))
    await view.end(view.job("two"), "stopped", "by hand")
    await view.store.shelve(["u1"], 0.0, 100)
    await view.refresh()
    assert [job.name for job in view.cluster().jobs.values()] == ["one"]
    shown = await owner_json(view, Throttle(lambda: view.config.limits, time.monotonic), sizes, names, view.job("one"))
    assert shown is not None and shown["used"]["job_bytes"] == size
    assert await owned(view, sizes, [ALICE, ALICE + 1]) == {ALICE: (1, size), ALICE + 1: (0, 0)}
    with pytest.raises(StoreRefusedError, match=f"would take {size + len(spec('six').to_json())} bytes"):
        await submit_one(view.store, "u9", spec("six"), ALICE, 1.0, "alice", "r9", quota=Quota(jobs=9, bytes=size))
    view.away_since = 1.0
    assert (await owned(view, sizes, [ALICE]))[ALICE].bytes == len(view.job("one").spec.to_json())


async def test_an_owner_without_limits(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    view, names = FakeView(tmp_path, operators=group), UserDatabase(lambda _uid: "root", time.monotonic)
    throttle = Throttle(lambda: view.config.limits, time.monotonic)
    await view.join()
    operator = Submitter(user="root", uid=ALICE, gid=os.getgid(), host="n1", cwd="/tmp")
    await submit_one(view.store, "u1", spec("one"), 0, 1.0, "root", "r1")
    await submit_one(view.store, "u2", spec("two", submitter=operator), ALICE, 1.0, "root", "r2")
    await view.refresh()
    assert await owner_json(view, throttle, sizes_of_jobs(), names, view.job("one")) is None
    assert await owner_json(view, throttle, sizes_of_jobs(), names, view.job("two")) is None


async def test_doctor_warns_of_no_limit_that_does_not_hold(tmp_path: Path) -> None:
    """Operators have none, whatever their jobs take."""
    group = grp.getgrgid(os.getgid()).gr_name
    view = FakeView(tmp_path, operators=group)
    names = UserDatabase(lambda uid: {ALICE: "alice", ALICE + 1: "bob"}.get(uid, "root"), time.monotonic)
    view.config = view.config.model_copy(update={"limits": LimitsConfig(jobs=1)})
    await view.join()
    operator = Submitter(user="root", uid=ALICE, gid=os.getgid(), host="n1", cwd="/tmp")
    other = operator.model_copy(update={"user": "nobody", "uid": ALICE + 1, "gid": 65534})
    await submit_one(view.store, "u1", spec("one", submitter=operator), ALICE, 1.0, "alice", "r1")
    await submit_one(view.store, "u2", spec("two", submitter=other), ALICE + 1, 1.0, "bob", "r2")
    await view.refresh()
    found = await DoctorRoutes(view, Throttle(lambda: view.config.limits, time.monotonic), sizes_of_jobs())._users(
        names
    )
    assert [where for where, _ in found] == ["user/bob"]


async def test_who_has_most_is_named_where_there_is_no_room(tmp_path: Path) -> None:
    names = UserDatabase(lambda uid: {ALICE: "alice"}.get(uid, str(uid)), time.monotonic)
    refused = StoreRefusedError("full", f"there is no room. Most have uid {ALICE} (3 jobs), uid 7 (2 jobs)")
    error = await limits.no_room(refused, names)
    assert (error.status, error.message) == (429, "there is no room. Most have alice (3 jobs), uid 7 (2 jobs)")
    assert "nodeagentctl delete JOB" in error.next_step
    view = FakeView(tmp_path)
    await view.join()

    async def full(*_: object, **_more: object) -> tuple[str, int]:
        raise refused

    view.store.__dict__["submit"] = full
    with pytest.raises(ApiError, match="Most have alice"):
        await SubmitRoutes(view, names).submit(RACER, "r", [Submission(spec())])


async def test_doctor_counts_what_all_jobs_take(tmp_path: Path) -> None:
    view, names = FakeView(tmp_path), UserDatabase(lambda uid: {ALICE: "alice"}.get(uid, "root"), time.monotonic)
    await view.join()
    for number, owner in enumerate((ALICE, ALICE, 0)):
        await submit_one(view.store, f"u{number}", spec(f"job-{number}"), owner, 1.0, "who", f"r{number}")
    await view.refresh()
    await view.end(view.job("job-1"), "stopped", "by hand")
    await view.refresh()
    size = spec_bytes(view.job("job-0").spec)
    have = await DoctorRoutes(view, Throttle(lambda: view.config.limits, time.monotonic), sizes_of_jobs())._filled(
        names
    )
    assert have == {"alice": (2, 2 * size), "root": (1, size)}


class Racing:
    """A user who submits a job, and these others through another node in the moment in which that is written."""

    def __init__(self, view: FakeView, *others: JobSpec) -> None:
        self.view, self._others, self._submit, self.claimed = view, list(others), view.store.submit, 0
        self._routes = SubmitRoutes(view, UserDatabase(lambda _uid: "alice", time.monotonic))
        view.store.__dict__["submit"] = self._late

    async def _late(self, *words: Any, claims: QuotaClaims | None, **more: Any) -> tuple[str, int]:
        assert claims is not None
        self.claimed += 1
        if self._others:
            one = self._others.pop()
            fresh = QuotaClaims(queues=with_quotas(self.view.cluster(), RACER, [one]), read=1000)
            new = new_job(f"u-{one.name}", one, "alice")
            await self._submit([new], ALICE, 1.0, "alice", f"r-{one.name}", claims=fresh)
        return await self._submit(*words, claims=claims, **more)

    async def submit(self) -> None:
        await self._routes.submit(RACER, "r", [Submission(in_queue("mine"))])

    def names(self) -> list[str]:
        return [job.name for job in self.view.cluster().jobs.values()]


RACER = Caller(uid=ALICE, gid=ALICE, name="alice", operator=False, trusted=False)


def in_queue(name: str, queue: str = "team") -> JobSpec:
    return spec(name).model_copy(update={"queue": queue})


async def racing(folder: Path, jobs: int, others: int) -> Racing:
    view = FakeView(folder)
    await view.join()
    tree = Queues(rev=1, queues=(Queue(name="team", user_quota=UserQuota(jobs=jobs)),))
    await view.store.queues(0, tree, "q", "made")
    await view.refresh()
    return Racing(view, *(in_queue(f"other{i}") for i in range(others)))


async def test_two_submits_at_once_are_not_both_within_a_quota_of_one(tmp_path: Path) -> None:
    one = await racing(tmp_path, jobs=1, others=1)
    with pytest.raises(ApiError, match="alice has 1 live jobs in queue 'team', which allows a user 1"):
        await one.submit()
    assert one.names() == ["other0"]


async def test_two_submits_at_once_that_are_both_within_it_are_both_taken(tmp_path: Path) -> None:
    one = await racing(tmp_path, jobs=2, others=1)
    await one.submit()
    assert one.claimed == 2, "judged again"
    assert one.names() == ["other0", "mine"], "and read"


async def test_two_submits_at_once_to_two_queues_are_judged_by_the_quota_above_both(tmp_path: Path) -> None:
    view = FakeView(tmp_path)
    await view.join()
    top = Queue(name="all", user_quota=UserQuota(jobs=1))
    below = (Queue(name=name, parent="all") for name in ("team", "vision"))
    await view.store.queues(0, Queues(rev=1, queues=(top, *below)), "q", "made")
    await view.refresh()
    one = Racing(view, in_queue("other", "vision"))
    with pytest.raises(ApiError, match="alice has 1 live jobs in queue 'all', which allows a user 1"):
        await one.submit()
    assert one.claimed == 1, "the store refused it"
    assert one.names() == ["other"]


async def test_two_scale_outs_at_once_are_not_both_within_a_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two jobs of several roles, through two nodes: each is within the quota of what it asked for without the
    other."""
    view = FakeView(tmp_path)
    await view.join()
    tree = Queues(rev=1, queues=(Queue(name="team", user_quota=UserQuota(slots=13)),))
    await view.store.queues(0, tree, "q", "made")
    for name in ("mine", "other"):
        gang = spec_of_roles(name).model_copy(update={"queue": "team"})
        signed = view.seal.control(name, first_control(gang, "alice"))
        await submit_one(view.store, name, gang, ALICE, 1.0, "alice", name, control=signed)
    await view.refresh()
    routes = JobRoutes(
        view, Throttle(lambda: view.config.limits, time.monotonic), UserDatabase(lambda _uid: "alice", time.monotonic)
    )
    write, racing = view.store.control, True

    async def known(*_: object) -> Caller:
        return RACER

    async def scale(name: str) -> None:
        asked = intents.read_scale("scale", {"role": "server", "target": 3}, f"scale {name}")
        request = make_mocked_request("POST", f"/v1/jobs/{name}/scale", match_info={"job": name})
        await routes._change_size(request, asked)

    async def control(*args: Any) -> JobRecord:
        nonlocal racing
        if racing:
            racing = False
            await scale("other")
        return await write(*args)

    monkeypatch.setattr("nodeagent.api.auth.caller", known)
    monkeypatch.setattr(view.store, "control", control)
    with pytest.raises(ApiError, match="the live jobs of alice in queue 'team' ask for 7 CPU slots at least"):
        await scale("mine")
    await view.refresh()
    assert {job.name: job.control.sizes for job in view.cluster().jobs.values()} == {"mine": {}, "other": {"server": 3}}


async def test_who_never_gets_to_it_gets_an_error(tmp_path: Path) -> None:
    one = await racing(tmp_path, jobs=9, others=WRITE_TRIES)
    with pytest.raises(StoreRefusedError) as refused:
        await one.submit()
    assert (refused.value.code, one.claimed) == ("stale", WRITE_TRIES)


async def test_jobs_that_are_over_the_quota_by_themselves_never_reach_the_store(tmp_path: Path) -> None:
    """An array of a thousand large jobs would be 250 MB for the store to read, which it does before it counts."""
    owner = Caller(uid=1000, gid=1000, name="ann", operator=False, trusted=False)
    quota, large = Quota(jobs=100, bytes=16 * 1024**2), spec(env={"A": "x" * 250_000})
    limits.within_quota(owner, quota, [(large, 64), (spec(), 36)])
    with pytest.raises(ApiError, match=r"these are 101 jobs, more than the 100 that limits\.jobs allows ann"):
        limits.within_quota(owner, quota, [(spec(), 1), (spec(), 100)])
    with pytest.raises(ApiError, match=r"these jobs would take \d{8} bytes or more, and limits\.job_bytes allows ann"):
        limits.within_quota(owner, quota, [(large, 70)])
    with pytest.raises(ApiError, match=r"this job would take 2\d{5} bytes or more") as alone:
        limits.within_quota(owner, Quota(jobs=1, bytes=200_000), [(large, 1)])
    assert alone.value.next_step.startswith("put long texts into files")
    view, signed = FakeView(tmp_path), 0
    await view.join()
    routes = SubmitRoutes(view)

    async def sign(*_what: object) -> list[object]:
        nonlocal signed
        signed += 1
        return []

    routes.__dict__["_signed"] = sign
    with pytest.raises(ApiError, match=r"limits\.jobs"):
        mine = spec().model_copy(update={"user": "ann"})
        await routes.submit(owner, "r", [Submission(mine, array="0-999")])
    assert not signed


async def test_what_the_submitter_of_a_batch_brought_is_answered_once(tmp_path: Path) -> None:
    """232 KB that were asked 32 times, each as a dry run of 256 jobs, were 3 GB of answers."""
    owner = Caller(uid=1000, gid=1000, name="ann", operator=False, trusted=False)
    view = FakeView(tmp_path)
    await view.join()
    routes = SubmitRoutes(view)

    def jobs(count: int, size: int) -> list[Submission]:
        one = spec().model_copy(update={"user": "ann"})
        brought = one.submitter.model_copy(update={"environ": {"PATH": "x" * size}})
        return [Submission(one.model_copy(update={"name": f"j{i}", "submitter": brought})) for i in range(count)]

    answer = await routes.submit(owner, "r", jobs(50, 100_000), dry_run=True)
    assert isinstance(answer.body, bytes)
    assert 100_000 < len(answer.body) < 400_000
    found = json.loads(answer.body)
    assert (len(found["jobs"]), found["submitter"]["user"]) == (50, "ann")
    with pytest.raises(ApiError, match=r"limits\.job_bytes"):
        await routes.submit(owner, "r", jobs(100, 200_000), dry_run=True)


async def test_a_spec_is_written_once_to_know_its_size(tmp_path: Path) -> None:
    """32 descriptions a second of a user's job took half of a core: each wrote all specs of that user."""
    view, written = FakeView(tmp_path), list[str]()
    await view.join()
    for name in ("one", "two"):
        await submit_one(view.store, name, spec(name), ALICE, 1.0, "alice", name)
    await view.refresh()
    jobs = list(view.cluster().jobs.values())
    size = sum(spec_bytes(job.spec) for job in jobs)

    def counted(spec: JobSpec) -> int:
        written.append(spec.name)
        return spec_bytes(spec)

    few, many = JobSizes(1, counted), JobSizes(10, counted)
    assert [await few.of(jobs[:1]) + await few.of(jobs[1:]) for _ in range(2)] == [size, size]
    assert len(written) == 4, "no more are kept than it may"
    assert [await many.of(jobs) for _ in range(3)] == [size] * 3
    assert len(written) == 6
