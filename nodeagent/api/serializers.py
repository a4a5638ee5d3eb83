"""The JSON of jobs, pods, workers and nodes; the field names are a contract. Fields are added, never renamed.

Pure: records in, plain values out; the caller passes the wall clock. Must never ask the store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from nodeagent.agent.gauges import node_state
from nodeagent.api.auth import DATABASE
from nodeagent.api.jobpods import WorkersTime, beside_the_gang, unpublished
from nodeagent.model.health import Verdict
from nodeagent.model.job import TERMINAL, BudgetEntry, JobRecord
from nodeagent.model.node import NodeRecord
from nodeagent.model.pod import PodState, WorkerState
from nodeagent.model.queue import queue_of
from nodeagent.model.world import Generation, Member, PodReport
from nodeagent.plan.cluster import Cluster, natural
from nodeagent.plan.failure.blame import shell_code
from nodeagent.plan.failure.budget import restarts_spent
from nodeagent.plan.failure.judgement import judged_cause, judged_when
from nodeagent.plan.nodes.health import breaker, condition, next_step
from nodeagent.plan.nodes.work import NodeWork, PlacedPod, work_on
from nodeagent.plan.pods.report import without_output
from nodeagent.plan.queueing.elastic import borrowed
from nodeagent.plan.queueing.queue import places
from nodeagent.plan.repair import described
from nodeagent.store.messages import Unread

API_VERSION = "nodeagent/v1"

Json = dict[str, Any]


def items(rows: Sequence[Json], **more: object) -> Json:
    """The envelope of every list."""
    return {"apiVersion": API_VERSION, "items": list(rows), **more}


def unread_json(unread: Iterable[Unread]) -> list[Json]:
    """Records of the store that are left out since they cannot be read."""
    return [{"key": one.key, "why": one.why} for one in unread]


def _place(member: Member | None, rank: int) -> str:
    """Name of a rank's place (``trainer.0``); empty in a job of one role."""
    place = member.place_of(rank) if member is not None else None
    return place.name if place is not None else ""


def _worker(state: WorkerState, member: Member | None) -> Json:
    return {
        "rank": state.rank,
        "local_rank": state.local_rank,
        "place": _place(member, state.rank),
        "pid": state.pid,
        "state": state.state,
        "exit": state.exit,
        "step": state.step,
        "doing": state.doing,
    }


def _reported_workers(member: Member, report: PodReport | None, over: bool) -> list[Json]:
    """Workers of a pod that publishes nothing (any more): from its agent's last report."""
    ended = {e.local_rank: e for e in (report.exits if report else ())}
    well = report is not None and report.state == "succeeded"
    out: list[Json] = []
    for local in range(member.workers):
        gone = ended.get(local)
        out.append(
            {
                "rank": member.first_rank + local,
                "local_rank": local,
                "place": _place(member, member.first_rank + local),
                "pid": None if gone is None else gone.pid,
                "state": "exited" if over or well or gone is not None else "unknown",
                "exit": shell_code(gone) if gone is not None else 0 if well else None,
                "step": None,
                "doing": "",
            }
        )
    return out


def _published_pod(state: PodState, member: Member | None, fresh: bool) -> Json:
    """``fresh``: it is of the member's generation."""
    return {
        "role": (member.role_names if member is not None else "") or state.role,
        "node": state.node,
        "phase": state.phase,
        "reason": state.reason,
        "generation": state.generation,
        "shim_pid": state.shim_pid,
        "fork_server_pid": state.fork_server_pid,
        "snapshot_bytes": state.snapshot_bytes,
        "preforked": state.preforked,
        "preforked_memory": state.preforked_memory,
        "workers": [_worker(w, member if fresh else None) for w in state.workers],
    }


def _reported_pod(role: str, member: Member, number: int, phase: str, reason: str, workers: list[Json]) -> Json:
    return {
        "role": member.role_names or role,
        "node": member.node,
        "phase": phase,
        "reason": reason,
        "generation": number,
        "shim_pid": None,
        "fork_server_pid": None,
        "snapshot_bytes": 0,
        "preforked": 0,
        "preforked_memory": 0,
        "workers": workers,
    }


