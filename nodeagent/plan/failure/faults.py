"""What went wrong in a generation: the cause, the policy's word, and the budget's entry for it. As far as it is known
by now: the verdict may come later (``judgement.py``).

What workers wrote decides nothing but the words, and whether a gang that failed right after its first start is
re-formed while it waits for the verdict. This module reads the reports and lapses; what the gang does next is decided
in ``job/running.py`` (``after_fault``).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nodeagent.model.job import BudgetEntry, Ends, JobRecord, Outcome
from nodeagent.model.jobspec import ActionName
from nodeagent.model.timing import millis
from nodeagent.model.world import AloneRestart, Cause, CauseKind, Generation, Place, PodReport, WorkerExit
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.failure.blame import (
    REFORM_CODES,
    Blame,
    asks_to_reform,
    blame,
    describe,
    is_failure,
    may_be_cause,
    shell_code,
)
from nodeagent.plan.failure.budget import COUNTS, alone_times, check_budget, restarts_spent, role_of, without
from nodeagent.plan.failure.hang import MOST_IN_A_ROW, Hung, find_hang, got_further, in_a_row
from nodeagent.plan.failure.policies import ENDS, EVENTS, answer, roles_on, sentence
from nodeagent.plan.failure.rounds import agreed_round, unable
from nodeagent.plan.nodes.members import gone_nodes


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a generation, complete: what it was, what it costs, and how the job would end by it."""

    cause: Cause
    spend: BudgetEntry
    outcome: Outcome
    fail: str = ""
    """Not empty: the job ends for this reason (a policy, an error right after the first start, the budget)."""
    ends: Ends = "failed"
    """What the job becomes then."""
    awaits: tuple[str, ...] = ()
    """Who has to answer, or to be lost, before this is judged."""
    by_policy: bool = False
    """A policy of the job ends it so."""


def find_fault(cluster: Cluster, job: JobRecord, wall: float) -> Fault | None:
    """The fault of an active generation, None if all is well. ``wall`` is Unix time, for people.

    A member that is gone, and has reported no fault of its own, is the cause of all that others report.
    """
    generation = job.generation
    if generation is None:
        return None
    gone = [
        n for n in gone_nodes(cluster, job) if n in generation.members and cluster.gone(n, generation.members[n].life)
    ]
    if not gone and not cluster.notes.once(
        f"reported:{job.uid}", (generation,), lambda _before: _all_reported(generation)
    ):
        return None
    gone.sort(key=lambda n: generation.members[n].group_rank)
    faulty = {n for n, r in generation.reports.items() if r.seq}
    if unanswered := [n for n in gone if n not in faulty]:
        return node_fault(cluster, job, unanswered, wall)
    awaits = tuple(m.node for m in generation.ordered() if m.node not in faulty)
    case = FaultCase(cluster, job, generation.number, cluster.served, round(wall, 3), awaits)
    fault = reported_fault(case, generation.reports)
    if fault is None and gone:
        return node_fault(cluster, job, gone, wall)
    if fault is None:
        fault = _alone_fault(case, generation)
    if fault is None:
        hung = find_hang(generation)
        fault = _hang_fault(case, hung) if hung is not None else None
    if fault is None or not fault.spend.counts:
        return fault
    return replace(fault, awaits=awaits)


def _all_reported(generation: Generation) -> bool:
    """Some pod reports a fault."""
    faults = {"fenced", "lost", "refused"}
    reports = generation.reports
    some = any(r.state in faults or r.alone or r.taken for r in reports.values())
    return some or blame(reports) is not None or find_hang(generation) is not None


@dataclass(frozen=True, slots=True)
class FaultCase:
    """The generation that a fault ended, and when."""

    cluster: Cluster
    job: JobRecord
    number: int
    at: int
    """Served time (ms)."""
    wall: float
    awaits: tuple[str, ...] = ()
    """Who has not answered since."""

    def with_reports(self, generation: Generation, reports: Mapping[str, PodReport]) -> FaultCase:
        """The same, had these pods of the job's generation reported this."""
        other = generation.model_copy(update={"reports": {**generation.reports, **reports}})
        return replace(self, job=self.job.model_copy(update={"generation": other}))


_POD_FAULTS = {
    "fenced": "workers stopped themselves, without a lease,",
    "lost": "the pod died",
    "refused": "the pod could not start",
}


