"""What a member of an active generation does: start its workers once, and report what changes; release roles that have
waited for others, and start roles again that restart as a whole.

How a report reads is ``report.py``'s, what follows from it ``failure/faults.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

from nodeagent.model.job import JobRecord
from nodeagent.model.world import Generation, PodReport
from nodeagent.plan.cluster import Cluster, natural
from nodeagent.plan.failure.faults import final_report
from nodeagent.plan.failure.policies import tasks_asked_for
from nodeagent.plan.failure.rounds import members_with, next_round, round_wait
from nodeagent.plan.nodes.members import present_members
from nodeagent.plan.pods.actions import LookAtWorkers, PodAction, Release, ReportPod, Start, StartRole, Stop, StopRole
from nodeagent.plan.pods.podcase import PodCase
from nodeagent.plan.pods.report import (
    RestartContext,
    cut_short,
    doom,
    failure_words,
    going_on,
    lost,
    of_member,
    read_report,
    same_report,
    with_alone,
    with_completion,
    with_crowd,
)
from nodeagent.pods.base import PodStatus

MOST_STANDING = 16
"""Jobs of which one word to the lease process says that they stand still here. The next ones name others, once these
are let go."""


def run(case: PodCase) -> PodAction | None:
    """A member of an active generation: start once, then report what changes."""
    job, generation, member, status = case.job, case.active, case.member, case.status
    if generation is None or member is None or case.unknown:
        return None
    if status is None or status.phase == "gone":
        return _gone(case, generation)
    if case.stuck:
        return _stuck(case, generation, of_member(status, member))
    if status.generation == generation.token:
        return _go_on(case, generation, of_member(status, member))
    if not status.quiet:
        return Stop(job.uid, None, f"generation {generation.number} is active")
    if status.highest != generation.token:
        reason = "this node has no record of having promised this generation"
        return _report(case, generation, PodReport(state="refused", reason=reason))
    if doom(generation, case.node, None):
        return None  # a member has failed already
    return Start(job.uid, generation.token, f"generation {generation.number} is active")


def _gone(case: PodCase, generation: Generation) -> ReportPod | None:
    sent = generation.reports.get(case.node)
    if final_report(sent):
        return None  # it had finished before: what its workers did stands
    found = lost(case.status.reason if case.status is not None else "")
    alone = sent.alone if sent is not None else ()
    return _report(case, generation, found.model_copy(update={"alone": alone}))


def _stuck(case: PodCase, generation: Generation, status: PodStatus) -> PodAction:
    """Its workers do no more work, whether they end or not: the others go on without this node. How they ended counts,
    as far as their shim saw it; else they are lost with it."""
    seen = status.generation == generation.token and final_report(read_report(status))
    found = own_report(case, generation, status, doomed=True) if seen else _gone(case, generation)
    return found or Stop(case.job.uid, None, "what runs here does not end")


def _go_on(case: PodCase, generation: Generation, status: PodStatus) -> PodAction | None:
    """``status``: of workers of this generation."""
    doomed = doom(generation, case.node, read_report(status))
    if doomed and not status.quiet:
        return Stop(case.job.uid, None, doomed)
    reported = own_report(case, generation, status, doomed=bool(doomed))
    if reported is not None or doomed:
        return reported
    return _round(case, generation, status) or _release(case.job, generation, status) or _look(case, generation, status)


def own_report(case: PodCase, generation: Generation, status: PodStatus, *, doomed: bool) -> ReportPod | None:
    """What there is to report of the active generation; None: nothing that was not reported. ``status``: as of
    ``of_member``."""
    job, sent, member = case.job, generation.reports.get(case.node), generation.members[case.node]
    report = read_report(status)
    if report is not None and report.state == "succeeded" and len(status.workers) < member.workers:
        report = None  # those that waited for other roles were stopped before they started
    report = report or (None if doomed else cut_short(status) or going_on(sent))
    share = case.memory_share(member)
    report = with_crowd(report, share)
    asked = tasks_asked_for(job.spec)
    if job.spec.completes or asked:
        report = with_completion(report, status, member, job.spec.completes, asked)
    if status.ready and not status.quiet:
        report = (report or PodReport(state="running")).model_copy(update={"ready": status.ready})
    report = with_alone(report, sent, status, RestartContext(member, case.cluster.served, share))
    if status.rounds:
        report = (report or PodReport(state="running")).model_copy(update={"rounds": status.rounds})
    return _report(case, generation, report)


def _report(case: PodCase, generation: Generation, report: PodReport | None) -> ReportPod | None:
    sent = generation.reports.get(case.node)
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
    return ReportPod(case.job.uid, generation.token, report, why)


def _round(case: PodCase, generation: Generation, status: PodStatus) -> StopRole | StartRole | None:
    """What is next for a role here that is started again as a whole."""
    if final_report(generation.reports.get(case.node)):
        return None  # all that it ran has ended well, and is over: the gang is formed anew
    what = next_round(generation, generation.members[case.node], status.rounds, status.down)
    if what is None:
        return None
    nodes = ", ".join(member.node for member in members_with(generation, what.role))
    if not what.starts:
        why = f"a worker of {what.role} failed: the role is started again on {nodes}"
        return StopRole(case.job.uid, generation.token, what.role, what.number, why)
    wait = round_wait(case.job, generation, what.role, case.cluster.served)
    why = f"all of {what.role} is down on {nodes}"
    return StartRole(case.job.uid, generation.token, what.role, what.number, wait, why)


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


def _look(case: PodCase, generation: Generation, status: PodStatus) -> LookAtWorkers | None:
    """What its workers do is asked where others see no progress, or have ended well."""
    job = case.job
    if status.phase != "running" or status.stall is not None:
        return None
    others = [n for n, r in generation.reports.items() if n != case.node and r.stall is not None and r.stall.suspects]
    names = ", ".join(sorted(others, key=natural))
    if status.watched is False and job.spec.watched_by is None and job.spec.finish is not None and not job.spec.several:
        done = any(e.code == 0 and not e.stopped for e in status.exits)
        if done or others or any(r.state == "succeeded" for r in generation.reports.values()):
            return LookAtWorkers(job.uid, "workers of its gang have exited 0, and others run on", job.spec.finish)
    return LookAtWorkers(job.uid, f"no progress is seen on {names}") if others else None


def standing(
    cluster: Cluster, node: str, life: str, statuses: Mapping[str, PodStatus], barred: Callable[[str], float]
) -> dict[str, int]:
    """The jobs (uids) of which nothing runs on this node, while their gangs may wait for what has not begun here, or
    for a fault that was not reported: each with the number of that generation. Of many the first. ``barred``: the
    newest generation of a job (uid) that the node has let go of. Of an agent that has read nothing since its start the
    pods alone say so: what they have promised and not started."""
    if cluster.jobs:
        waited_for = {uid: _waited_for(job, node, life, statuses.get(uid)) for uid, job in cluster.jobs.items()}
    else:
        waited_for = {uid: _promised_only(status) for uid, status in statuses.items()}
    found = ((uid, number) for uid, number in waited_for.items() if number > barred(uid))
    return dict(islice(found, MOST_STANDING))


def _waited_for(job: JobRecord, node: str, life: str, status: PodStatus | None) -> int:
    """The number of the generation whose other members may wait for this one, of which nothing runs; 0: none."""
    generation, member = job.generation, present_members(job).get(node)
    if generation is None or member is None or member.life != life or not (status is None or status.quiet):
        return 0
    if final_report(generation.reports.get(node)):
        return 0
    if status is not None and status.generation == generation.token:
        report = read_report(of_member(status, member))
        if report is not None and report.state == "succeeded":
            return 0  # what was done would be done again
    return generation.number


def _promised_only(status: PodStatus) -> int:
    highest = status.highest
    return highest.number if status.quiet and highest is not None and highest != status.generation else 0
