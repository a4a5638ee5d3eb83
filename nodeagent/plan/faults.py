"""What went wrong in the active generation, and what it costs: the cause, the budget entry, the policy's word.

Owns the reading of reports and lapses; what the gang does next is ``gang.py``'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nodeagent.model.job import JobRecord, Outcome, Spend
from nodeagent.model.jobspec import EventName
from nodeagent.model.timing import millis
from nodeagent.model.world import Cause, CauseKind, Head, PodReport
from nodeagent.plan.blame import REFORM_CODES, Blame, blame
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.hang import MOST_IN_A_ROW, Hung, find_hang, got_further, in_a_row
from nodeagent.plan.membership import gone_nodes, natural
from nodeagent.plan.policies import match
from nodeagent.plan.restarts import spent

EVENTS: dict[CauseKind, EventName] = {
    "worker_failed": "WorkerFailed",
    "hang": "WorkerHung",
    "pod_failed": "PodFailed",
    "node_lost": "NodeLost",
    "fenced": "NodeLost",
}
"""The policy event of each kind of fault. ``collective`` has none: its exit codes are the victims'."""

COUNTS: frozenset[CauseKind] = frozenset({"worker_failed", "hang", "collective", "pod_failed"})
"""Faults of the job itself: they spend the budget. Membership, hardware and operators never do."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a generation, complete: what it was, what it costs, and how the job would end by it."""

    cause: Cause
    spend: Spend
    outcome: Outcome
    fail: str = ""
    """Not empty: the job fails now, for this reason (a policy, or an error right after the first start)."""


def find_fault(cluster: Cluster, job: JobRecord, wall: float) -> Fault | None:
    """The fault of an active generation, None if all is well. ``wall`` is Unix time, for people."""
    head = job.head
    if head is None:
        return None
    gone = [n for n in gone_nodes(cluster, job) if n in head.members and cluster.gone(n, head.members[n].life)]
    if not gone and not cluster.notes.once(f"told:{job.uid}", (head,), lambda _before: _told(head)):
        return None
    gone.sort(key=lambda n: head.members[n].group_rank)
    reports = dict(head.reports)
    who = blame(reports)
    if who is not None and not who.victim:
        return _worker_fault(cluster, job, who, wall)
    if gone:
        return _node_fault(cluster, job, gone, wall)
    for state, kind, phrase in _POD_FAULTS:
        for node, report in sorted(reports.items(), key=lambda item: item[1].seq):
            if report.state == state:
                text = f"{phrase} on {node}" + (f": {report.reason}" if report.reason else "")
                cause = Cause(kind=kind, text=text, node=node)
                return _fault(job, cluster, cause, wall, Outcome(code=1, text=text))
    if who is not None:
        return _worker_fault(cluster, job, who, wall)
    hung = find_hang(head)
    return _hang_fault(cluster, job, hung, wall) if hung is not None else None


def _told(head: Head) -> bool:
    """Some pod reports a fault."""
    faults = {state for state, _, _ in _POD_FAULTS}
    reports = head.reports
    return blame(reports) is not None or any(r.state in faults for r in reports.values()) or find_hang(head) is not None


def _unsolved(job: JobRecord) -> Spend | None:
    """The budget entry of the generation that was active last, if only victims of its end are known."""
    last = job.budget.get(str(job.active.number)) if job.active is not None else None
    return last if last is not None and last.kind == "collective" else None


def late_blame(cluster: Cluster, job: JobRecord, wall: float) -> Fault | None:
    """While re-forming or holding for victims only: what has become known since, where it changes what happens.

    Either the culprit's own exit has arrived and ends the job, or a node that has not been heard since is gone: it
    died under the victims, which is no fault of the job. A node that had acknowledged outlived the fault.
    """
    head = job.head
    if head is None or _unsolved(job) is None:
        return None
    who = blame(job.last_reports)
    if who is not None and not who.victim:
        fault = _worker_fault(cluster, job, who, wall)
        return fault if fault.fail else None
    silent = {n for n, m in head.members.items() if n not in head.acks and cluster.gone(n, m.life)}
    silent |= {n for n, h in head.holders.items() if cluster.gone(n, h.life)}
    return _node_fault(cluster, job, sorted(silent, key=natural), wall) if silent else None