def reported_fault(case: FaultCase, reports: Mapping[str, PodReport]) -> Fault | None:
    """Of all that pods report, what cannot come of the others: a pod that died, or a SIGKILL. Then workers that were
    fenced, or whose port somebody else had. Only then a worker that ended by an error: that may be because its peers
    were gone."""
    who = blame(reports)
    order = sorted((r.seq, n, r) for n, r in reports.items() if r.state in _POD_FAULTS)
    broken = next(((seq, n, r) for seq, n, r in order if r.state != "fenced"), None)
    fenced = next(((n, r) for _, n, r in order if r.state == "fenced"), None)
    killed = reports[who.node].seq if who is not None and who.worker.signal == signal.SIGKILL else None
    if broken is not None and (killed is None or killed >= broken[0]):
        return _pod_fault(case, "runtime_failed" if broken[2].runtime_failed else "pod_failed", broken[1], broken[2])
    if fenced is not None and killed is None:
        return _pod_fault(case, "fenced", *fenced)
    robbed = min(((r.seq or 1 << 30, n) for n, r in reports.items() if r.taken), default=None)
    if robbed is not None and killed is None:
        return _port_fault(case, robbed[1], reports[robbed[1]])
    return _worker_fault(case, who, reports) if who is not None else None


def _pod_fault(case: FaultCase, kind: CauseKind, node: str, report: PodReport) -> Fault:
    what, why = _POD_FAULTS[report.state], report.reason
    if kind == "fenced" and why and not report.exits:
        what = "no worker of the job runs"
    if kind == "runtime_failed":
        what, _, why = why.partition(": ")
    text = f"{what} on {node}" + (f": {why}" if why else "")
    return _fault(case, Cause(kind=kind, text=text, node=node), roles_on(case.job, [node]), error=report.error)


def _port_fault(case: FaultCase, node: str, report: PodReport) -> Fault:
    """No fault of the script's: the port was kept for it, and somebody was faster when it was let go. Roles that were
    stopped since, to be started again, have failed for that port too."""
    text = f"{report.taken} of {node}, which was kept for the job's workers"
    cause = Cause(kind="port_taken", text=text, node=node)
    return _fault(_begun(case), cause, roles_on(case.job, [node]), progressed=_ran_long(case))


def _begun(case: FaultCase) -> FaultCase:
    """The case without restarts of whole roles that never came, since not all of the role was down."""
    generation = case.job.generation
    if generation is None or all(not report.rounds for report in generation.reports.values()):
        return case
    agreed = {role.name: agreed_round(generation, role.name) for role in case.job.spec.roles}
    reports = dict[str, PodReport]()
    for node, report in generation.reports.items():
        came = (one for one in report.alone if one.round <= agreed.get("".join(role_of(generation, node, one.rank)), 0))
        reports[node] = report.model_copy(update={"alone": tuple(came)})
    return case.with_reports(generation, reports)


def node_fault(cluster: Cluster, job: JobRecord, gone: list[str], wall: float) -> Fault:
    left = all((r := cluster.nodes.get(n)) is not None and r.left for n in gone)
    text = f"{'nodes' if len(gone) > 1 else 'node'} {', '.join(gone)} {'left' if left else 'lost'}"
    case = FaultCase(cluster, job, 0, cluster.served, round(wall, 3))
    cause = Cause(kind="node_lost", text=text, node=gone[0])
    return _fault(case, cause, roles_on(job, gone))


def _worker_fault(case: FaultCase, who: Blame, reports: Mapping[str, PodReport]) -> Fault:
    kind: CauseKind = "collective" if who.victim else "worker_failed"
    if asks_to_reform(who.worker):
        kind = "reform"
    text = who.text + _shortly_before(case, reports)
    if crowded := reports[who.node].crowded if who.worker.signal == signal.SIGKILL else "":
        kind, text = "crowded", f"{text}; {crowded}: it costs no restart"
    cause = Cause(kind=kind, text=text, node=who.node, rank=who.worker.rank)
    roles = (Place.role_of(who.worker.place),) if who.worker.place else ()
    free = kind in ("crowded", "reform")
    answered = None if free else _asked(case.job, who, reports)
    progressed = kind == "reform" and _ran_long(case)
    fault = _fault(case, cause, roles, who.code, who.worker.error, answered, progressed=progressed)
    fault = replace(fault, outcome=fault.outcome.model_copy(update={"text": who.text}))
    if answered is None or fault.fail or answered.action is not None or not _early(case, reports):
        return fault
    if who.victim and case.awaits:
        return fault  # a lost node, or a killed worker, is what they speak of most often: see ADR 39
    early = case.cluster.timing.early
    advice = "fix the script, or what keeps its workers apart," if who.victim else "fix the script"
    text = f"failed within {early:g} s of its first start, so it is not started again: {who.text}"
    return replace(fault, fail=f"{text}; {advice} and submit it again")


