"""What one node does for its own pods: prepare, stop, promise, acknowledge, start, report, retire.

Reads the jobs' generations and the shims' states; knows nothing of gangs beyond "am I in it". A pod goes
empty -> promised(g) -> started(g) -> stopped, and never back to a lower g.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from nodeagent.model.job import TERMINAL
from nodeagent.model.node import Incarnation
from nodeagent.model.world import Ack
from nodeagent.plan.cluster import Cluster, natural
from nodeagent.plan.nodes.candidates import staying, strays
from nodeagent.plan.nodes.failsafe import better, chooser, must_let_go
from nodeagent.plan.nodes.health import claimed
from nodeagent.plan.pods.actions import (
    PodAction,
    Prepare,
    Promise,
    Release,
    Retire,
    SendAck,
    SetFailsafeMembers,
    Start,
    StartRole,
    Stop,
)
from nodeagent.plan.pods.forming import acknowledge, form, promise
from nodeagent.plan.pods.podcase import PodCase
from nodeagent.plan.pods.prepare import UNFIT_KEPT, failed_here, should_prepare
from nodeagent.plan.pods.report import of_member
from nodeagent.plan.pods.running import own_report, run
from nodeagent.plan.pods.stopping import stop
from nodeagent.plan.queueing.elastic import nodes_wanted
from nodeagent.plan.queueing.queue import line_key
from nodeagent.pods.base import PodStatus

PodRule = Callable[[PodCase], PodAction | None]
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


def plan_pods(
    cluster: Cluster,
    node: str,
    incarnation: Incarnation,
    statuses: Mapping[str, PodStatus],
    standbys: int,
    lent: Collection[str],
    up: Collection[str],
    guard: Guard,
) -> tuple[PodAction, ...]:
    """Every action this node should take now, one for each pod: the next action follows when its effect is seen. Only
    ``while_stopping`` follows at once.

    ``standbys``: how many pods are kept ready here for jobs that do not need this node now (paused jobs, and running
    jobs that have all their nodes). Pods that a job needs are not limited, or the job would never get this node. But of
    the waiting jobs only the next few get a pod (``up``), and of the pods whose check failed here only a few are kept
    (``UNFIT_KEPT``). ``lent``: jobs (uids) that a promise of this node may still lend time to. ``up``: as of
    ``queue.next_up``. ``guard``: of what is decided for each pod by itself."""
    out: list[PodAction] = []
    spares = failed = 0
    for uid in sorted({*cluster.jobs, *statuses}, key=lambda uid: _queue_place(cluster, uid)):
        job, status = cluster.jobs.get(uid), statuses.get(uid)
        if job is None and uid in cluster.unread:
            continue  # nobody here knows what it is to do: what runs goes on
        if job is None:
            found = guard(uid, partial(_find_without_job, uid, statuses[uid]))
        else:
            case = PodCase(cluster, node, incarnation.life, job, status, uid in lent, up)
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
    action, status = decide_pod(case), case.status
    more = while_stopping(case) if isinstance(action, Stop) else None
    stays = isinstance(action, Prepare) or (action is None and status is not None)
    unfit = status is None or status.phase == "unfit" or bool(status.portless)
    failed = unfit and failed_here(case.cluster, case.job, case.node)
    return PodFinding(action, more, stays and _is_spare(case), failed)


def _find_without_job(uid: str, status: PodStatus) -> PodFinding:
    """Nothing of it stays; but where its shim has yet to say whether workers run."""
    action = Retire(uid, "the job is gone from the store") if status.phase != "unknown" else None
    return PodFinding(action, more=None, spare=False, failed=False)


def decide_pod(case: PodCase) -> PodAction | None:
    """The action of the first rule in ``RULES`` that returns an allowed one (``_may``); but what is done over and over
    (``_is_repeated``) only where no other rule has one: others may wait for this node meanwhile, as a failsafe member.
    None: nothing is to be done."""
    repeated: PodAction | None = None
    for rule in RULES:
        action = rule(case)
        if action is None or not _may(case, action):
            continue
        if not _is_repeated(case, action):
            return action
        repeated = repeated or action
    return repeated


def _is_repeated(case: PodCase, action: PodAction) -> bool:
    """A pod that is not ready is prepared, and one that is stuck is stopped, until it helps."""
    return isinstance(action, Prepare) or (case.stuck and isinstance(action, Stop))


def while_stopping(case: PodCase) -> PodAction | None:
    """What is done while the workers die that were just stopped, so that it takes no extra time: a promise (its write
    to disk and its rendezvous; only if nobody can still need the old rendezvous), or the report of the failure that
    they were stopped for."""
    action: PodAction | None = None
    job, generation, member, status = case.job, case.generation, case.member, case.status
    if generation is None or member is None or status is None:
        return None
    if case.forming:
        astray = case.node in strays(case.cluster, job, {case.node: status.folder})
        if not generation.planned and not astray and status.highest != generation.token:
            action = promise(case, generation, member)
    elif case.active and status.generation == generation.token:
        action = own_report(case, generation, of_member(status, member), doomed=True)
    return action if action is None or _may(case, action) else None


def _may(case: PodCase, action: PodAction) -> bool:
    """Whether the action is allowed: nothing is begun for a job that this agent refuses, nor on devices that are
    claimed for a repair. (Agents that chose these devices before they knew of the repair choose again.) And a pod that
    is stuck gives back its place in the job only once all nodes see that its devices are given to nobody."""
    match action:
        case Prepare() | Release() | StartRole():
            return case.job.uid not in case.cluster.refused
        case Promise() | Start():
            return case.job.uid not in case.cluster.refused and not _claimed_for_repair(case)
        case SendAck():
            return not action.ack.stuck or _devices_held(case)
    return True


# --- the rules


def end(case: PodCase) -> PodAction | None:
    """What runs and is in no generation, or in one that ended, is stopped."""
    generation, status = case.generation, case.status
    if status is None or case.has_part or status.quiet or case.unknown:
        return None
    if generation is None or case.holder is None:
        return Stop(case.job.uid, None, "this node is not in the newest generation")
    if case.stuck:
        return None  # the rule ``release`` acknowledges for it, and says there that the pod is stuck
    return stop(case, generation, status, "stopping")


def release(case: PodCase) -> PodAction | None:
    """All that was older has ended here: the others may count on it."""
    generation = case.generation
    if generation is None or case.holder is None or case.has_part or case.unknown:
        return None
    return acknowledge(case, generation)


def retire(case: PodCase) -> PodAction | None:
    """A pod that the job does not need."""
    job, status = case.job, case.status
    if status is None or not status.quiet or _engaged(case) or should_prepare(case.cluster, job, case.node, case.up):
        return None
    return Retire(job.uid, "the job has ended" if job.phase in TERMINAL else "the job does not need this node")


def failsafe(case: PodCase) -> PodAction | None:
    """What this node does as a failsafe member: let go of what has been superseded, see to it that there are enough
    failsafe members."""
    job, generation = case.job, case.generation
    if generation is None or case.lends:
        return None
    # The acknowledgement of a member or holder says it as well, and says more: that nothing older runs there. An agent
    # that has just started does not know that of its pods yet.
    has_part = case.holder is not None or (generation.state == "forming" and case.node in generation.members)
    if must_let_go(case.cluster, job, case.node) and not has_part:
        let_go = Ack(life=case.life, ended=generation.state == "ended")
        why = f"{case.node} gives no failsafe time to an older generation"
        return SendAck(job.uid, generation.token, let_go, None, why)
    found = better(case.cluster, job)
    if found is None or chooser(case.cluster, job) != case.node:
        return None
    why = f"failsafe members are {', '.join(sorted(found, key=natural))}"
    return SetFailsafeMembers(job.uid, generation.token, job.failsafe_members, found, why)


def prepare(case: PodCase) -> PodAction | None:
    """A pod that the job may need, and that is not there, or unfit: the host looks again, now and then."""
    if case.status is not None and case.status.phase not in ("gone", "unfit"):
        return None
    if _engaged(case) or not should_prepare(case.cluster, case.job, case.node, case.up):
        return None
    return Prepare(case.job.uid, "the job may need this node")


RULES: tuple[PodRule, ...] = (form, run, end, release, retire, failsafe, prepare)
"""The first one that has something to say decides, as of ``decide_pod``."""


def _engaged(case: PodCase) -> bool:
    """What is to be done follows from a generation."""
    return case.has_part or case.holder is not None


def _is_spare(case: PodCase) -> bool:
    """The job is paused, or runs on as many nodes as it wants and will go on there, and this is none of them."""
    job, generation = case.job, case.generation
    if job.control.desired == "pause":
        return True
    if job.phase != "running" or generation is None or case.node in generation.members:
        return False
    return staying(case.cluster, job) >= nodes_wanted(case.cluster, job)


def _devices_held(case: PodCase) -> bool:
    """The node's record has the devices that what does not end here may have."""
    me = case.cluster.nodes.get(case.node)
    held = me.facts.held.keys() if me is not None else set[str]()
    return case.status is None or held >= {*case.status.held}


def _claimed_for_repair(case: PodCase) -> bool:
    """Devices that the job would use here are claimed for a repair."""
    me, member = case.cluster.nodes.get(case.node), case.member
    claim = claimed(me.facts) if me is not None else None
    return claim is not None and member is not None and any(claim.takes(device) for device in member.devices)


def _queue_place(cluster: Cluster, uid: str) -> tuple[int, int, str]:
    """Jobs of higher priority, then older ones, first."""
    job = cluster.jobs.get(uid)
    return (0, 0, uid) if job is None else (*line_key(job), uid)
