"""What leads up to a generation on one of its nodes: what is older is stopped, nothing below it ever starts here, and
the store is told so.
"""

from __future__ import annotations

from collections import Counter

from nodeagent.model.job import JobRecord
from nodeagent.model.world import Ack, Generation
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.nodes.candidates import strays
from nodeagent.plan.nodes.failsafe import must_let_go
from nodeagent.plan.pods.actions import PodAction, Prepare, Promise, SendAck
from nodeagent.plan.pods.podcase import PodCase, _unknown
from nodeagent.plan.pods.report import farewell_report, lost_report, of_member, read_report, with_crowd
from nodeagent.plan.pods.stopping import _stop


def _form(case: PodCase) -> PodAction | None:
    cluster, job, generation, node, status = case.cluster, case.job, case.generation, case.node, case.status
    if job is None or generation is None or not case.forms or _unknown(case):
        return None
    in_generation = case.is_member
    if case.stuck:  # the others may go on, but not with this node
        return None if in_generation else _ack(case, job, generation, generation.holders[node].life)
    if status is not None and not status.quiet:
        why = f"generation {generation.number} is forming: {generation.cause.text}"
        return _stop(case, job, generation.planned, why)
    life = generation.members[node].life if in_generation else generation.holders[node].life
    if not in_generation:
        return _ack(case, job, generation, life)
    if node not in generation.missing and node not in generation.holders:
        if case.lends or not must_let_go(cluster, job, node):
            return None
        # Only the lending is sent again. Nothing else is checked again: if the shim has died since, the start shows it.
        again = Ack(life=life)
        return SendAck(
            job.uid, generation.token, again, None, f"{node} gives no more failsafe time to an older generation"
        )
    if status is None or status.phase == "gone":
        return Prepare(job.uid, f"a member of generation {generation.number}")
    if status.phase in ("preparing", "unfit"):
        return None
    if node in strays(cluster, job, {node: status.folder}):
        return None  # the others form without it as soon as its record says so
    leads, rendezvous = generation.members[node].group_rank == 0, status.rendezvous
    lacks = leads and (rendezvous is None or rendezvous.token != generation.token)
    # A shim that has its promise from the disk, or found no free port, holds none; one that is about to hears it twice.
    if status.highest != generation.token or lacks or len(status.ports) != generation.members[node].ports:
        return _promise(cluster, job, generation, node)
    address = rendezvous.address if leads and rendezvous is not None else ""
    return _ack(case, job, generation, life, address)


def _promise(cluster: Cluster, job: JobRecord, generation: Generation, node: str) -> Promise:
    me = generation.members[node]
    leads = me.group_rank == 0
    above = _ports_above(cluster, generation, node) if leads and not me.places else 0
    return Promise(job.uid, generation.token, leads, f"generation {generation.number} is forming", me.ports, above)


def _ports_above(cluster: Cluster, generation: Generation, first: str) -> int:
    """How far the workers' ports count up from the rendezvous', as in ``pods/environment.py``: at each address by
    itself, which nodes may share; and one more at that of the first node."""
    at = {name: node.facts.address for name in generation.members if (node := cluster.nodes.get(name)) is not None}
    workers: Counter[str] = Counter()
    for name, member in generation.members.items():
        workers[at.get(name, name)] += member.workers
    return max(workers[at.get(first, first)], max(workers.values()) - 1)


def _ack(case: PodCase, job: JobRecord, generation: Generation, life: str, address: str = "") -> SendAck:
    node, status = case.node, case.status
    hosted = status is not None and status.rendezvous is not None and bool(address) and status.rendezvous.store_hosted
    last = None
    if status is not None and status.generation is not None and status.generation.number == job.last_number:
        held = generation.holders.get(node)
        own = of_member(status, held) if held is not None else status
        last = read_report(own) or farewell_report(own)
        last = with_crowd(last, case.memory_share(held)) if held is not None else last
    if last is None and status is not None and job.silent.get(node) == life:  # no report since a fault: it may be this
        last = lost_report(status, job.last_number)
    stuck = status is not None and status.phase == "stuck"
    member = generation.members.get(node)
    asked = member.ports if member is not None else 0
    ports = status.ports if status is not None and len(status.ports) == asked else ()
    ack = Ack(
        life=life, ended=generation.state == "ended", address=address, store_hosted=hosted, stuck=stuck,
        lends=case.lends and node in job.failsafe_members, ports=ports,
    )  # fmt: skip
    return SendAck(
        job.uid, generation.token, ack, last, f"nothing older than generation {generation.number} runs on {node}"
    )