def _shortly_before(case: FaultCase, reports: Mapping[str, PodReport]) -> str:
    """The newest failure of a service before this fault: its clients may have failed for it. Empty if there was none
    within the time of an early failure."""
    found = [(one.at, node, one.text) for node, report in reports.items() for one in report.alone]
    at, node, text = max(found, default=(0, "", ""))
    near = found and case.at - at <= millis(case.cluster.timing.early)
    return f" (shortly before, {text} on {node})" if near else ""


def _asked(job: JobRecord, who: Blame, reports: Mapping[str, PodReport]) -> _PolicyAnswer:
    """What the policies say of the workers that may be the cause, each asked with its own code and role, and why: what
    they say of the first one of which they say something, but ``FailJob`` if they say so of any. The reports of a gang
    have few different codes, so few are asked."""
    cases: dict[tuple[str, int], tuple[str, WorkerExit]] = {}
    for node, exited in may_be_cause(reports, who):
        cases.setdefault((Place.role_of(exited.place), shell_code(exited)), (node, exited))
    found = _PolicyAnswer()
    for (role, code), (node, exited) in cases.items():
        action = answer(job.spec, (role,) if role else (), "WorkerFailed", code)
        if action is not None and (found.action is None or action == "FailJob"):
            other = "" if exited is who.worker else f"; rank {exited.rank} on {node} ended with {describe(exited)}"
            found = _PolicyAnswer(action, sentence(action, "WorkerFailed", f"{who.text}{other}"))
    return found


def _alone_fault(case: FaultCase, generation: Generation) -> Fault | None:
    """Workers that were started again alone end the job where a policy says so of one of them, or they have spent the
    budget together; None: all is well."""
    over = restarts_spent(case.job, case.at) > case.job.spec.restarts.max
    found = [(node, one) for node, report in generation.reports.items() for one in report.alone if not one.crowded]
    newest = max(found, key=lambda each: each[1].at, default=None)
    for node, one in found:
        cause = Cause(kind="worker_failed", text=f"{one.text} on {node}", node=node, rank=one.rank)
        answered = _answered(case, cause, one.exit, role_of(generation, node, one.rank))
        if (over and (node, one) == newest) or answered.action in ENDS:
            counted = _counted_once(case, generation, node, one)
            return _fault(counted, cause, code=one.exit, error=one.error, answered=answered)
    return _round_fault(case, generation)


def _counted_once(case: FaultCase, generation: Generation, node: str, last: AloneRestart) -> FaultCase:
    """The case without the restart that did not come: the fault that ends the job counts for it."""
    report = generation.reports[node]
    rest = report.model_copy(update={"alone": tuple(one for one in report.alone if one is not last)})
    return case.with_reports(generation, {node: rest})


def _round_fault(case: FaultCase, generation: Generation) -> Fault | None:
    """A role cannot be started again as a whole, since a node has done all that it had to, and holds no worker that
    could start with the others: the gang is formed anew, for the failure that its restart was for."""
    stuck = unable(generation)
    if stuck is None:
        return None
    role, done = stuck
    for node, report in generation.reports.items():
        of_role = (each for each in reversed(report.alone) if role_of(generation, node, each.rank) == (role,))
        one = next(of_role, None)  # since then a worker of another role may have been started again
        if one is not None and one.round > agreed_round(generation, role):
            ended = f"{one.text} on {node}, and {role} cannot be started again alone: {done} has ended well"
            cause = Cause(kind="worker_failed", text=ended, node=node, rank=one.rank)
            return _fault(case, cause, code=one.exit, error=one.error)
    return None


def _hang_fault(case: FaultCase, hung: Hung) -> Fault:
    job = case.job
    cause = Cause(kind="hang", text=hung.text, node=hung.node, rank=hung.rank)
    role = role_of(job.generation, hung.node, hung.rank)
    progressed = got_further(job, hung, case.at)
    fault = _fault(case, cause, role, error=hung.table, progressed=progressed)
    spend = fault.spend.model_copy(update={"step": hung.step, "stalled": hung.stalled})
    fail = fault.fail
    row = 0 if progressed else in_a_row(job)
    if not fail and row >= MOST_IN_A_ROW:
        fail = (
            f"hung {row + 1} times in a row without progress, so it is not started again: {hung.text}; look at the "
            f"stacks (nodeagentctl describe {job.name}), fix the script and submit it again"
        )
    return replace(fault, spend=spend, fail=fail)


