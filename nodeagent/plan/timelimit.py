"""The end of a job whose time limit is reached. What it has used of that is the record's to say
(``JobRecord.time_used``). Never reads a clock."""

from __future__ import annotations

from dataclasses import replace

from nodeagent.model.job import TERMINAL, USES_TIME, JobRecord, Outcome
from nodeagent.model.timing import millis
from nodeagent.plan import faults
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.membership import gone_nodes
from nodeagent.plan.steps import Decision, End

CODE = 124
"""Exit code of a job whose time is over, as that of timeout(1)."""


def ends_at(job: JobRecord) -> int:
    """Served time (ms) at which the job's time is over if it stays in its phase; 0 for never."""
    limit = job.spec.time_limit
    if limit is None or job.first_active is None or job.phase not in USES_TIME:
        return 0
    return max(job.since, job.first_active) + max(0, millis(limit) - job.ran)


def over(cluster: Cluster, job: JobRecord) -> Decision | None:
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
    outcome = Outcome(code=CODE, text=text)
    return Decision(End("failed", text, gone_nodes(cluster, job), outcome, planned=True), (text,))


def bounded(job: JobRecord, decision: Decision) -> Decision:
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
