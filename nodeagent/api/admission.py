"""Chooses the queue of a job at its submission, or gives the reason for a refusal. It judges by the view: a job that is
submitted while its queue changes is judged by the old queue. For the quotas of users, the store checks that the view
was new enough (``QuotaClaims``).

``plan/`` decides when a job starts; this module must never do so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from nodeagent.api import auth
from nodeagent.api.auth import Caller, UserDatabase
from nodeagent.api.errors import ApiError, unknown
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.queue import DEFAULT_QUEUE, Queue, UserQuota, queue_of
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.demand import least
from nodeagent.plan.timelimit import spoken

_NOTHING = "nothing was submitted"


async def admitted(
    cluster: Cluster,
    who: Caller,
    spec: JobSpec,
    names: UserDatabase,
    count: int = 1,
    beside: Sequence[tuple[JobSpec, int]] = (),
) -> JobSpec:
    """The spec with its queue, and with the time limit that applies there. ``count``: the number of such jobs;
    ``beside``: the other jobs of the same batch, each with its queue and number. Raises ``ApiError`` if no queue
    accepts it."""
    if not cluster.queues.queues and spec.queue in ("", DEFAULT_QUEUE):
        return spec.model_copy(update={"queue": ""})
    queue = await _chosen(cluster, who, spec, names)
    _may_hold(cluster, queue, spec)
    if not who.operator:
        _within_quota(
            cluster, queue, who, [*((s, n) for s, n in beside if queue_of(s.queue) == queue.name), (spec, count)]
        )
    return spec.model_copy(update={"queue": queue.name, "time_limit": _time_limit(queue, spec)})


def may_grow(cluster: Cluster, who: Caller, spec: JobSpec) -> None:
    """Checks a scale-out of a job of several roles; ``spec``: with the sizes that it is to have. Raises ``ApiError`` if
    its queue could never let it have them, or the caller's quota does not."""
    queue = cluster.queues.by_name.get(queue_of(spec.queue))
    if queue is None:
        return  # it gets nothing more until the queue is back, and describe says so
    _may_hold(cluster, queue, spec, "nothing was changed")
    if not who.operator:
        _gpus_within_quota(cluster, queue, who, [(spec, 1)], "nothing was changed")


def with_quotas(cluster: Cluster, who: Caller, specs: Iterable[JobSpec]) -> tuple[str, ...]:
    """The queues of these jobs (as ``admitted`` returned them) that count the caller's jobs."""
    if who.operator:
        return ()
    tree = cluster.queues.by_name
    names = sorted({queue_of(spec.queue) for spec in specs})
    return tuple(name for name in names if name in tree and tree[name].user_quota != UserQuota())


def live_jobs(cluster: Cluster, name: str) -> list[JobRecord]:
    """Jobs of this queue that have not ended."""
    jobs = cluster.jobs.values()
    return [job for job in jobs if job.phase not in TERMINAL and queue_of(job.spec.queue) == name]


async def _chosen(cluster: Cluster, who: Caller, spec: JobSpec, names: UserDatabase) -> Queue:
    tree = cluster.queues.by_name
    if not spec.queue:
        for queue in sorted(tree.values(), key=lambda queue: queue.name):
            if queue.default and await _named(queue, who, names):
                break
        else:
            queue = tree[DEFAULT_QUEUE]
        return _open(cluster, queue)
    found = tree.get(spec.queue)
    if found is None:
        raise unknown("queue", spec.queue, tree)
    if not who.operator:
        await _may_use(cluster, found, who, names)
    return _open(cluster, found)


async def _may_use(cluster: Cluster, queue: Queue, who: Caller, names: UserDatabase) -> None:
    for one in cluster.queues.path(queue.name):
        if not one.users and not one.groups:
            continue
        if await _named(one, who, names):
            return
        allowed = [*one.users, *(f"group {group}" for group in one.groups)]
        some = ", ".join(allowed[:5]) + (f" and {len(allowed) - 5} more" if len(allowed) > 5 else "")
        raise ApiError(
            "permission",
            f"queue {queue.name!r} is for {some}; {who.name} is not among them",
            f"leave out `queue:`, or ask an operator; {_NOTHING}",
        )