@dataclass(frozen=True, slots=True)
class _PolicyAnswer:
    """What the policies say of a fault, and the sentence that says why; None: nothing."""

    action: ActionName | None = None
    text: str = ""


def _answered(case: FaultCase, cause: Cause, code: int | None, roles: tuple[str, ...]) -> _PolicyAnswer:
    """The policies asked for what this cause means to them, with its own code."""
    event = EVENTS.get(cause.kind)
    action = answer(case.job.spec, roles, event, code) if event is not None else None
    if event is None or action is None:
        return _PolicyAnswer()
    return _PolicyAnswer(action, sentence(action, event, cause.text))


def _fault(
    case: FaultCase,
    cause: Cause,
    roles: tuple[str, ...] = (),
    code: int | None = None,
    error: str = "",
    answered: _PolicyAnswer | None = None,
    *,
    progressed: bool = False,
) -> Fault:
    """``roles``: whose places it concerns, and whose own policies are asked. ``code``, ``error``: of the worker, if it
    is one's. ``answered``: by the policies, if they have been asked already."""
    answered = _answered(case, cause, code, roles) if answered is None else answered
    outcome = Outcome(code=1 if code is None else code, text=cause.text, error=error)
    spend = BudgetEntry(
        at=case.at,
        wall=case.wall,
        kind=cause.kind,
        counts=cause.kind in COUNTS,
        node=cause.node,
        rank=cause.rank,
        text=cause.text,
        error=error,
        exit=code,
        alone=_alone(case),
        progressed=progressed,
        roles=roles,
    )
    fail, ends, by_policy = "", ENDS["FailJob"], False
    if answered.action is not None and answered.action in ENDS:
        fail, ends, by_policy = answered.text, ENDS[answered.action], True
    elif spend.counts and not (verdict := check_budget(without(case.job, case.number), case.at)).allowed:
        fail = f"{verdict.why}; last: {cause.text}"
    return Fault(cause, spend, outcome, fail, ends, by_policy=by_policy)


def _alone(case: FaultCase) -> tuple[int, ...]:
    """When workers of the generation that the fault ends, or has ended, were started again alone."""
    generation, entry = case.job.generation, case.job.budget.get(str(case.job.last_number))
    if generation is not None and generation.state == "active" and case.number in (0, generation.number):
        return alone_times(generation)
    return entry.alone if entry is not None else ()


def _early(case: FaultCase, reports: Mapping[str, PodReport]) -> bool:
    """Only error exits in the first generation, soon after it became active. Nobody mistypes a signal, and what asks
    to be re-formed is no mistake."""
    job, generation = case.job, case.job.generation
    formed = generation is not None and generation.number != case.number and generation.state == "active"
    first = job.restarts == (1 if formed else 0)
    if not first or job.first_active is None or case.at - job.first_active > millis(case.cluster.timing.early):
        return False
    if any(one.exit > 128 for report in reports.values() for one in report.alone):
        return False  # a server was killed, say, and others failed without it
    exits = [e for r in reports.values() for e in r.exits if is_failure(e)]
    return all(e.signal in (None, signal.SIGABRT) and e.code not in REFORM_CODES for e in exits)


def _ran_long(case: FaultCase) -> bool:
    """The generation that the fault ends had been active for ``early`` at least."""
    generation = case.job.generation
    if generation is None or generation.number != case.number or generation.state != "active":
        return False  # another report than those that ended it: how long it had run is not known any more
    return case.at - generation.since >= millis(case.cluster.timing.early)


def all_succeeded(job: JobRecord) -> bool:
    """Every member of the active generation reported success; of a job that one of its roles completes, every member
    with workers of that role reported theirs."""
    generation, role = job.generation, job.spec.completes
    if generation is None:
        return False
    nodes = [n for n, member in generation.members.items() if not role or member.ranks_of(role)]
    reports = [generation.reports.get(node) for node in nodes]
    return all(r is not None and (r.completed if role else r.state == "succeeded") for r in reports)


def is_finishing(generation: Generation) -> bool:
    """Some of its pods have ended."""
    return any(final_report(report) for report in generation.reports.values())


def final_report(report: PodReport | None) -> bool:
    """The pod will say nothing more."""
    return report is not None and report.state != "running"
