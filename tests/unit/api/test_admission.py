"""Which queue a job goes to, and what is refused at submit."""

from __future__ import annotations

import grp
import os
import time
from dataclasses import replace
from typing import Any, Literal

import pytest

from nodeagent.api.admission import admitted, may_grow, with_quotas
from nodeagent.api.auth import Caller, UserDatabase, name_of
from nodeagent.api.errors import ApiError
from nodeagent.model.jobspec import Hang, JobSpec
from nodeagent.model.queue import DEFAULT_QUEUE, Amount, JobLimits, Queue, Queues, UserQuota
from nodeagent.plan.cluster import Cluster
from tests.unit.plan.build import make_cluster, make_job, make_node, make_spec

ALICE = Caller(uid=1000, gid=1000, name="alice", operator=False, trusted=False)
ROOT = Caller(uid=0, gid=0, name="root", operator=True, trusted=True)


def users() -> UserDatabase:
    return UserDatabase(name_of, time.monotonic)


def cluster(*queues: Queue, jobs: tuple[Any, ...] = (), gpus: int = 8) -> Cluster:
    nodes = [make_node(f"n{i}", gpus=gpus) for i in range(4)]
    return replace(make_cluster(nodes, *jobs), queues=Queues(rev=1, queues=queues))


def job(queue: str = "", size: tuple[int, int] = (1, 1), name: str = "a", **more: Any) -> JobSpec:
    return make_spec(size=size, workers="gpu", name=name, **more).model_copy(update={"queue": queue})


async def queue_of(found: Cluster, spec: JobSpec, who: Caller = ALICE) -> str:
    return (await admitted(found, who, spec, users())).queue


async def refusal(found: Cluster, spec: JobSpec, who: Caller = ALICE) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await admitted(found, who, spec, users())
    return caught.value


async def test_a_cluster_without_queues_takes_every_job() -> None:
    bare = make_cluster(["n1"])
    assert await queue_of(bare, job()) == ""
    assert await queue_of(bare, job("default")) == ""
    assert (await refusal(bare, job("team"))).code == "not_found"


async def test_a_job_goes_to_the_queue_that_it_names() -> None:
    assert await queue_of(cluster(Queue(name="team")), job("team")) == "team"


async def test_a_job_that_names_none_goes_to_its_owners_default() -> None:
    mine = Queue(name="team", users=("alice",), default=True)
    assert await queue_of(cluster(mine, Queue(name="zoo", users=("alice",), default=True)), job()) == "team"
    assert await queue_of(cluster(mine.model_copy(update={"users": ("bob",)})), job()) == "default"
    assert await queue_of(cluster(mine.model_copy(update={"default": False})), job()) == "default"


async def test_a_group_is_as_good_as_a_name() -> None:
    here = Caller(uid=os.getuid(), gid=os.getgid(), name="nobody-else", operator=False, trusted=False)
    group = grp.getgrgid(os.getgid()).gr_name
    assert await queue_of(cluster(Queue(name="team", groups=(group,), default=True)), job(), here) == "team"


async def test_an_unknown_queue_is_refused_with_the_nearest() -> None:
    error = await refusal(cluster(Queue(name="research")), job("reserch"))
    assert (error.code, error.message, error.next_step) == (
        "not_found", "no queue 'reserch'", "did you mean 'research'?",
    )  # fmt: skip


async def test_a_closed_queue_is_refused_even_where_it_is_the_default() -> None:
    closed = Queue(name="team", state="closed", users=("alice",), default=True)
    for named in ("team", ""):
        error = await refusal(cluster(closed), job(named))
        assert error.message == "queue 'team' is closed: it takes no new jobs"
    assert (await refusal(cluster(closed), job("team"), ROOT)).code == "state"


async def test_a_queue_with_children_takes_no_jobs() -> None:
    error = await refusal(cluster(Queue(name="team"), Queue(name="vision", parent="team")), job("team"))
    assert "queues below it (vision)" in error.message and error.next_step.startswith("name one of these")


async def test_somebody_elses_queue_is_refused() -> None:
    others = Queue(name="team", users=("bob",), groups=("phd",))
    error = await refusal(cluster(others), job("team"))
    assert error.code == "permission"
    assert error.message == "queue 'team' is for bob, group phd; alice is not among them"
    assert await queue_of(cluster(others), job("team"), ROOT) == "team"


