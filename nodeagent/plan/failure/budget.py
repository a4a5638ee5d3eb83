"""What faults cost: the restarts that count within the budget's window, of the gang and of workers alone, whether one
more is allowed, and how long the job waits before it starts again.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import NamedTuple

from nodeagent.model.backoff import backoff
from nodeagent.model.job import BudgetEntry, JobRecord
from nodeagent.model.timing import millis
from nodeagent.model.world import MOST_ALONE, AloneRestart, CauseKind, Generation
from nodeagent.plan.cluster import Cluster


@dataclass(frozen=True, slots=True)
class BudgetVerdict:
    """Whether one more fault is within the budget, and the wait before the next generation, in ms."""

    allowed: bool
    delay_ms: int
    restarts_spent: int
    """Spent in the window, this one included."""
    why: str


def restarts_spent(job: JobRecord, served: int) -> int:
    """Restarts that count, no older than the window (served time): of the gang, and of workers alone."""
    since = served - millis(job.spec.restarts.window)
    times = [entry.at for entry in job.budget.values() if entry.counts]
    times += [at for entry in job.budget.values() for at in entry.alone]
    if job.generation is not None and str(job.generation.number) not in job.budget:
        times += alone_times(job.generation)
    return sum(1 for at in times if at >= since)


def alone_times(generation: Generation | None) -> tuple[int, ...]:
    """When (served time, ms) workers of this generation were started again alone, as far as that was reported, and
    costs something."""
    return tuple(sorted(one.at for one in alone_restarts(generation) if not one.cause.crowded))[-MOST_ALONE:]


class RoleRestart(NamedTuple):
    """A restart while the generation went on: of a worker or its place, or of a whole role."""

    node: str
    role: str
    at: int
    """Served time (ms)."""
    cause: AloneRestart
    """Of all that failed before a whole role was started again, the one that is most likely to have failed first."""


def alone_restarts(generation: Generation | None) -> list[RoleRestart]:
    """Those of this generation, as far as they were reported, of each node in their order. All that failed before their
    whole role was started again are one: they may have failed for each other."""
    found, rounds = list[RoleRestart](), dict[tuple[str, int], list[RoleRestart]]()
    for node, report in generation.reports.items() if generation is not None else ():
        for one in report.alone:
            restart = RoleRestart(node, "".join(role_of(generation, node, one.rank)), one.at, one)
            if one.round and restart.role:
                rounds.setdefault((restart.role, one.round), []).append(restart)
            else:
                found.append(restart)
    for failed in rounds.values():
        first = min(failed, key=lambda one: (one.cause.exit != _KILLED, one.at))
        found.append(first._replace(at=min(one.at for one in failed)))
    return found


def check_budget(job: JobRecord, served: int) -> BudgetVerdict:
    """Judge one more fault that counts."""
    limits = job.spec.restarts
    count = restarts_spent(job, served) + 1
    window = f"{limits.window:g} s"
    if count > limits.max:
        spent = (
            f"{limits.max} restart{'s' * (limits.max > 1)} within {window}" if limits.max else "it allows no restart"
        )
        return BudgetVerdict(False, 0, count, f"restart budget spent: {spent}")
    delay = millis(backoff(count, limits.backoff_min, limits.backoff_max))
    return BudgetVerdict(True, delay, count, f"restart {count} of {limits.max} within {window}")


class Wait(NamedTuple):
    """How long a job waits before its next generation, and why."""

    delay_ms: int = 0
    why: str = ""


def wait_after(cluster: Cluster, job: JobRecord, spend: BudgetEntry) -> Wait:
    """Faults that count wait as the budget says. To ask for a new generation costs nothing, nor does a port that
    somebody else took; but from the second time in the window on, those that come soon after a start wait as restarts
    do. ``job``: without this entry."""
    if spend.counts:
        verdict = check_budget(job, cluster.served)
        return Wait(verdict.delay_ms, verdict.why)
    if spend.kind not in _FREE or spend.progressed:
        return Wait()
    limits = job.spec.restarts
    since = cluster.served - millis(limits.window)
    soon = [e for e in job.budget.values() if e.kind == spend.kind and not e.progressed and e.at >= since]
    if not soon:
        return Wait()
    count = len(soon) + 1
    again = f"{_FREE[spend.kind]} {count} times within {limits.window:g} s"
    delay = millis(backoff(count, limits.backoff_min, limits.backoff_max))
    return Wait(delay, f"{again}, each within {cluster.timing.early:g} s of a start")


_FREE = {"reform": "asked to be re-formed", "port_taken": "lost its ports"}
"""Kinds of faults that cost nothing and may follow each start at once, with what the job did."""


_KILLED = 128 + signal.SIGKILL
"""The exit code of who was killed: nobody ends so because a peer is gone."""


COUNTS: frozenset[CauseKind] = frozenset({"worker_failed", "hang", "collective", "pod_failed"})
"""Faults of the job itself: they spend the budget. Membership, hardware and operators never do."""


def without(job: JobRecord, number: int) -> JobRecord:
    """The job without what the fault of this generation cost, if that has been written down already. What workers cost
    that were started again alone stays."""
    entry = job.budget.get(str(number))
    if entry is None:
        return job
    kept = entry.model_copy(update={"counts": False})
    return job.model_copy(update={"budget": job.budget | {str(number): kept}})


def role_of(generation: Generation | None, node: str, rank: int | None) -> tuple[str, ...]:
    """Of a worker of the active generation; none in a job of one role, and where no worker is named."""
    member = generation.members.get(node) if generation is not None else None
    place = member.place_of(rank) if member is not None and rank is not None else None
    return (place.role,) if place is not None else ()
