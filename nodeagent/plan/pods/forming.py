"""What leads up to a generation on one of its nodes: what is older is stopped, nothing below it ever starts here, and
the store is told so.
"""

from __future__ import annotations

from collections import Counter

from nodeagent.model.world import Ack, Generation, Member
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.nodes.candidates import strays
from nodeagent.plan.nodes.failsafe import must_let_go
from nodeagent.plan.pods.actions import PodAction, Prepare, Promise, SendAck
from nodeagent.plan.pods.podcase import PodCase
from nodeagent.plan.pods.report import farewell_report, lost_report, of_member, read_report, with_crowd
from nodeagent.plan.pods.stopping import stop
from nodeagent.pods.base import Rendezvous


def form(case: PodCase) -> PodAction | None:
    """A part of a generation that is forming: stop what is older, promise, acknowledge."""
    cluster, job, generation, node, status = case.cluster, case.job, case.forming, case.node, case.status
    if generation is None or case.unknown:
        return None
    member = case.member
    if case.stuck and member is not None:
        return None  # the others may go on, but not with this node
    if status is not None and not status.quiet and not case.stuck:
        return stop(case, generation, status, f"generation {generation.number} is forming: {generation.cause.text}")
    if member is None:
        return acknowledge(case, generation)
    if node not in generation.missing and node not in generation.holders:
        if case.lends or not must_let_go(cluster, job, node):
            return None
        # Only the lending is sent again. Nothing else is checked again: if the shim has died since, the start shows it.
        why = f"{node} gives no more failsafe time to an older generation"
        return SendAck(job.uid, generation.token, Ack(life=case.life), None, why)
    if status is None or status.phase == "gone":
        return Prepare(job.uid, f"a member of generation {generation.number}")
    if status.phase in ("preparing", "unfit"):
        return None
    if node in strays(cluster, job, {node: status.folder}):
        return None  # the others form without it as soon as its record says so
    leads, rendezvous = member.group_rank == 0, status.rendezvous
    lacks = leads and (rendezvous is None or rendezvous.token != generation.token)
    # A shim that has its promise from the disk, or found no free port, holds none; one that is about to hears it twice.
    if status.highest != generation.token or lacks or len(status.ports) != member.ports:
        return promise(case, generation, member)
    return acknowledge(case, generation, rendezvous if leads else None)


def promise(case: PodCase, generation: Generation, member: Member) -> Promise:
    """Of a member; group rank 0 also holds the generation's rendezvous."""
    leads = member.group_rank == 0
    above = _ports_above(case.cluster, generation, case.node) if leads and not member.places else 0
    why = f"generation {generation.number} is forming"
    return Promise(case.job.uid, generation.token, leads, why, member.ports, above)


def _ports_above(cluster: Cluster, generation: Generation, first: str) -> int:
    """How far the workers' ports count up from the rendezvous', as in ``pods/environment.py``: at each address by
    itself, which nodes may share; and one more at that of the first node."""
    at = {name: node.facts.address for name in generation.members if (node := cluster.nodes.get(name)) is not None}
    workers: Counter[str] = Counter()
    for name, member in generation.members.items():
        workers[at.get(name, name)] += member.workers
    return max(workers[at.get(first, first)], max(workers.values()) - 1)


def acknowledge(case: PodCase, generation: Generation, rendezvous: Rendezvous | None = None) -> SendAck:
    """Nothing older than this generation runs here. ``rendezvous``: that of the generation, held on its first node."""
    node, job, status, member, last = case.node, case.job, case.status, generation.members.get(case.node), None
    if status is not None and status.generation is not None and status.generation.number == job.last_number:
        held = generation.holders.get(node)
        own = of_member(status, held) if held is not None else status
        last = read_report(own) or farewell_report(own)
        last = with_crowd(last, case.memory_share(held)) if held is not None else last
    if last is None and status is not None and job.silent.get(node) == case.life:
        last = lost_report(status, job.last_number)  # no report since a fault: it may be this
    asked = member.ports if member is not None else 0
    ack = Ack(
        life=case.life,
        ended=generation.state == "ended",
        address=rendezvous.address if rendezvous is not None else "",
        store_hosted=rendezvous is not None and bool(rendezvous.address) and rendezvous.store_hosted,
        stuck=case.stuck,
        lends=case.lends and node in job.failsafe_members,
        ports=status.ports if status is not None and len(status.ports) == asked else (),
    )
    why = f"nothing older than generation {generation.number} runs on {node}"
    return SendAck(job.uid, generation.token, ack, last, why)
