"""A job without a running generation: queued, holding, or paused and wanted again. Starts it when it fits, or says
what is missing."""

from __future__ import annotations

from nodeagent.model.job import JobRecord, Outcome
from nodeagent.model.timing import millis
from nodeagent.model.world import Cause, CauseKind
from nodeagent.plan import faults, restarts
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.membership import gone_nodes
from nodeagent.plan.placement import Placement, place
from nodeagent.plan.running import after_fault
from nodeagent.plan.steps import Decision, End, propose

ASSEMBLE = 60.0
"""A queued job waits this many seconds for nodes that are still getting ready before it starts smaller than its
target."""
SETTLE = 5.0
"""A holding job waits this many seconds for the same."""


def decide_waiting(cluster: Cluster, job: JobRecord, wall: float) -> Decision:
    gone = gone_nodes(cluster, job)
    found = faults.late_fault(cluster, job, wall)
    entry = job.budget.get(str(job.last_number))
    if job.phase == "holding" and found is not None:
        if found.fail:
            return after_fault(cluster, job, found, gone)
        # A node was lost, or it was a worker that ends no job: what was waited for was another fault.
        before = faults.without(job, job.last_number)
        delay = restarts.judge(before, cluster.served).delay_ms if found.spend.counts else 0
        step = End("holding", found.cause.text, gone, spend=found.spend, delay_ms=delay)
        return Decision(step, (found.cause.text,))
    if job.phase == "holding" and entry is not None and entry.fails:
        return Decision(None, (f"{entry.fails}; {faults.judged_when(faults.awaited(cluster, job))}",))
    again = found.spend if found is not None else entry if entry is not None and entry.fails else None
    if again is not None:  # it was paused before that was judged, and resumed by somebody
        again = again.model_copy(update={"fails": ""})
    if cluster.served < job.not_before:
        return Decision(None, (job.reason,), job.not_before)
    placement = place(cluster, job)
    if not placement.fits:
        return _no_fit(cluster, job, placement, gone)
    first = _earlier(cluster, job)
    if first is not None:
        return Decision(None, (f"job {first.name} is before it in the queue (priority {first.spec.priority})",))
    if len(placement.chosen) < job.control.target and placement.pending and cluster.served < _patience(job):
        names = ", ".join(c.node for c in placement.pending)
        return Decision(None, (f"waits for {names} to get ready",), _patience(job))
    return propose(cluster, job, _why_again(job), gone, again, placement, planned=False)


def _no_fit(cluster: Cluster, job: JobRecord, placement: Placement, gone: tuple[str, ...]) -> Decision:
    if job.phase in ("paused", "pausing"):
        return Decision(End("holding", placement.missing, gone), (placement.missing,))
    unfit = [c for c in placement.others if c.standing == "unfit"]
    able = [c for c in placement.others if c.standing != "unfit" and cluster.live(c.node)]
    if job.active is None and unfit and not able and not placement.chosen:
        text = f"no node can run it: {'; '.join(c.why for c in unfit)}"
        code = next((c.code for c in unfit if c.code), 1)
        return Decision(End("failed", text, gone, Outcome(code=code, text=text)), (text,))
    limit = job.spec.hold_timeout
    if limit is not None and job.phase == "holding" and cluster.served >= job.since + millis(limit):
        text = f"held for longer than its hold_timeout of {limit:g} s: {placement.missing}"
        return Decision(End("failed", text, gone, Outcome(code=1, text=text)), (text,))
    return Decision(None, (placement.missing,))


def _patience(job: JobRecord) -> int:
    """Served time (ms) until which nodes that are getting ready for the job are waited for."""
    return job.since + millis(ASSEMBLE if job.active is None else SETTLE)


def _earlier(cluster: Cluster, job: JobRecord) -> JobRecord | None:
    """A job before this one in the queue that could start now, or as soon as nodes are ready for it that are still
    waited for; those that cannot start hold nobody up."""
    mine = (-job.spec.priority, job.order)
    for other in sorted(cluster.jobs.values(), key=lambda j: (-j.spec.priority, j.order)):
        if (-other.spec.priority, other.order) >= mine:
            return None
        waiting = other.phase in ("queued", "holding") and other.control.desired == "run"
        waiting = waiting and other.uid not in cluster.refused
        if waiting and cluster.served >= other.not_before and _could_start(cluster, other):
            return other
    return None


def _could_start(cluster: Cluster, job: JobRecord) -> bool:
    placement = place(cluster, job)
    soon = len(placement.pending) if cluster.served < _patience(job) else 0
    return placement.fits or len(placement.chosen) + soon >= placement.minimum


def _why_again(job: JobRecord) -> Cause:
    if job.active is None:
        return Cause(kind="start", text="first start")
    if job.phase in ("paused", "pausing"):
        return Cause(kind="resume", text=f"resumed by {job.control.by or 'an operator'}")
    last = job.budget.get(str(job.active.number))
    if last is None:
        return Cause(kind="join", text="enough nodes are back")
    kinds: tuple[CauseKind, ...] = (
        "worker_failed",
        "hang",
        "pod_failed",
        "node_lost",
        "collective",
        "fenced",
        "reform",
    )
    kind = next((k for k in kinds if k == last.kind), "join")
    return Cause(kind=kind, text=last.text, node=last.node, rank=last.rank)
