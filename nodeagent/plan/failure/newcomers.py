"""A node that joined a gang not long ago, and whose workers fail at a start: the node's fault, until it is shown to be
the program's.

A broken node (a mount or a library that is not there, a GPU that fails under load) says that it is ready, and elastic
gangs grow onto it by themselves. Its failures would spend the budget of a job that trains well without it. So such a
failure is one of membership (``join_failed``): the gang goes on without the node, which is left out for longer each
time (``nodes/setbacks.py``), and nothing is spent. It is one if all of this holds:

- the fault would count, and no policy of the job ends it;
- the pod that died, or the worker that failed first, is a newcomer's. Who was first is told by the order of reports
  alone, and what is blamed is the same one: what workers write makes nothing free of charge;
- its generation had been active for no longer than ``early``, and some member had been there before the newcomer.
  Earlier generations may have trained with it: who joined within ``NEW`` is a newcomer in all of them;
- the job can go on without it (``job/running.py`` asks).

A program that fails by itself gets nothing of it: the gang without the node is started at once, and fails there at the
job's own cost; a node that is left out cannot fail. A program that does not bear more workers fails with each
newcomer: after ``FREE`` different ones, with none that stayed in between, each further one counts. It is left out all
the same.
"""

from __future__ import annotations

from nodeagent.model.job import JobRecord
from nodeagent.model.timing import millis
from nodeagent.model.world import Cause, Generation, Member
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.failure.blame import first_failed
from nodeagent.plan.failure.faults import Fault
from nodeagent.plan.nodes.setbacks import FAILED, LONGEST, NEW, newcomer

FREE = 3
"""Different newcomers, one after the other, whose failures cost nothing."""


def join_fault(cluster: Cluster, job: JobRecord, fault: Fault) -> Fault | None:
    """The fault of an active generation, if it is a newcomer's; None: it is not. After too many in a row it costs
    what it costs."""
    generation, served = job.generation, cluster.served
    if generation is None or generation.state != "active" or fault.cause.kind not in FAILED or fault.by_policy:
        return None
    member = generation.members.get(fault.cause.node)
    if member is None or not newcomer(member, served) or not _was_first(generation, fault):
        return None
    if served - generation.since > millis(cluster.timing.early):
        return None
    if all(other.joined >= member.joined for other in generation.members.values()):
        return None
    if _in_a_row(job, generation, member, served) >= FREE:
        return None if fault.fail else fault
    text = f"{fault.cause.text}; {member.node} joined within the last {NEW / 60:g} min: it goes on without it"
    cause = Cause(kind="join_failed", text=text, node=member.node, rank=fault.cause.rank)
    spend = fault.spend.model_copy(update={"kind": cause.kind, "counts": False, "text": text})
    return Fault(cause, spend, fault.outcome)


def _was_first(generation: Generation, fault: Fault) -> bool:
    return fault.cause.kind == "pod_failed" or first_failed(generation.reports) == fault.cause.node


def _in_a_row(job: JobRecord, generation: Generation, member: Member, served: int) -> int:
    """Other nodes that failed so, since one joined that is still there."""
    stayed = max((m.joined for m in generation.members.values() if m.joined < member.joined), default=0)
    since = max(stayed, served - millis(LONGEST))
    return len({one.node for one in job.setbacks if one.kind == "failed" and one.at > since} - {member.node})
