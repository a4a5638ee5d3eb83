"""Policies with a timeout. Of each: how long its condition has lasted, by the job's record, and what it does then.
All agents read the same record, so all of them agree. Never reads a clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nodeagent.model.job import JobRecord, Outcome
from nodeagent.model.jobspec import ActionName, EventName, JobSpec, Policy
from nodeagent.model.timing import millis
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.membership import gone_nodes
from nodeagent.plan.policies import ENDS, EVENTS, ending, sentence
from nodeagent.plan.steps import Decision
from nodeagent.plan.timelimit import spoken


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
    """What lasts at present, as the record has it. A fault lasts until the job runs again; what a person did meanwhile
    (a pause and a resume) has it begin anew, since the phase did."""
    everybody = tuple(role.name for role in job.spec.roles)
    if job.phase == "running":
        return (Condition("PodRunning", job.since, "it has run for", roles=everybody),)
    found = []
    waits_for_others = job.head is None and len(job.control.met) < len(job.spec.after)
    if job.phase in ("queued", "holding") and not waits_for_others:
        since = max(job.since, job.not_before)
        found.append(Condition("PodPending", since, "it has waited for nodes for", roles=everybody))
    if job.phase == "forming":
        found.append(Condition("Unknown", job.since, "not all of its nodes have answered for", roles=everybody))
    entry = job.budget.get(str(job.last_number))
    if job.phase in ("forming", "holding") and entry is not None and (event := EVENTS.get(entry.kind)) is not None:
        lasts = f"{entry.text}, and it has not run again for"
        found.append(Condition(event, max(job.since, entry.at), lasts, entry.exit, entry.roles))
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


def _all(spec: JobSpec) -> Iterator[Policy]:
    yield from spec.policies
    for role in spec.roles:
        yield from role.policies or ()


def over(cluster: Cluster, job: JobRecord) -> Decision | None:
    """The end, or the pause, of a job for what has lasted for too long; None while nothing has."""
    due = next_due(job)
    if due is None or cluster.served < due.at or due.action not in ENDS:
        return None
    return ending(cluster, job, ENDS[due.action], Outcome(code=1, text=due.why), gone_nodes(cluster, job))


def bounded(job: JobRecord, decision: Decision) -> Decision:
    """A wait that lasts until the next policy acts at most."""
    due = next_due(job)
    if decision.step is not None or due is None or 0 < decision.at <= due.at:
        return decision
    return replace(decision, at=due.at)
