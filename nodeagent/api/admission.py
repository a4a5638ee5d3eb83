"""Chooses the queue of a job at its submission, or gives the reason for a refusal. It judges by the view: a job that is
submitted while its queue changes is judged by the old queue. For the quotas of users, the store checks that the view
was new enough (``QuotaClaims``).

``plan/`` decides when a job starts; this module must never do so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

from nodeagent.api import auth
from nodeagent.api.auth import Caller, UserDatabase
from nodeagent.api.errors import ApiError, unknown
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.jobspec import Hang, JobSpec
from nodeagent.model.queue import DEFAULT_QUEUE, EVERYBODY, Queue, UserQuota, amount_text, queue_of
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.failure.timeouts import spoken
from nodeagent.plan.fairshare.queues import above
from nodeagent.plan.fairshare.resources import least, times, together

_NOTHING = "nothing was submitted"
_UNITS = {"gpus": "GPUs", "nodes": "nodes", "slots": "CPU slots"}


async def admitted(
    cluster: Cluster,
    who: Caller,
    spec: JobSpec,
    names: UserDatabase,
    count: int = 1,
    beside: Sequence[tuple[JobSpec, int]] = (),
) -> JobSpec:
    """The spec with its queue, and with the time limit and the detection of hangs that apply there. ``count``: the
    number of such jobs; ``beside``: the other jobs of the same batch, each with its queue and number. Raises
    ``ApiError`` if no queue accepts it."""
    if not cluster.queues.queues and spec.queue in ("", DEFAULT_QUEUE):
        return spec.model_copy(update={"queue": ""})
    queue = await _chosen(cluster, who, spec, names)
    _may_hold(cluster, queue, spec)
    usual = {"time_limit": _time_limit(cluster, queue, spec), "hang": _hang(cluster, queue, spec)}
    spec = spec.model_copy(update={"queue": queue.name, **usual})
    if not who.operator:
        _within_quotas(cluster, who, [*beside, (spec, count)], _NOTHING)
    return spec


def may_grow(cluster: Cluster, who: Caller, spec: JobSpec) -> None:
    """Checks a scale-out of a job of several roles; ``spec``: with the sizes that it is to have. Raises ``ApiError`` if
    its queue could never let it have them, or the caller's quota does not."""
    queue = cluster.queues.by_name.get(queue_of(spec.queue))
    if queue is None:
        return  # it gets nothing more until the queue is back, and describe says so
    _may_hold(cluster, queue, spec, "nothing was changed")
    if not who.operator:
        _within_quotas(cluster, who, [(spec, 1)], "nothing was changed", grows=True)


def with_quotas(cluster: Cluster, who: Caller, specs: Iterable[JobSpec]) -> tuple[str, ...]:
    """The queues of these jobs (as ``admitted`` returned them), and those above them, that count the caller's jobs."""
    if who.operator:
        return ()
    paths = (cluster.queues.path(queue_of(spec.queue)) for spec in specs)
    return tuple(sorted({one.name for path in paths for one in path if one.user_quota != UserQuota()}))


def live_jobs(cluster: Cluster, name: str) -> list[JobRecord]:
    """Jobs of this queue that have not ended."""
    jobs = cluster.jobs.values()
    return [job for job in jobs if job.phase not in TERMINAL and queue_of(job.spec.queue) == name]


async def _chosen(cluster: Cluster, who: Caller, spec: JobSpec, names: UserDatabase) -> Queue:
    tree = cluster.queues.by_name
    if not spec.queue:
        for queue in sorted(tree.values(), key=lambda queue: queue.name):
            if queue.default and await _named(queue, who, names):
                return _open(cluster, queue)
    found = tree.get(spec.queue or DEFAULT_QUEUE)
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
    """Returns whether the queue itself names the caller, or everybody."""
    if who.name in queue.users or EVERYBODY in queue.users:
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
    needs = least(cluster, spec)
    most, whose = _strictest(cluster, queue, "max_nodes")
    asks, up_to = (needs.nodes, "at least") if spec.several else (spec.nodes.max, "up to")
    if most is not None and asks > most:
        raise ApiError(
            "state",
            f"job {spec.name!r} asks for {up_to} {asks} nodes; a job of queue {whose} may have {most:g}",
            f"{'ask for fewer places' if spec.several else f'write nodes: {most:g} or less'}; {left}",
        )
    if found := cluster.queues.too_small(queue.name, needs._asdict()):
        one, resource, cap = found
        whose = "its capability" if one is queue else f"the capability of {one.name!r} above it"
        wants = amount_text(getattr(needs, resource), resource)
        raise ApiError(
            "state",
            f"job {spec.name!r} needs {wants} at least, and {whose} lets queue {queue.name!r} have {cap} at most: it "
            "could never start",
            f"ask for less, or name another queue; {left}",
        )


