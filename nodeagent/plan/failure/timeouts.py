"""What has lasted too long: a job's time limit, and policies with a timeout. Of each policy: how long its condition has
lasted, by the job's record, and what it does then.

All agents read the same record (``JobRecord.time_used``), so all of them agree. Never reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nodeagent.model.job import TERMINAL, USES_TIME, JobRecord, Outcome
from nodeagent.model.jobspec import ActionName, EventName, JobSpec, Policy
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.failure import faults
from nodeagent.plan.failure.policies import ENDS, EVENTS, ending, sentence
from nodeagent.plan.nodes.members import gone_nodes
from nodeagent.plan.steps import Decision, End


@dataclass(frozen=True, slots=True)
class Condition:
    """What a policy with a timeout may be about: an event, and since when (served time, ms) that lasts."""

    event: EventName
    since: int
    lasts: str
    """In words, to be followed by a duration."""
    exit_code: int | None = None
    roles: tuple[str, ...] = ()


def conditions(job: JobRecord) -> tuple[Condition, ...]:
    """What lasts at present, as the record has it. A fault lasts until the job runs again, however often
    it tries to form; what a person did meanwhile (a pause and a resume), or another fault, has it begin anew."""
    everybody = tuple(role.name for role in job.spec.roles)
    if job.phase == "running":
        return (Condition("PodRunning", job.since, "it has run for", roles=everybody),)
    found = []
    waits_for_others = job.generation is None and len(job.control.met) < len(job.spec.after)
    if job.phase in ("queued", "holding") and not waits_for_others:
        since = max(job.since, job.not_before)
        found.append(Condition("PodPending", since, "it has waited for nodes for", roles=everybody))
    if job.phase == "forming":
        found.append(Condition("Unknown", job.since, "not all of its nodes have answered for", roles=everybody))
    entry = job.budget.get(str(job.last_number))
    if job.phase in ("forming", "holding") and entry is not None and (event := EVENTS.get(entry.kind)) is not None:
        since = max(job.stands_since or job.since, entry.at)
        lasts = f"{entry.text}, and it has not run again for"
        found.append(Condition(event, since, lasts, entry.exit, entry.roles))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Due:
    """A policy that waits, and when (served time, ms) it acts unless what it is about has ended."""

    at: int
    action: ActionName
    event: EventName
    why: str
    """The sentence that it acts with then."""


def next_due(job: JobRecord) -> Due | None:
    """The policy with a timeout that acts first; None: none waits."""
    return min(dues(job), key=lambda due: due.at, default=None)


def dues(job: JobRecord) -> list[Due]:
    """All policies whose time runs, in the order in which they are asked. None of a job that is to be paused or
    stopped, or has ended."""
    spec = job.spec
    if job.control.desired != "run" or not any(one.timeout for one in _all(spec)):
        return []
    return [
        Due(
            one.since + millis(policy.timeout),
            policy.do,
            one.event,
            sentence(policy.do, one.event, f"{one.lasts} {spoken(policy.timeout)}"),
        )
        for one in conditions(job)
        for policies in spec.policies_of(one.roles)
        for policy in policies
        if policy.timeout is not None and policy.names(one.event, one.exit_code)
    ]


def _all(spec: JobSpec) -> Sequence[Policy]:
    found = spec.policies
    for role in spec.roles:
        if role.policies:
            found += role.policies
    return found


def overdue(cluster: Cluster, job: JobRecord, due: Due | None) -> Decision | None:
    """The end, or the pause, of a job for what has lasted for too long; None while nothing has. ``due``: its
    ``next_due``."""
    if due is None or cluster.served < due.at or due.action not in ENDS:
        return None
    return ending(cluster, job, ENDS[due.action], Outcome(code=1, text=due.why), gone_nodes(cluster, job))


def until_due(decision: Decision, due: Due | None) -> Decision:
    """A wait that lasts until the next policy acts at most. ``due``: the job's ``next_due``."""
    if decision.step is not None or due is None or 0 < decision.at <= due.at:
        return decision
    return replace(decision, at=due.at)


TIME_IS_OVER = 124
"""Exit code of a job whose time is over, as that of timeout(1)."""


def ends_at(job: JobRecord) -> int:
    """Served time (ms) at which the job's time is over if it stays in its phase; 0 for never."""
    limit = job.spec.time_limit
    if limit is None or job.first_active is None or job.phase not in USES_TIME:
        return 0
    return max(job.since, job.first_active) + max(0, millis(limit) - job.ran)


def over_time(cluster: Cluster, job: JobRecord) -> Decision | None:
    """The end of a job whose time is over; None while it is not. Who was to be paused is paused first: that gives the
    nodes back as well."""
    limit = job.spec.time_limit
    if limit is None or job.phase in TERMINAL or job.control.desired != "run":
        return None
    if job.first_active is None and not job.ran:
        return None
    if job.time_used(cluster.served) < millis(limit) or faults.all_succeeded(job):
        return None
    text = f"its time limit of {spoken(limit)} is reached"
    outcome = Outcome(code=TIME_IS_OVER, text=text)
    return Decision(End("failed", text, gone_nodes(cluster, job), outcome, planned=True), (text,))


def until_time_is_over(job: JobRecord, decision: Decision) -> Decision:
    """A wait that lasts until the job's time is over at most."""
    if decision.step is not None or not (at := ends_at(job)) or 0 < decision.at <= at:
        return decision
    return replace(decision, at=at)


def spoken(seconds: float) -> str:
    """A duration for people: ``2 h``, ``1 h 30 min``, ``90 s``."""
    for size, unit, inner, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        whole, rest = divmod(seconds, size)
        if rest == 0 and whole:
            return f"{whole:g} {unit}"
        if rest % inner == 0 and whole and seconds > 100:
            return f"{whole:g} {unit} {rest / inner:g} {small}"
        if whole and size > 60:
            break
    return f"{seconds:g} s"