def pods_json(
    job: JobRecord, cluster: Cluster, published: Mapping[str, PodState], away: bool
) -> tuple[list[Json], list[Json]]:
    """(pods of the gang, by rank, then those that are still stopping; spares that are ready). ``away``: the store could
    not be asked for published pods."""
    generation, asked = job.generation, job.spec.role_names
    reported = dict(generation.reports) if generation is not None else {}
    if generation is not None and job.last_number == generation.number:
        reported = dict(job.last_reports) | reported
    members = generation.ordered() if generation is not None else ()
    gang = []
    for m in members:
        assert generation is not None
        state, report, over = published.get(m.node), reported.get(m.node), generation.state == "ended"
        fresh = state is not None and state.generation == generation.number
        # That its workers of an older generation have ended says nothing of this one's, which are still to come.
        if state is not None and (fresh or (report is None and state.phase != "exited")):
            gang.append(_published_pod(state, m, fresh))
            continue
        live = cluster.live(m.node, m.life) or job.phase in TERMINAL
        phase, reason = unpublished(m.node, report, over=over, live=live, asked=not away or state is not None)
        gang.append(_reported_pod(asked, m, generation.number, phase, reason, _reported_workers(m, report, over)))
    stopping, spares = beside_the_gang(job, cluster, published)
    gang += [_published_pod(published[node], None, False) for node in stopping]
    return gang, [_published_pod(published[node], None, False) for node in spares]


def job_json(
    job: JobRecord,
    cluster: Cluster,
    published: Mapping[str, PodState],
    now: float,
    away: bool = False,
    names: Callable[[int], str] = DATABASE.shown,
    planned: Json | None = None,
) -> Json:
    """One job, in the form of lists. ``now`` is Unix time; age and duration are seconds, and the duration is the
    time that it had its nodes, as for its time limit; ``away``: see ``pods_json``; ``names``: users by uid;
    ``planned``: the result of ``planned_json``, which a thread cannot ask for."""
    size, generation, cause = job.sized.nodes, job.generation, judged_cause(job)
    if planned is None:
        planned = planned_json(job, cluster, places(cluster))
    gang, spares = pods_json(job, cluster, published, away)
    chief = generation.ordered()[0].node if generation is not None and generation.members else None
    return {
        "name": job.name,
        "uid": job.uid,
        "phase": job.phase,
        "reason": job.reason,
        "generation": 0 if generation is None else generation.number,
        "generation_state": None if generation is None else generation.state,
        "restarts": job.restarts,
        "min": size.min,
        "max": size.max,
        "target": job.control.target,
        "borrowed": planned["borrowed"],
        "roles": _roles(job),
        "age": round(max(0.0, now - job.submitted), 1),
        "duration": None if job.first_active is None else round(job.time_used(cluster.served) / 1000, 1),
        "chief": chief,
        "gpus": _gpus(generation),
        "world_nodes": 0 if generation is None else len(generation.members),
        "world_size": 0 if generation is None else generation.world_size,
        "owner": names(job.owner),
        "user": job.spec.user,
        "desired": job.control.desired,
        "deleting": job.control.delete,
        "control_rev": job.control.rev,
        "scale": _scale(job, cluster),
        "restart": {"asked": job.control.restart, "done": job.restart_done},
        "cause": None if cause is None else cause.model_dump(exclude_defaults=True) | {"kind": cause.kind},
        "outcome": None if job.outcome is None else job.outcome.model_dump(),
        "submitted": job.submitted,
        "started": job.started,
        "ended": job.ended,
        "pods": gang,
        "spares": spares,
        "failsafe_members": _failsafe_members(job, cluster),
        "checkpoint": _checkpoint(job),
        "priority": job.spec.priority,
        "queue": planned["queue"],
        "in_queue": queue_of(job.spec.queue),
        "time_left": job.time_left(cluster.served),
        "array": None if job.spec.array is None else job.spec.array.model_dump(),
    }


