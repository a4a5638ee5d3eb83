"""What one node does for its own pods: prepare, stop, promise, acknowledge, start, report, retire.

Reads the jobs' generations and the shims' states; knows nothing of gangs beyond "am I in it". A pod goes
empty -> promised(g) -> started(g) -> stopped, and never back to a lower g.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.model.node import Incarnation
from nodeagent.model.world import Ack, Generation, Member, PodReport, Token
from nodeagent.plan.cluster import Cluster, natural
from nodeagent.plan.failure.blame import leaves_broken, memory_share
from nodeagent.plan.failure.faults import final_report
from nodeagent.plan.failure.policies import tasks_asked_for
from nodeagent.plan.failure.rounds import members_with, next_round, round_wait
from nodeagent.plan.nodes.candidates import staying, strays
from nodeagent.plan.nodes.failsafe import better, chooser, must_let_go
from nodeagent.plan.nodes.health import claimed
from nodeagent.plan.pods.order import newly_down, stops_later
from nodeagent.plan.pods.prepare import UNFIT_KEPT, failed_here, should_prepare
from nodeagent.plan.pods.report import (
    Alone,
    cut_short,
    doom,
    failure_words,
    farewell_report,
    going_on,
    lost,
    lost_report,
    of_member,
    read_report,
    same_report,
    with_alone,
    with_completion,
    with_crowd,
)
from nodeagent.plan.queueing.elastic import nodes_wanted
from nodeagent.plan.queueing.queue import line_key, next_up
from nodeagent.plan.queueing.reservations import line
from nodeagent.pods.base import GivenUp, PodStatus


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have a shim with its checks done and its fork server warm."""

    uid: str
    why: str


@dataclass(frozen=True, slots=True)
class Promise:
    """Durably promise never to start anything below this generation; group rank 0 also holds its rendezvous."""

    uid: str
    token: Token
    rendezvous: bool
    why: str
    ports: int = 0
    """So many are held for the node's places."""
    above: int = 0
    """Of a rendezvous: so many ports after its own are named to workers."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop what runs; ``grace`` None is SIGKILL now. ``given_up``: have the snapshots in memory written out.
    ``broken``: not all ranks will leave together."""

    uid: str
    grace: float | None
    why: str
    given_up: GivenUp | None = None
    broken: bool = False
    sooner: Mapping[str, float] = field(default_factory=dict)
    """Roles whose workers have less than ``grace``: role to seconds."""
    later: tuple[str, ...] = ()
    """Roles that workers on other nodes still come after: theirs are asked to stop when those have ended."""


@dataclass(frozen=True, slots=True)
class SendAck:
    """Tell the store that nothing older runs here any more."""

    uid: str
    token: Token
    ack: Ack
    last: PodReport | None
    why: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start this node's workers of the active generation."""

    uid: str
    token: Token
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """Start the workers of these roles: all that they come after are ready."""

    uid: str
    token: Token
    roles: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class StopRole:
    """Kill this node's workers of a role, which is started again as a whole."""

    uid: str
    token: Token
    role: str
    number: int
    """Of the round that they are stopped for."""
    why: str


@dataclass(frozen=True, slots=True)
class StartRole:
    """Start this node's workers of a role again: all of it is down, on every node."""

    uid: str
    token: Token
    role: str
    number: int
    wait: float
    """Seconds until they start."""
    why: str


@dataclass(frozen=True, slots=True)
class ReportPod:
    """Tell the store how the pod's workers are."""

    uid: str
    token: Token
    report: PodReport
    why: str