async def test_the_default_queue_is_no_way_around_its_users() -> None:
    some = cluster(Queue(name=DEFAULT_QUEUE, users=("bob",)))
    for named in ("", DEFAULT_QUEUE):
        error = await refusal(some, job(named))
        assert error.message == "queue 'default' is for bob; alice is not among them"


async def test_who_may_use_the_parent_may_use_a_queue_that_names_nobody() -> None:
    tree = (Queue(name="team", users=("alice",)), Queue(name="vision", parent="team"))
    assert await queue_of(cluster(*tree), job("vision")) == "vision"
    narrower = tree[1].model_copy(update={"users": ("bob",)})
    assert (await refusal(cluster(tree[0], narrower), job("vision"))).code == "permission"


async def test_a_queue_for_everybody_below_one_for_some() -> None:
    some = Queue(name="team", users=("bob",))
    error = await refusal(cluster(some, Queue(name="vision", parent="team")), job("vision"))
    assert error.message == "queue 'vision' is for bob; alice is not among them"
    everybody = Queue(name="vision", parent="team", users=("*",), default=True)
    assert await queue_of(cluster(some, everybody), job("vision")) == "vision"
    assert await queue_of(cluster(some, everybody), job("")) == "vision", "the default of everybody"


async def test_a_capability_that_can_never_hold_the_job_is_refused() -> None:
    capped = Queue(name="team", capability=Amount(gpus=16))
    assert await queue_of(cluster(capped), job("team", (2, 4))) == "team"
    error = await refusal(cluster(capped), job("team", (3, 4)))
    assert error.message == (
        "job 'a' needs 24 gpus at least, and its capability lets queue 'team' have 16 at most: it could never start"
    )
    tree = (Queue(name="team", capability=Amount(nodes=1)), Queue(name="vision", parent="team"))
    assert "the capability of 'team' above it" in (await refusal(cluster(*tree), job("vision", (2, 2)), ROOT)).message


async def test_a_job_larger_than_the_queue_allows_is_refused() -> None:
    limited = Queue(name="team", limits=JobLimits(max_nodes=2))
    assert "may have 2" in (await refusal(cluster(limited), job("team", (1, 3)))).message


async def test_the_strictest_size_on_the_way_to_the_top_counts() -> None:
    def tree(top: int, below: int) -> Cluster:
        sizes = {"": top, "team": below}
        names = {"": "team", "team": "vision"}
        return cluster(*(Queue(name=names[up], parent=up, limits=JobLimits(max_nodes=n)) for up, n in sizes.items()))

    assert await queue_of(tree(2, 3), job("vision", (1, 2))) == "vision"
    assert (await refusal(tree(2, 3), job("vision", (1, 3)), ROOT)).message == (
        "job 'a' asks for up to 3 nodes; a job of queue 'team', above 'vision', may have 2"
    )
    error = await refusal(tree(3, 2), job("vision", (1, 3)))
    assert error.message == "job 'a' asks for up to 3 nodes; a job of queue 'vision' may have 2"
    assert error.next_step == "write nodes: 2 or less; nothing was submitted"


async def test_a_job_of_several_roles_is_as_large_as_its_places_need_at_least() -> None:
    limited = Queue(name="team", limits=JobLimits(max_nodes=3))
    assert await queue_of(cluster(limited), roles(2)) == "team"
    error = await refusal(cluster(limited), roles(3))
    assert error.message == "job 'a' asks for at least 4 nodes; a job of queue 'team' may have 3"
    assert error.next_step == "ask for fewer places; nothing was submitted"
    with pytest.raises(ApiError, match="a job of queue 'team' may have 3") as caught:
        may_grow(cluster(limited), ROOT, roles(3))
    assert caught.value.next_step == "ask for fewer places; nothing was changed"