def _time_limit(cluster: Cluster, queue: Queue, spec: JobSpec) -> float | None:
    """The job's own, else that of the nearest queue that states one for such jobs; never more than the longest."""
    asked, (longest, whose) = spec.time_limit, _strictest(cluster, queue, "max_time_limit")
    if asked is None:
        stated = (one.limits.default_time_limit for one in cluster.queues.path(queue.name))
        usual = next((limit for limit in stated if limit is not None), None)
        return longest if usual is None or usual == "never" else min(usual, longest or usual)
    if longest is not None and asked > longest:
        raise ApiError(
            "state",
            f"job {spec.name!r} asks for a time_limit of {spoken(asked)}; a job of queue {whose} may have "
            f"{spoken(longest)}",
            f"write time_limit: {longest:g}s or less; {_NOTHING}",
        )
    return asked


def _hang(cluster: Cluster, queue: Queue, spec: JobSpec) -> Hang | Literal["off"] | None:
    """The job's own, else that of the nearest queue that states one for such jobs."""
    if spec.hang is not None:
        return spec.hang
    stated = (one.limits.default_hang for one in cluster.queues.path(queue.name))
    usual = next((hang for hang in stated if hang is not None), None)
    if usual is None or usual == "off":
        return usual
    return Hang(progress=None if usual == "auto" else usual)


def _strictest(
    cluster: Cluster, queue: Queue, limit: Literal["max_nodes", "max_time_limit"]
) -> tuple[float | None, str]:
    """The least that this limit is in the queue and those above it, and the queue whose limit that is, for people."""
    found = [(most, one) for one in cluster.queues.path(queue.name) if (most := getattr(one.limits, limit)) is not None]
    if not found:
        return None, ""
    most, one = min(found, key=lambda pair: pair[0])
    return most, repr(one.name) if one is queue else f"{one.name!r}, above {queue.name!r},"


def _within_quotas(
    cluster: Cluster, who: Caller, new: Sequence[tuple[JobSpec, int]], left: str, *, grows: bool = False
) -> None:
    """Checks the caller's quotas in the queue of the last of these jobs, and in those above it. ``new``: the jobs, and
    the number of each; ``grows``: it is a live job, with the size that it is to have."""
    tree = cluster.queues
    for one in tree.path(queue_of(new[-1][0].queue)):
        if (quota := one.user_quota) == UserQuota():
            continue
        below = {name for name in tree.by_name if one.name in above(tree, name)}
        mine = [(spec, count) for spec, count in new if queue_of(spec.queue) in below]
        names = {spec.name for spec, _ in mine}
        live = [job for job in cluster.jobs.values() if job.phase not in TERMINAL and job.owner == who.uid]
        own = [job for job in live if queue_of(job.spec.queue) in below and job.name not in names]
        if not grows and quota.jobs is not None and len(own) + sum(count for _, count in mine) > quota.jobs:
            raise ApiError(
                "limit",
                f"{who.name} has {len(own)} live jobs in queue {one.name!r}, which allows a user {quota.jobs}",
                f"wait for one of them to end, or stop one; {left}",
            )
        if not (stated := quota.stated):
            continue
        have = together(least(cluster, job.sized) for job in own)
        wants = together(times(least(cluster, spec), count) for spec, count in mine)
        for name, most in stated.items():
            has, needs = getattr(have, name), getattr(wants, name)
            if needs and has + needs > most:
                raise ApiError(
                    "limit",
                    f"the live jobs of {who.name} in queue {one.name!r} ask for {has} {_UNITS[name]} at least, "
                    f"{'this one' if len(mine) == 1 else 'these'} for {needs}; the queue allows a user {most}",
                    f"wait for one of them to end, ask for less, or stop one; {left}",
                )
