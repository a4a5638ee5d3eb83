"""A job with an active generation: has it failed, finished, or is it to change? Healthy training is never stopped
for a mere wish."""

from __future__ import annotations

from nodeagent.model.job import JobRecord, Outcome, Spend
from nodeagent.model.timing import millis
from nodeagent.model.world import Cause, CauseKind, Head
from nodeagent.plan import faults, restarts
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.membership import gone_nodes
from nodeagent.plan.placement import place
from nodeagent.plan.policies import match
from nodeagent.plan.steps import Decision, End, propose, propose_or_hold


def decide_running(cluster: Cluster, job: JobRecord, head: Head, wall: float) -> Decision:
    gone = gone_nodes(cluster, job)
    if faults.all_succeeded(job):  # first: a node that goes now is not missed any more
        text = f"every worker of generation {head.number} exited 0"
        return Decision(End("succeeded", text, gone, Outcome(code=0, text=text)), (text,))
    fault = faults.find_fault(cluster, job, wall)
    if fault is not None:
        return after_fault(cluster, job, fault, gone)
    if any(faults.final_report(r) for r in head.reports.values()):
        return Decision(None, ("some pods have finished; waits for the others",))
    return _change(cluster, job, head, wall)


def after_fault(cluster: Cluster, job: JobRecord, fault: faults.Fault, gone: tuple[str, ...]) -> Decision:
    """What a fault leads to: the job's end, a wait, or the next generation."""
    if fault.fail:
        return Decision(End("failed", fault.fail, gone, fault.outcome, fault.spend), (fault.fail,))
    if fault.spend.counts:
        verdict = restarts.judge(job, cluster.served)
        if not verdict.allowed:
            text = f"{verdict.why}; last: {fault.cause.text}"
            if fault.cause.kind == "collective":  # a lost node would not count: wait out its lease
                text += "; fails unless a node proves to be lost"
                lease = millis(cluster.timing.lease + cluster.timing.credit)
                return Decision(End("holding", text, gone, spend=fault.spend, delay_ms=lease), (text,))
            return Decision(End("failed", text, gone, fault.outcome, fault.spend), (text,))
        if verdict.delay_ms:
            text = f"{fault.cause.text}; {verdict.why}; starts again in {verdict.delay_ms / 1000:g} s"
            step = End("holding", text, gone, spend=fault.spend, delay_ms=verdict.delay_ms)
            return Decision(step, (text,))
    return propose_or_hold(cluster, job, fault.cause, gone, fault.spend, planned=False)


def _change(cluster: Cluster, job: JobRecord, head: Head, wall: float) -> Decision:
    """Nothing is wrong: has an operator asked for a change, or can the gang grow?"""
    leaving = [m.node for m in head.ordered() if _draining(cluster, m.node)]
    if leaving:
        cause = Cause(kind="drain", text=f"node {', '.join(leaving)} is being drained", node=leaving[0])
        if match(job.spec.policies, "PodEvicted", None) == "FailJob":
            text = f"a policy of the job says FailJob for PodEvicted: {cause.text}"
            step = End(
                "failed", text, outcome=Outcome(code=1, text=text), spend=_note(cluster, cause, wall), planned=True
            )
            return Decision(step, (text,))
        return propose_or_hold(cluster, job, cause, (), _note(cluster, cause, wall), planned=True)
    if job.control.restart > job.restart_done:
        text = f"restarted by {job.control.by or 'an operator'}"
        return _propose_or_stay(cluster, job, Cause(kind="restart", text=text), wall)
    size, target = len(head.members), job.control.target
    if target < size:
        cause = Cause(kind="scale", text=f"scaled from {size} to {target} nodes by {job.control.by or 'an operator'}")
        return _propose_or_stay(cluster, job, cause, wall)
    if target > size:
        return _grow(cluster, job, head, wall)
    return Decision(None)


def _grow(cluster: Cluster, job: JobRecord, head: Head, wall: float) -> Decision:
    """Below the target: at once when an operator has just asked for it, else after the cool-down. Never before all
    newcomers are ready."""
    placement = place(cluster, job)
    newcomers = [c for c in placement.chosen if c.node not in head.members]
    size, target = len(head.members), job.control.target
    asked = job.control.rev > head.control_rev
    short = f"runs on {size} of {target} nodes"
    if not newcomers:
        return Decision(None, (f"{short}: {placement.missing}",))
    if len(placement.chosen) < target and placement.pending and asked:
        return Decision(None, (f"{short}: waits for {', '.join(c.node for c in placement.pending)} to get ready",))
    if len(placement.chosen) <= size:
        return Decision(None, (f"{short}: {placement.missing}",))
    names = ", ".join(c.node for c in newcomers)
    cool = millis(cluster.timing.cooldown)
    at = max([head.since + cool] + [c.joined + cool for c in newcomers])
    if not asked and cluster.served < at:
        return Decision(None, (f"{short}; {names} joins after the cool-down of {cluster.timing.cooldown:g} s",), at)
    kind: CauseKind = "scale" if asked else "join"
    text = (
        f"{names} joined" if not asked else f"scaled from {size} to {len(placement.chosen)} nodes by {job.control.by}"
    )
    return _propose_or_stay(cluster, job, Cause(kind=kind, text=text), wall)


def _propose_or_stay(cluster: Cluster, job: JobRecord, cause: Cause, wall: float) -> Decision:
    """A wish, not a need: healthy training goes on where it cannot be met (a member is cordoned or its GPU sick)."""
    placement = place(cluster, job)
    if not placement.fits:
        return Decision(None, (f"not yet {cause.text}: {placement.missing}",))
    return propose(cluster, job, cause, (), _note(cluster, cause, wall), placement, planned=True)


def _note(cluster: Cluster, cause: Cause, wall: float) -> Spend:
    """A line in the job's history, at no cost: what ended the generation before."""
    text, node = cause.text, cause.node
    return Spend(at=cluster.served, wall=round(wall, 3), kind=cause.kind, counts=False, node=node, text=text)


def _draining(cluster: Cluster, node: str) -> bool:
    record = cluster.nodes.get(node)
    return record is not None and record.cordon is not None and record.cordon.drain