async def test_a_queue_has_a_longest_and_a_usual_time_limit() -> None:
    async def limit(limits: JobLimits, asked: float | None) -> float | None:
        found = cluster(Queue(name="team", limits=limits))
        return (await admitted(found, ALICE, job("team", time_limit=asked), users())).time_limit

    longest, both = JobLimits(max_time_limit=7200), JobLimits(max_time_limit=7200, default_time_limit=60)
    assert [await limit(longest, asked) for asked in (None, 60.0, 7200.0)] == [7200.0, 60.0, 7200.0]
    assert [await limit(both, asked) for asked in (None, 7200.0)] == [60.0, 7200.0]
    assert await limit(JobLimits(default_time_limit=60), 9e7) == 9e7
    assert await limit(JobLimits(), None) is None
    for who in (ALICE, ROOT):
        error = await refusal(cluster(Queue(name="team", limits=both)), job("team", time_limit=7260.0), who)
        assert error.message == "job 'a' asks for a time_limit of 2 h 1 min; a job of queue 'team' may have 2 h"
        assert error.next_step.startswith("write time_limit: 7200s or less")


async def test_time_limits_are_those_of_the_queues_above_too() -> None:
    async def limit(top: JobLimits, below: JobLimits, asked: float | None) -> float | None:
        found = cluster(Queue(name="team", limits=top), Queue(name="vision", parent="team", limits=below))
        return (await admitted(found, ALICE, job("vision", time_limit=asked), users())).time_limit

    longest, longer, usual = (
        JobLimits(max_time_limit=60),
        JobLimits(max_time_limit=90),
        JobLimits(default_time_limit=70),
    )
    for top, below in ((longest, longer), (longer, longest), (longest, JobLimits()), (usual, longest)):
        assert await limit(top, below, None) == 60
    assert await limit(usual, JobLimits(default_time_limit=80), None) == 80, "the nearest"
    assert await limit(usual, JobLimits(default_time_limit="never"), None) is None
    top = JobLimits(max_time_limit=60, default_time_limit=50)
    assert await limit(top, JobLimits(default_time_limit="never"), None) == 60, "the longest is no default"
    assert await limit(longest, longer, 60.0) == 60
    with pytest.raises(ApiError, match="a job of queue 'team', above 'vision', may have 1 min"):
        await limit(longest, longer, 61.0)


async def test_a_queue_says_when_jobs_that_do_not_say_it_hang() -> None:
    async def hang(top: JobLimits, below: JobLimits, asked: Hang | Literal["off"] | None) -> object:
        found = cluster(Queue(name="team", limits=top), Queue(name="vision", parent="team", limits=below))
        spec = job("vision").model_copy(update={"hang": asked})
        return (await admitted(found, ALICE, spec, users())).hang

    none, auto, ten, off = (JobLimits(default_hang=usual) for usual in (None, "auto", 600, "off"))
    assert [await hang(top, none, None) for top in (none, auto, ten, off)] == [None, Hang(), Hang(progress=600), "off"]
    assert await hang(ten, auto, None) == Hang(), "the nearest"
    assert await hang(ten, off, None) == "off"
    assert [await hang(ten, auto, own) for own in ("off", Hang(progress=5))] == ["off", Hang(progress=5)]
    open_to_all = cluster(Queue(name="default", limits=ten))
    assert (await admitted(open_to_all, ALICE, job(), users())).hang == Hang(progress=600)


async def test_a_users_quota_of_jobs() -> None:
    limited = Queue(name="team", user_quota=UserQuota(jobs=1))
    mine = make_job(uid="u1", owner=1000, spec=job("team", name="one"))
    ended = make_job(uid="u2", owner=1000, spec=job("team", name="two"), phase="failed")
    theirs = make_job(uid="u3", owner=1001, spec=job("team", name="three"))
    assert await queue_of(cluster(limited, jobs=(ended, theirs)), job("team")) == "team"
    error = await refusal(cluster(limited, jobs=(mine,)), job("team"))
    assert (error.code, error.message) == ("limit", "alice has 1 live jobs in queue 'team', which allows a user 1")
    assert await queue_of(cluster(limited, jobs=(mine,)), job("team", name="one")) == "team", "the same request again"
    assert await queue_of(cluster(limited, jobs=(mine,)), job("team"), ROOT) == "team"