def shown_to(row: Json, *, seen: bool) -> Json:
    """A job in the form that the caller may see. Unless the caller may see everything (``seen``), the values of its
    environment, a role's own included, and all output of its workers and commands are left out."""
    row = row | {"private": not seen}
    if seen:
        return row
    if "limits" in row:
        row["limits"] = None
    if row["outcome"]:
        row["outcome"] = row["outcome"] | {"error": ""}
    if "spec" in row:
        spec = row["spec"]
        submitter = spec["submitter"] | {"environ": dict.fromkeys(spec["submitter"]["environ"])}
        roles = [role | {"env": dict.fromkeys(role["env"])} for role in spec["roles"]]
        row["spec"] = spec | {"env": dict.fromkeys(spec["env"]), "roles": roles, "submitter": submitter}
    if "reports" in row:
        row["reports"] = {node: {"state": r["state"], "reason": r["reason"]} for node, r in row["reports"].items()}
    for pods in ("pods", "spares"):
        if pods in row:
            row[pods] = [pod | {"reason": without_output(pod["reason"])[0]} for pod in row[pods]]
    if "generations" in row:
        row["generations"] = [
            g | {"ended_by": g["ended_by"] and g["ended_by"] | {"error": ""}} for g in row["generations"]
        ]
    return row


def _roles(job: JobRecord) -> Json:
    """Of a job of several roles: the places that each is to have, and has in a generation that is active."""
    if not job.spec.several:
        return {}
    generation = job.generation
    has = generation.sizes if generation is not None and generation.state == "active" else {}
    return {role.name: {"target": role.places, "places": has.get(role.name, 0)} for role in job.sized.roles}


def planned_json(job: JobRecord, cluster: Cluster, line: Mapping[str, int]) -> Json:
    """What the plan adds to a job's record: how many nodes it borrows, and its position in the ``queue``, if it waits.
    ``line``: the cluster's ``places``. Must never be called in a thread: what is kept with a view (``Cluster.once``) is
    the loop's."""
    return {
        "borrowed": borrowed(cluster, job) if job.sized.nodes.auto else None,
        "queue": {"place": line[job.uid], "of": len(line)} if job.uid in line else None,
    }


def _checkpoint(job: JobRecord) -> Json | None:
    """The newest committed checkpoint."""
    found = job.checkpoint
    return None if found is None else {"name": found.name, "step": found.step, "generation": found.number}


def _failsafe_members(job: JobRecord, cluster: Cluster) -> list[Json]:
    """The nodes that may lend the job's workers time while the store is unreachable."""
    if job.phase in TERMINAL:
        return []
    return [{"node": node, "live": cluster.live(node)} for node in sorted(job.failsafe_members, key=natural)]


def lent_json(time: WorkersTime | None) -> Json | None:
    """On whose time the job's workers on the asked node run."""
    return None if time is None else time._asdict() | {"left": round(time.left, 1)}


def _scale(job: JobRecord, cluster: Cluster) -> Json | None:
    """The newest scale, over or not; ``left`` is the seconds until its rollback."""
    scale, growing = job.control.scale, job.control.growing
    if scale is None:
        return None
    left = None if growing is None else round(max(0, growing.deadline - cluster.served) / 1000, 1)
    return scale.model_dump(exclude={"deadline"}) | {"left": left}


def _gpus(generation: Generation | None) -> int:
    if generation is None or generation.state == "ended":
        return 0
    return sum(not d.startswith("cpu") for m in generation.members.values() for d in m.devices)


def budget_json(job: JobRecord, cluster: Cluster) -> Json:
    """The rest of the restart budget within its window."""
    used = restarts_spent(job, cluster.served)
    limits = job.spec.restarts
    return {"max": limits.max, "window": limits.window, "used": used, "left": max(0, limits.max - used)}