def over_budget(job: JobRecord, served: int) -> Outcome | None:
    """How a job ends whose last fault had only victims and was one more than its budget allows; None if it goes
    on."""
    last = _unsolved(job)
    limits = job.spec.restarts
    if last is None or not last.counts or spent(job, served) <= limits.max:
        return None
    who = blame(job.last_reports)
    text = f"restart budget spent: {limits.max} restarts within {limits.window:g} s; last: "
    if who is not None and not who.victim:
        return Outcome(code=who.code, text=text + who.text, error=who.worker.error)
    return Outcome(code=last.exit if last.exit is not None else 1, text=text + last.text, error=last.error)


_POD_FAULTS: tuple[tuple[str, CauseKind, str], ...] = (
    ("fenced", "fenced", "workers stopped themselves, without a lease,"),
    ("lost", "pod_failed", "the pod died"),
    ("refused", "pod_failed", "the pod could not start"),
)


def _node_fault(cluster: Cluster, job: JobRecord, gone: list[str], wall: float) -> Fault:
    left = all((r := cluster.nodes.get(n)) is not None and r.left for n in gone)
    text = f"{'nodes' if len(gone) > 1 else 'node'} {', '.join(gone)} {'left' if left else 'lost'}"
    return _fault(job, cluster, Cause(kind="node_lost", text=text, node=gone[0]), wall, Outcome(code=1, text=text))


def _worker_fault(cluster: Cluster, job: JobRecord, who: Blame, wall: float) -> Fault:
    kind: CauseKind = "collective" if who.victim else "worker_failed"
    if who.worker.signal is None and who.worker.code in REFORM_CODES:
        kind = "reform"
    cause = Cause(kind=kind, text=who.text, node=who.node, rank=who.worker.rank)
    outcome = Outcome(code=who.code, text=who.text, error=who.worker.error)
    return _fault(job, cluster, cause, wall, outcome, who)


def _hang_fault(cluster: Cluster, job: JobRecord, hung: Hung, wall: float) -> Fault:
    cause = Cause(kind="hang", text=hung.text, node=hung.node, rank=hung.rank)
    fault = _fault(job, cluster, cause, wall, Outcome(code=1, text=hung.text, error=hung.table))
    progressed = got_further(job, hung, cluster.served)
    spend = fault.spend.model_copy(update={"step": hung.step, "progressed": progressed, "stalled": hung.stalled})
    fail = fault.fail
    row = 0 if progressed else in_a_row(job)
    if not fail and row >= MOST_IN_A_ROW:
        fail = (
            f"hung {row + 1} times in a row without progress, so it is not started again: {hung.text}; look at the "
            f"stacks (nodeagentctl describe {job.name}), mend it and submit it again"
        )
    return replace(fault, spend=spend, fail=fail)


def _fault(
    job: JobRecord, cluster: Cluster, cause: Cause, wall: float, outcome: Outcome, who: Blame | None = None
) -> Fault:
    code = who.code if who is not None else None
    spend = Spend(
        at=cluster.served,
        wall=round(wall, 3),
        kind=cause.kind,
        counts=cause.kind in COUNTS,
        node=cause.node,
        rank=cause.rank,
        text=cause.text,
        error=outcome.error,
        exit=code,
    )
    event = EVENTS.get(cause.kind)
    action = match(job.spec.policies, event, code) if event is not None else None
    fail = ""
    if action == "FailJob":
        fail = f"a policy of the job says FailJob for {event}: {cause.text}"
    elif action is None and cause.kind == "worker_failed" and who is not None and _early(cluster, job, who):
        fail = (
            f"failed within {cluster.timing.early:g} s of its first start, so it is not started again: {cause.text}; "
            f"mend it and submit it again"
        )
    return Fault(cause, spend, outcome, fail)


def _early(cluster: Cluster, job: JobRecord, who: Blame) -> bool:
    """An error exit (not a signal: nobody mistypes a SIGKILL) of the first generation, soon after it became
    active."""
    if who.worker.signal is not None or job.restarts > 0 or job.first_active is None:
        return False
    return cluster.served - job.first_active <= millis(cluster.timing.early)


def all_succeeded(job: JobRecord) -> bool:
    """Every member of the active generation reported success."""
    head = job.head
    return head is not None and all(
        (r := head.reports.get(n)) is not None and r.state == "succeeded" for n in head.members
    )


def final_report(report: PodReport | None) -> bool:
    """The pod will say nothing more."""
    return report is not None and report.state != "running"
