"""What one node does for its own pods: prepare, stop, promise, acknowledge, start, report, retire.

Reads the jobs' generations and the shims' states; knows nothing of gangs beyond "am I in it". A pod goes
empty -> promised(g) -> started(g) -> stopped, and never back to a lower g.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.world import Ack
from nodeagent.plan.cluster import Cluster, natural
from nodeagent.plan.nodes.candidates import staying, strays
from nodeagent.plan.nodes.failsafe import better, chooser, must_let_go
from nodeagent.plan.nodes.health import claimed
from nodeagent.plan.pods.actions import (
    Keep,
    PodAction,
    Prepare,
    Promise,
    Release,
    Retire,
    SendAck,
    Start,
    StartRole,
    Stop,
)
from nodeagent.plan.pods.forming import _ack, _form, _promise
from nodeagent.plan.pods.podcase import PodCase, _unknown
from nodeagent.plan.pods.prepare import UNFIT_KEPT, failed_here, should_prepare
from nodeagent.plan.pods.report import of_member
from nodeagent.plan.pods.running import _own_report, _run
from nodeagent.plan.pods.stopping import _stop
from nodeagent.plan.queueing.elastic import nodes_wanted
from nodeagent.plan.queueing.queue import line_key, next_up
from nodeagent.plan.queueing.reservations import line
from nodeagent.pods.base import PodStatus

Rule = Callable[[PodCase], PodAction | None]
"""None: it has nothing to say; the next rule is asked."""


@dataclass(frozen=True, slots=True)
class PodFinding:
    """What was found for one pod by itself, whatever is done for others."""

    action: PodAction | None
    more: PodAction | None
    """After a ``Stop``: what is done at once."""
    spare: bool
    """The pod counts as one that is kept ready for a job which does not need this node now."""
    failed: bool
    """It counts as one whose check failed here."""


Guard = Callable[[str, Callable[[], PodFinding]], PodFinding | None]
"""Calls the function, which is about this job (uid) alone; None: it raised, and nothing is to be done for the pod."""


def _unguarded(_uid: str, find: Callable[[], PodFinding]) -> PodFinding:
    return find()


def plan_pods(
    cluster: Cluster,
    node: str,
    incarnation: Incarnation,
    statuses: Mapping[str, PodStatus],
    standbys: int,
    lent: Collection[str] = (),
    up: Collection[str] | None = None,
    guard: Guard = _unguarded,
) -> tuple[PodAction, ...]:
    """Every action this node should take now, one for each pod: the next action follows when its effect is seen. Only
    ``while_stopping`` follows at once.

    ``standbys``: how many pods are kept ready here for jobs that do not need this node now (paused jobs, and running
    jobs that have all their nodes). Pods that a job needs are not limited, or the job would never get this node. But of
    the waiting jobs only the next few get a pod (``up``), and of the pods whose check failed here only a few are kept
    (``UNFIT_KEPT``). ``lent``: jobs (uids) that a promise of this node may still lend time to. ``up``: what
    ``queue.next_up`` says, where it was asked already. ``guard``: of what is decided for each pod by itself."""
    out: list[PodAction] = []
    spares = failed = 0
    up = next_up(cluster, line(cluster)).up if up is None else up
    for uid in sorted({*cluster.jobs, *statuses}, key=lambda uid: _queue_place(cluster, uid)):
        job, status = cluster.jobs.get(uid), statuses.get(uid)
        if job is None and uid in cluster.unread:
            continue  # nobody here knows what it is to do: what runs goes on
        case = PodCase(cluster, node, incarnation.life, uid, job, status, uid in lent, up)
        found = guard(uid, partial(_find, case))
        if found is None:
            continue  # what runs goes on
        action = found.action
        if found.spare:
            spares += 1
            if spares > standbys and (status is None or status.phase != "unknown"):
                action = Retire(uid, f"this node keeps {standbys} standbys for other jobs already") if status else None
        if found.failed:
            failed += 1
            if failed > UNFIT_KEPT:
                action = Retire(uid, "its check failed here; others are looked at again first") if status else None
        if action is not None:
            out.append(action)
        if isinstance(action, Stop) and found.more is not None:
            out.append(found.more)
    return tuple(out)


def _find(case: PodCase) -> PodFinding:
    cluster, node, job, status = case.cluster, case.node, case.job, case.status
    action = decide_pod(case)
    more = while_stopping(case) if isinstance(action, Stop) else None
    kept = isinstance(action, Prepare) or (action is None and status is not None)
    spare = kept and job is not None and _is_spare(cluster, job, node)
    unfit = status is None or status.phase == "unfit" or bool(status.portless)
    failed = unfit and job is not None and failed_here(cluster, job, node)
    return PodFinding(action, more, spare, failed)


def decide_pod(case: PodCase) -> PodAction | None:
    """The action of the first rule in ``RULES`` that returns an allowed one (``_may``); None: nothing is to be done."""
    for rule in RULES:
        action = rule(case)
        if action is not None and _may(case, action):
            return action
    return None


def while_stopping(case: PodCase) -> PodAction | None:
    """What is done while the workers die that were just stopped, so that it takes no extra time: a promise (its write
    to disk and its rendezvous; only if nobody can still need the old rendezvous), or the report of the failure that
    they were stopped for."""
    action: PodAction | None = None
    job, generation, status = case.job, case.generation, case.status
    if job is None or generation is None or status is None:
        return None
    if case.forms:
        astray = case.node in strays(case.cluster, job, {case.node: status.folder})
        if case.is_member and not generation.planned and not astray and status.highest != generation.token:
            action = _promise(case.cluster, job, generation, case.node)
    elif case.runs and status.generation == generation.token:
        own = of_member(status, generation.members[case.node])
        action = _own_report(case, job, generation, own, doomed=True)
    return action if action is None or _may(case, action) else None


def _may(case: PodCase, action: PodAction) -> bool:
    """Whether the action is allowed: nothing is begun for a job that this agent refuses, nor on devices that are kept
    free for a repair. (Agents that chose these devices before they knew of the repair choose again.) And a pod that is
    stuck gives back its place in the job only once all nodes see that its devices are given to nobody."""
    if case.uid in case.cluster.refused and isinstance(action, Prepare | Promise | Start | Release | StartRole):
        return False
    if isinstance(action, SendAck) and action.ack.stuck and not _kept_from_others(case):
        return False
    begins = isinstance(action, Promise | Start)
    return not begins or case.job is None or not _set_aside(case.cluster, case.job, case.node)


# --- the rules


def gone(case: PodCase) -> PodAction | None:
    """Of a job without a record there is nothing to keep."""
    if case.job is not None or case.status is None or _unknown(case):
        return None
    return Retire(case.uid, "the job is gone from the store")


def form(case: PodCase) -> PodAction | None:
    """A part of a generation that is forming: stop what is older, promise, acknowledge."""
    action = _form(case)
    return None if isinstance(action, Prepare) or _stops_what_is_stuck(case, action) else action


def run(case: PodCase) -> PodAction | None:
    """A member of an active generation: start once, then report what changes."""
    action = _run(case)
    return None if _stops_what_is_stuck(case, action) else action


def end(case: PodCase) -> PodAction | None:
    """What runs and is in no generation, or in one that ended, is stopped."""
    action = _end(case)
    return None if _stops_what_is_stuck(case, action) else action


def release(case: PodCase) -> PodAction | None:
    """All that was older has ended here: the others may count on it."""
    job, generation = case.job, case.generation
    if job is None or generation is None or case.forms or case.runs or not case.is_holder or _unknown(case):
        return None
    return _ack(case, job, generation, case.life)


def retire(case: PodCase) -> PodAction | None:
    """A pod that the job does not need."""
    job, status = case.job, case.status
    if job is None or status is None or _engaged(case) or _unknown(case):
        return None
    if should_prepare(case.cluster, job, case.node, case.up):
        return None
    return Retire(case.uid, "the job has ended" if job.phase in TERMINAL else "the job does not need this node")


def keep(case: PodCase) -> PodAction | None:
    """What this node does as a failsafe member: let go of what has been superseded, see to it that there are enough
    failsafe members."""
    job, generation = case.job, case.generation
    if job is None or generation is None or case.lends:
        return None
    # The acknowledgement of a member or holder says it as well, and says more: that nothing older runs there. An agent
    # that has just started does not know that of its pods yet.
    has_part = case.is_holder or (generation.state == "forming" and case.node in generation.members)
    if must_let_go(case.cluster, job, case.node) and not has_part:
        let_go = Ack(life=case.life, ended=generation.state == "ended")
        why = f"{case.node} gives no failsafe time to an older generation"
        return SendAck(job.uid, generation.token, let_go, None, why)
    found = better(case.cluster, job)
    if found is None or chooser(case.cluster, job) != case.node:
        return None
    return Keep(
        job.uid,
        generation.token,
        job.failsafe_members,
        found,
        f"failsafe members are {', '.join(sorted(found, key=natural))}",
    )


def stop_again(case: PodCase) -> PodAction | None:
    """A stuck pod is stopped again and again; others, who may wait for this node as a failsafe member, come first."""
    return (_form(case) or _run(case) or _end(case)) if case.stuck else None


def prepare(case: PodCase) -> PodAction | None:
    """A pod that is not ready is prepared again and again; as in ``stop_again``, what other nodes wait for comes
    first."""
    action, job = _form(case), case.job
    if isinstance(action, Prepare):
        return action
    if job is None or _engaged(case) or not should_prepare(case.cluster, job, case.node, case.up):
        return None
    if case.status is None or case.status.phase in ("gone", "unfit"):  # unfit: the host looks again, now and then
        return Prepare(case.uid, "the job may need this node")
    return None


RULES: tuple[Rule, ...] = (gone, form, run, end, release, retire, keep, stop_again, prepare)
"""The first one that has something to say decides."""


def _engaged(case: PodCase) -> bool:
    """What is to be done follows from a generation."""
    return case.forms or case.runs or case.is_holder or _end(case) is not None


def _stops_what_is_stuck(case: PodCase, action: PodAction | None) -> bool:
    return case.stuck and isinstance(action, Stop)


def _end(case: PodCase) -> PodAction | None:
    job, generation, status = case.job, case.generation, case.status
    if job is None or status is None or case.forms or case.runs or status.quiet or _unknown(case):
        return None
    if case.is_holder and case.stuck:
        return None  # the rule ``release`` acknowledges for it, and says there that the pod is stuck
    planned = case.is_holder and generation is not None and generation.planned
    why = "stopping" if case.is_holder else "this node is not in the newest generation"
    return _stop(case, job, planned, why)


def _is_spare(cluster: Cluster, job: JobRecord, node: str) -> bool:
    """The job is paused, or runs on as many nodes as it wants and will go on there, and this is none of them."""
    if job.control.desired == "pause":
        return True
    generation = job.generation
    if job.phase != "running" or generation is None or node in generation.members:
        return False
    return staying(cluster, job) >= nodes_wanted(cluster, job)


def _kept_from_others(case: PodCase) -> bool:
    """The node's record has the devices that what does not end here may have."""
    me = case.cluster.nodes.get(case.node)
    held = me.facts.held.keys() if me is not None else set[str]()
    return case.status is None or held >= {*case.status.held}


def _set_aside(cluster: Cluster, job: JobRecord, node: str) -> bool:
    """Devices that the job would use here are kept free for a repair."""
    me, member = cluster.nodes.get(node), job.generation.members.get(node) if job.generation is not None else None
    claim = claimed(me.facts) if me is not None else None
    return claim is not None and member is not None and any(claim.takes(device) for device in member.devices)


def _queue_place(cluster: Cluster, uid: str) -> tuple[int, int, str]:
    """Jobs of higher priority, then older ones, first."""
    job = cluster.jobs.get(uid)
    return (0, 0, uid) if job is None else (*line_key(job), uid)