def budget_entry_json(number: int, spend: BudgetEntry, awaited: Collection[str] = ()) -> Json:
    """How one generation ended. ``awaited``: members that have not answered since; until then the fault is not
    judged."""
    return {
        "generation": number,
        "kind": spend.kind,
        "text": spend.text,
        "counts": spend.counts,
        "judged_when": judged_when(awaited) if awaited else "",
        "node": spend.node,
        "rank": spend.rank,
        "exit": spend.exit,
        "error": spend.error,
        "at": spend.wall,
    }


def verdict_json(verdict: Verdict, node: NodeRecord, now: float) -> Json:
    """One verdict, with the GPU's index and the next action; ``left`` is the rest of its probation."""
    index = next((g.index for g in node.facts.gpus if g.uuid == verdict.device), None)
    return verdict.model_dump() | {
        "gpu": index,
        "age": round(max(0.0, now - verdict.since), 1),
        "left": None if verdict.until is None else round(max(0.0, verdict.until - now), 1),
        "next": next_step(verdict, node),
    }


def placed_json(pod: PlacedPod) -> Json:
    """A pod in the form in which its node lists it."""
    member = pod.member
    return {
        "job": pod.job.name,
        "uid": pod.job.uid,
        "role": (member.role_names if member is not None else "") or pod.job.spec.role_names,
        "generation": pod.generation.number,
        "ranks": [] if member is None else list(range(member.first_rank, member.first_rank + member.workers)),
        "places": [] if member is None else [place.name for place in member.places],
        "stopping": pod.holder is not None,
    }


def held_json(node: NodeRecord, cluster: Cluster) -> list[Json]:
    """The devices that nobody is given, by the job whose processes do not end there."""
    found = []
    for uid, devices in sorted(node.facts.held_by.items()):
        job, ready = cluster.jobs.get(uid), node.readiness.get(uid)
        name, why = job.name if job is not None else uid, ready.reason if ready is not None else ""
        found.append({"job": name, "uid": uid, "devices": devices, "why": why})
    return found


def node_json(node: NodeRecord, cluster: Cluster, now: float, work: Mapping[str, NodeWork] | None = None) -> Json:
    """One node. ``work``: the result of ``work_on``, if the caller has it."""
    work = work_on(cluster) if work is None else work
    state, reason = node_state(node, cluster, work)
    facts = node.facts
    here = work.get(node.id, NodeWork())
    return {
        "name": node.id,
        "state": state,
        "reason": reason,
        "draining": node.cordon is not None and node.cordon.drain,
        "rev": node.rev,
        "address": facts.address,
        "agent_pid": facts.agent_pid,
        "restarting_for": round(max(0.0, now - facts.restarting), 1) if facts.restarting else None,
        "gpus": [g.model_dump() | {"job": here.booked.get(g.uuid)} for g in facts.gpus],
        "condition": condition(node),
        "verdicts": [verdict_json(v, node, now) for v in facts.health],
        "figures": [figure.model_dump() for figure in facts.figures],
        "breaker": breaker(cluster, facts),
        "repair_state": None if facts.repair_state is None else facts.repair_state.model_dump(),
        "repair": described(node),
        "pods": [placed_json(pod) for pod in here.pods],
        "labels": dict(facts.labels),
        "spot": facts.spot,
        "notice": None if facts.notice is None else facts.notice.model_dump(),
        "cpu_slots": facts.cpu_slots,
        "cpu_slots_used": sum(d.startswith("cpu") for d in here.booked),
        "held": held_json(node, cluster),
        "incarnation": {"life": node.incarnation.life, "start": node.incarnation.start},
        "joined": node.joined,
        "hostname": facts.hostname,
        "boot_id": facts.boot_id,
        "version": facts.agent_version,
        "agent_age": round(max(0.0, now - facts.started), 1),
        "api_socket": facts.api_socket,
        "http": facts.http,
        "https": "" if facts.https is None else facts.https.url,
        "fingerprint": "" if facts.https is None else facts.https.certificate,
        "readiness": {uid: r.model_dump() for uid, r in node.readiness.items()},
    }