async def test_a_users_quota_of_gpus() -> None:
    limited = Queue(name="team", user_quota=UserQuota(gpus=16))
    mine = make_job(uid="u1", owner=1000, spec=job("team", (1, 4), name="one"))
    assert await queue_of(cluster(limited, jobs=(mine,)), job("team", (1, 2))) == "team"
    assert (
        "8 GPUs at least, this one for 16; the queue allows a user 16"
        in (await refusal(cluster(limited, jobs=(mine,)), job("team", (2, 2)))).message
    )


async def test_a_quota_of_a_queue_holds_for_all_below_it() -> None:
    tree = (
        Queue(name="team", user_quota=UserQuota(jobs=2, nodes=4)),
        Queue(name="vision", parent="team", user_quota=UserQuota(jobs=9)),
        Queue(name="speech", parent="team"),
        Queue(name="other"),
    )
    mine = make_job(uid="u1", owner=1000, spec=job("speech", (2, 4), name="one"))
    theirs = make_job(uid="u2", owner=1001, spec=job("vision", name="two"))
    apart = make_job(uid="u3", owner=1000, spec=job("other", (4, 4), name="three"))
    found = cluster(*tree, jobs=(mine, theirs, apart))
    assert await queue_of(found, job("vision", (2, 2))) == "vision"
    assert (await refusal(found, job("vision", (3, 3)))).message == (
        "the live jobs of alice in queue 'team' ask for 2 nodes at least, this one for 3; the queue allows a user 4"
    )
    assert await queue_of(found, job("vision", (3, 3)), ROOT) == "vision"
    beside = [(job("speech", name="b"), 1), (job("other", name="c"), 5)]
    with pytest.raises(ApiError, match="alice has 1 live jobs in queue 'team', which allows a user 2"):
        await admitted(found, ALICE, job("vision"), users(), beside=beside)
    assert (await admitted(found, ALICE, job("vision"), users(), beside=beside[1:])).queue == "vision"
    assert with_quotas(found, ALICE, [job("vision"), job("speech"), job("other")]) == ("team", "vision")
    assert with_quotas(found, ROOT, [job("vision")]) == ()


async def test_a_users_quota_of_cpu_slots() -> None:
    def workers(count: int, name: str = "a") -> JobSpec:
        return make_spec(size=(1, 1), workers=count, name=name).model_copy(update={"queue": "team"})

    limited = Queue(name="team", user_quota=UserQuota(slots=8))
    found = cluster(limited, jobs=(make_job(uid="u1", owner=1000, spec=workers(6, "one")),), gpus=0)
    assert await queue_of(found, workers(2)) == "team"
    assert "ask for 6 CPU slots at least, this one for 3; the" in (await refusal(found, workers(3))).message


def roles(trainers: int, name: str = "a") -> JobSpec:
    """A server and so many trainers, each with a whole node's GPUs."""
    spec = job("team", name=name)
    server, trainer = (spec.role.model_copy(update={"name": of}) for of in ("server", "trainer"))
    nodes = spec.nodes.model_copy(update={"min": trainers, "max": trainers, "target": trainers})
    return spec.model_copy(update={"roles": (server, trainer.model_copy(update={"nodes": nodes}))})


def test_a_role_grows_within_what_its_queue_and_its_owner_may_have() -> None:
    limited = Queue(name="team", capability=Amount(gpus=24), user_quota=UserQuota(gpus=24))
    may_grow(cluster(limited), ALICE, roles(2))
    with pytest.raises(
        ApiError, match=r"needs 32 gpus at least, and its capability lets queue 'team' have 24"
    ) as caught:
        may_grow(cluster(limited), ROOT, roles(3))
    assert caught.value.next_step == "ask for less, or name another queue; nothing was changed"
    grown = make_job(uid="u1", owner=1000, spec=roles(1, "one"))
    grown = grown.model_copy(update={"control": grown.control.model_copy(update={"sizes": {"trainer": 2}})})
    with pytest.raises(ApiError, match="ask for 24 GPUs at least, this one for 16; the queue allows a user 24"):
        may_grow(cluster(limited, jobs=(grown,)), ALICE, roles(1))
    may_grow(cluster(limited, jobs=(grown,)), ROOT, roles(1))
    may_grow(cluster(), ALICE, roles(9))  # its queue is gone: it gets nothing more until that is back