async def _named(queue: Queue, who: Caller, names: UserDatabase) -> bool:
    """Returns whether the queue itself names the caller."""
    if who.name in queue.users:
        return True
    for group in queue.groups:
        key = ("group", who.name, who.gid, group)
        if await names.ask(key, partial(auth.in_group, who.name, who.gid, group), f"user {who.name}"):
            return True
    return False


def _open(cluster: Cluster, queue: Queue) -> Queue:
    below = cluster.queues.children.get(queue.name, ())
    if below:
        raise ApiError(
            "state",
            f"queue {queue.name!r} has queues below it ({', '.join(below)}), and takes no jobs itself",
            f"name one of these; {_NOTHING}",
        )
    if queue.state == "closed":
        raise ApiError(
            "state",
            f"queue {queue.name!r} is closed: it takes no new jobs",
            f"name another (nodeagentctl queue get), or ask an operator to open it; {_NOTHING}",
        )
    return queue


def _may_hold(cluster: Cluster, queue: Queue, spec: JobSpec, left: str = _NOTHING) -> None:
    most = queue.limits.max_nodes
    if most is not None and spec.nodes.max > most and not spec.several:
        raise ApiError(
            "state",
            f"job {spec.name!r} asks for up to {spec.nodes.max} nodes; a job of queue {queue.name!r} may have {most}",
            f"write nodes: {most} or less; {_NOTHING}",
        )
    needs = least(cluster, spec)
    for one in cluster.queues.path(queue.name):
        for resource, cap in one.capability.stated.items():
            wants = getattr(needs, resource)
            if wants > cap:
                whose = "its capability" if one is queue else f"the capability of {one.name!r} above it"
                raise ApiError(
                    "state",
                    f"job {spec.name!r} needs {wants} {resource} at least, and {whose} lets queue {queue.name!r} have "
                    f"{cap} at most: it could never start",
                    f"ask for less, or name another queue; {left}",
                )


def _time_limit(queue: Queue, spec: JobSpec) -> float | None:
    limits, asked = queue.limits, spec.time_limit
    longest = limits.max_time_limit
    if asked is None:
        return longest if limits.default_time_limit is None else limits.default_time_limit
    if longest is not None and asked > longest:
        raise ApiError(
            "state",
            f"job {spec.name!r} asks for a time_limit of {spoken(asked)}; a job of queue {queue.name!r} may have "
            f"{spoken(longest)}",
            f"write time_limit: {longest:g}s or less; {_NOTHING}",
        )
    return asked


def _within_quota(cluster: Cluster, queue: Queue, who: Caller, new: Sequence[tuple[JobSpec, int]]) -> None:
    """Checks the caller's quota. ``new``: the submitted jobs, and the number of each."""
    own, jobs = _others(cluster, queue, who, new), queue.user_quota.jobs
    if jobs is not None and len(own) + sum(count for _, count in new) > jobs:
        raise ApiError(
            "limit",
            f"{who.name} has {len(own)} live jobs in queue {queue.name!r}, which allows a user {jobs}",
            f"wait for one of them to end, or stop one; {_NOTHING}",
        )
    _gpus_within_quota(cluster, queue, who, new, _NOTHING)


def _gpus_within_quota(
    cluster: Cluster, queue: Queue, who: Caller, new: Sequence[tuple[JobSpec, int]], left: str
) -> None:
    gpus = queue.user_quota.gpus
    if gpus is None:
        return
    have = sum(least(cluster, job.sized).gpus for job in _others(cluster, queue, who, new))
    wants = sum(least(cluster, spec).gpus * count for spec, count in new)
    if wants and have + wants > gpus:
        raise ApiError(
            "limit",
            f"the live jobs of {who.name} in queue {queue.name!r} ask for {have} GPUs at least, this one for "
            f"{wants}; the queue allows a user {gpus}",
            f"wait for one of them to end, ask for less, or stop one; {left}",
        )


def _others(cluster: Cluster, queue: Queue, who: Caller, new: Sequence[tuple[JobSpec, int]]) -> list[JobRecord]:
    names = {spec.name for spec, _ in new}
    return [job for job in live_jobs(cluster, queue.name) if job.owner == who.uid and job.name not in names]
