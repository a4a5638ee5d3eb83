"""What a pod has to say of its generation, read from what its shim tells.

Decides nothing: when it is said, and what follows, is ``pod.py``'s and ``faults.py``'s.
"""

from __future__ import annotations

from nodeagent.model.world import Head, PodReport
from nodeagent.plan.blame import blame, farewell, is_failure
from nodeagent.workers.base import PodStatus


def read_report(status: PodStatus) -> PodReport | None:
    """What a started pod has to say; None while its workers run and get on."""
    if status.refused:
        return PodReport(state="refused", reason=status.refused)
    if status.fenced:
        return PodReport(state="fenced", exits=status.exits, reason=status.reason)
    if any(is_failure(e) for e in status.exits):
        return PodReport(state="failed", exits=status.exits)
    done = [e for e in status.exits if not e.stopped and e.code == 0]
    if done and len(done) == len(status.workers):
        return PodReport(state="succeeded", exits=status.exits)
    if status.stall is not None and status.phase == "running":
        return PodReport(state="running", stall=status.stall)
    return None


def cut_short(status: PodStatus) -> PodReport | None:
    """Its workers were stopped though their generation is active: by an agent that left, and whose goodbye the store
    never heard."""
    if status.phase != "exited":
        return None
    return PodReport(state="fenced", exits=status.exits, reason="an agent that left this node stopped its workers")


def farewell_report(status: PodStatus) -> PodReport | None:
    """What its workers' planned stop has to say."""
    text = "; ".join(filter(None, (farewell(status.exits), status.written)))
    return PodReport(state="left", exits=status.exits, reason=text) if text else None


def says_the_same(sent: PodReport, report: PodReport) -> bool:
    """Workers that were stopped since make no difference: the acknowledgement of the next generation tells of all."""
    return _gist(sent) == _gist(report)


def _gist(report: PodReport) -> tuple[object, ...]:
    return report.state, sum(not e.stopped for e in report.exits), report.stall


def going_on(sent: PodReport | None) -> PodReport | None:
    """What takes back that the pod saw no progress."""
    return PodReport(state="running") if sent is not None and sent.state == "running" else None


def doom(head: Head, node: str, own: PodReport | None) -> str:
    """Why the active generation cannot go on, by what all have reported and this node is about to; empty if it can. A
    worker has failed by itself: whatever is decided, the others are stopped. Victims alone do not count: the one that
    failed first shall end by itself, and say of what."""
    reports = head.reports if own is None else {**head.reports, node: own}
    if all(report.state != "failed" for report in reports.values()):
        return ""
    who = blame(reports)
    return who.text if who is not None and not who.victim else ""