@dataclass(frozen=True, slots=True)
class LookAtWorkers:
    """Others of the gang see no progress: have this node's shim tell what its workers do. With a limit: have it tell
    only once they have done nothing for so long."""

    uid: str
    why: str
    limit: float | None = None
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Give the active generation other failsafe members."""

    uid: str
    token: Token
    expect: dict[str, str]
    failsafe_members: dict[str, str]
    why: str


@dataclass(frozen=True, slots=True)
class Retire:
    """The pod is not needed here any more."""

    uid: str
    why: str


PodAction = (
    Prepare
    | Stop
    | Promise
    | SendAck
    | Start
    | Release
    | StopRole
    | StartRole
    | ReportPod
    | LookAtWorkers
    | Keep
    | Retire
)


def asks_the_store(action: PodAction) -> bool:
    """Whether the action needs the store."""
    return isinstance(action, SendAck | ReportPod | Keep)


@dataclass(frozen=True, slots=True)
class PodCase:
    """One pod of this node, or a job that may need one here, and all that a rule looks at."""

    cluster: Cluster
    node: str
    life: str
    uid: str
    job: JobRecord | None
    """None: it is gone from the store."""
    status: PodStatus | None
    """None: it has no pod here."""
    lends: bool
    """A promise of this node may still lend it time."""
    up: Collection[str]
    """Jobs (uids) that are next in line: only those of the ones that wait get pods."""

    @property
    def generation(self) -> Generation | None:
        return self.job.generation if self.job is not None else None

    @property
    def is_member(self) -> bool:
        """Of the newest generation, in this life."""
        member = self.generation.members.get(self.node) if self.generation is not None else None
        return member is not None and member.life == self.life

    @property
    def is_holder(self) -> bool:
        """It may still run what is older than the newest generation, in this life."""
        holder = self.generation.holders.get(self.node) if self.generation is not None else None
        return holder is not None and holder.life == self.life

    @property
    def forms(self) -> bool:
        """A generation is forming that this node has a part in."""
        return self.generation is not None and self.generation.state == "forming" and (self.is_member or self.is_holder)

    @property
    def runs(self) -> bool:
        """A generation is active that this node is a member of."""
        return self.generation is not None and self.generation.state == "active" and self.is_member

    @property
    def stuck(self) -> bool:
        """SIGKILL is pending: what is there runs no more of its own code, and cannot end."""
        return self.status is not None and self.status.phase == "stuck"


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


def _unknown(case: PodCase) -> bool:
    """Workers may run: its shim has to say."""
    return case.status is not None and case.status.phase == "unknown"


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


def _run(case: PodCase) -> PodAction | None:
    job, generation, node, status = case.job, case.generation, case.node, case.status
    if job is None or generation is None or not case.runs or _unknown(case):
        return None
    sent = generation.reports.get(node)
    if status is None or status.phase == "gone":
        if final_report(sent):
            return None  # it had finished before: what its workers did stands
        found = lost(status.reason if status is not None else "")
        alone = sent.alone if sent is not None else ()
        return _report(job, generation, sent, found.model_copy(update={"alone": alone}))
    mine = status.generation == generation.token
    if mine:
        status = of_member(status, generation.members[node])
    doomed = doom(generation, node, read_report(status) if mine else None)
    if mine:
        if doomed and not status.quiet:
            return Stop(job.uid, None, doomed)
        reported = _own_report(case, job, generation, status, doomed=bool(doomed))
        goes_on = None if doomed else _round(case, job, generation, status) or _release(job, generation, status)
        return reported or goes_on or _look(job, generation, node, status)
    if not status.quiet:
        return _stop(case, job, False, f"generation {generation.number} is active")
    if status.highest != generation.token:
        reason = "this node has no record of having promised this generation"
        return _report(job, generation, sent, PodReport(state="refused", reason=reason))
    if doomed:
        return None  # a member has failed already
    return Start(job.uid, generation.token, f"generation {generation.number} is active")


def _own_report(
    case: PodCase, job: JobRecord, generation: Generation, status: PodStatus, *, doomed: bool
) -> ReportPod | None:
    """What there is to report of the active generation; None: nothing that was not reported."""
    sent, member = generation.reports.get(case.node), generation.members[case.node]
    report = read_report(status)
    if report is not None and report.state == "succeeded" and len(status.workers) < member.workers:
        report = None  # those that waited for other roles were stopped before they started
    report = report or (None if doomed else cut_short(status) or going_on(sent))
    share = _memory_share(case, member)
    report = with_crowd(report, share)
    asked = tasks_asked_for(job.spec)
    if job.spec.completes or asked:
        report = with_completion(report, status, member, job.spec.completes, asked)
    if status.ready and not status.quiet:
        report = (report or PodReport(state="running")).model_copy(update={"ready": status.ready})
    report = with_alone(report, sent, status, Alone(member, case.cluster.served, share))
    if status.rounds:
        report = (report or PodReport(state="running")).model_copy(update={"rounds": status.rounds})
    return _report(job, generation, sent, report)


def _memory_share(case: PodCase, member: Member) -> float:
    record = case.cluster.nodes.get(case.node)
    return memory_share(record.facts, member.devices) if record is not None else 0.0


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


def _report(
    job: JobRecord, generation: Generation, sent: PodReport | None, report: PodReport | None
) -> ReportPod | None:
    if report is None or (sent is not None and same_report(sent, report)):
        return None
    why = report.reason or failure_words(report.exits) or report.state
    if report.state == "running" and report.alone[len(sent.alone) if sent is not None else 0 :]:
        newest = report.alone[-1]
        what = "all of its role" if newest.round else "it"
        why = f"{newest.text}; {what} is to be started again while the gang goes on"
    elif report.state == "running" and report.rounds != (sent.rounds if sent is not None else {}):
        why = f"down, to be started again with all of their role: the workers of {', '.join(report.rounds)}"
    if report.stall is not None:
        why = f"no progress for {report.stall.limit:g} s" if report.stall.suspects else "others see no progress"
    return ReportPod(job.uid, generation.token, report, why)


def _round(case: PodCase, job: JobRecord, generation: Generation, status: PodStatus) -> StopRole | StartRole | None:
    """What is next for a role here that is started again as a whole."""
    if final_report(generation.reports.get(case.node)):
        return None  # all that it ran has ended well, and is over: the gang is formed anew
    what = next_round(generation, generation.members[case.node], status.rounds, status.down)
    if what is None:
        return None
    nodes = ", ".join(member.node for member in members_with(generation, what.role))
    if not what.starts:
        why = f"a worker of {what.role} failed: the role is started again on {nodes}"
        return StopRole(job.uid, generation.token, what.role, what.number, why)
    wait = round_wait(job, generation, what.role, case.cluster.served)
    return StartRole(job.uid, generation.token, what.role, what.number, wait, f"all of {what.role} is down on {nodes}")


def _release(job: JobRecord, generation: Generation, status: PodStatus) -> Release | None:
    """What waits here and need not wait any longer. A pod whose workers have all ended well has done all that
    others may wait for."""
    ready = {name for report in generation.reports.values() for name in report.ready}
    done = (
        generation.members[n]
        for n, report in generation.reports.items()
        if report.state == "succeeded" and n in generation.members
    )
    ready |= {place.name for member in done for place in member.places}
    roles, sizes = {role.name: role for role in job.spec.roles if role.after}, generation.sizes
    found = []
    for name in status.waiting:
        if name not in roles:
            continue  # the shim is the job's user's: what waits there waits for nobody
        first = (f"{other}.{i}" for other in roles[name].after for i in range(sizes[other]))
        if name not in status.down and ready.issuperset(first):
            found.append(name)
    if not found:
        return None
    others = ", ".join(dict.fromkeys(other for name in found for other in roles[name].after))
    return Release(job.uid, generation.token, tuple(found), f"all places of {others} are ready")


def _look(job: JobRecord, generation: Generation, node: str, status: PodStatus) -> LookAtWorkers | None:
    if status.phase != "running" or status.stall is not None:
        return None
    others = [n for n, r in generation.reports.items() if n != node and r.stall is not None and r.stall.suspects]
    names = ", ".join(sorted(others, key=natural))
    if status.watched is False and job.spec.watched_by is None and job.spec.finish is not None and not job.spec.several:
        done = any(e.code == 0 and not e.stopped for e in status.exits)
        if done or others or any(r.state == "succeeded" for r in generation.reports.values()):
            return LookAtWorkers(job.uid, "workers of its gang have exited 0, and others run on", job.spec.finish)
    return LookAtWorkers(job.uid, f"no progress is seen on {names}") if others else None


def _stop(case: PodCase, job: JobRecord, planned: bool, why: str) -> Stop | SendAck:
    """Of a planned stop, too: what ended here that workers on other nodes wait for."""
    generation, node, status = job.generation, case.node, case.status
    if not planned or generation is None or status is None:
        return Stop(job.uid, None, why)
    broken = leaves_broken(job, generation)
    if not broken and (down := newly_down(job, generation, node, status)):
        ack = Ack(life=case.life, ended=generation.state == "ended", down=down)
        text = f"no worker of {', '.join(down)} runs on {node} any more; others stop after them"
        return SendAck(job.uid, generation.token, ack, None, text)
    held = generation.holders.get(node)
    roles = {place.role for place in held.places} if held is not None else ()
    grace, sooner = job.spec.graces(roles, generation.grace)
    later = () if broken else stops_later(case.cluster, job, generation, node)
    return Stop(
        job.uid, grace, why, given_up=_given_up(job, generation), broken=broken, sooner=sooner, later=later
    )  # fmt: skip


def _given_up(job: JobRecord, generation: Generation) -> GivenUp | None:
    """What the snapshots of those that stop have to be written out for; None where all nodes go on, with their memory.
    The same on each of them, as long as none has acknowledged: and none does before its snapshots are written."""
    since = (job.checkpoint.number, job.checkpoint.step) if job.checkpoint is not None else (0, 0)
    if generation.state == "ended":
        return GivenUp(stays=False, world=0, since=since)
    lives = {node: member.life for node, member in generation.members.items()}
    stay = [node for node, holder in generation.holders.items() if lives.get(node) == holder.life]
    if len(stay) == len(generation.holders):
        return None
    return GivenUp(stays=bool(stay), world=generation.world_size, since=since)


def _ack(case: PodCase, job: JobRecord, generation: Generation, life: str, address: str = "") -> SendAck:
    node, status = case.node, case.status
    hosted = status is not None and status.rendezvous is not None and bool(address) and status.rendezvous.store_hosted
    last = None
    if status is not None and status.generation is not None and status.generation.number == job.last_number:
        held = generation.holders.get(node)
        own = of_member(status, held) if held is not None else status
        last = read_report(own) or farewell_report(own)
        last = with_crowd(last, _memory_share(case, held)) if held is not None else last
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
