"""The steps of a generation in the twin: propose, ack, activate, report, end, settle.

The twin of ``scripts/_generation.lua`` and of the scripts of these names. Must never judge liveness itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nodeagent.model.job import JobRecord, Phase, Spend
from nodeagent.model.node import Incarnation
from nodeagent.model.world import Ack, Head, Member, PodReport, Token
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.messages import Ending, Judgement, Proposal, Settlement
from nodeagent.store.twin.holders import declare_lost, enter_phase, lives_of, next_holders, rebook, settled
from nodeagent.store.twin.state import State, terminal

BUDGET_KEPT = 64
FAILURES = frozenset({"failed", "lost", "fenced", "refused"})


def propose(s: State, p: Proposal) -> JobRecord:
    job = s.job(p.uid)
    if job.head is not None and job.head.id == p.id:
        return job
    _check_open(job)
    _check_expected(job, p.expect, p.expect_state, p.control_rev)
    size = job.spec.role.nodes
    if not size.min <= len(p.members) <= size.max:
        raise StoreRefusedError(
            "unsupported", f"job {job.name} takes {size.min} to {size.max} nodes, not {len(p.members)}"
        )
    _check_lost(s, job, p.lost)
    for node in sorted(p.members):
        _check_member(s, job, node, p.members[node])
    declare_lost(s, job, p.lost, p.by)
    number = s.highest.get(job.name, 0) + 1
    s.highest[job.name] = number
    head = Head(
        number=number,
        id=p.id,
        state="forming",
        members=p.members,
        holders=next_holders(s, job, p.lost),
        cause=p.cause,
        planned=p.planned,
        grace=p.grace,
        since=s.served,
        deadline=s.served + p.form_ms,
        control_rev=p.control_rev,
        outside=p.outside,
        keepers=p.keepers,
    )
    before = job
    update = _spent(job, p.spend) | _closed(job, p.spend)
    update |= {"head": head, "restart_done": job.control.restart, "not_before": 0}
    job = enter_phase(s, job.model_copy(update=update), "forming", p.cause.text)
    rebook(s, before, job)
    job = s.save_job(job)
    s.event("GenerationForming", job=job, generation=number, by=p.by, text=p.cause.text)
    return job


def ack(
    s: State, uid: str, token: Token, node: str, incarnation: Incarnation, value: Ack, last: PodReport | None
) -> JobRecord:
    s.current(node, incarnation)
    job = s.job(uid)
    head = _expect_head(job, token)
    member = head.members.get(node)
    if member is not None and member.life != incarnation.life:
        member = None
    keeper = node in job.keepers and head.state != "active"
    if member is None and not keeper and node not in head.holders:
        return job
    if value.ended != (head.state == "ended"):
        return job
    if last is not None and job.last_number:
        said = job.last_reports.get(node)
        if last.state == "left" and (said is None or said.state != "left"):
            text = f"{node}: {last.reason}"
            s.event("WorkersLeft", job=job, node=node, generation=job.last_number, by=node, text=text)
        reports = job.last_reports | {node: _sequenced(job.last_reports, node, last)}
        job = job.model_copy(update={"last_reports": reports})
    holders = {n: h for n, h in head.holders.items() if n != node}
    update: dict[str, object] = {"holders": holders}
    if (member is not None or keeper) and head.state == "forming":
        update["acks"] = head.acks | {node: value}
    elif keeper and not value.lends:
        job = job.model_copy(update={"keepers": {}})
    head = head.model_copy(update=update)
    s.book(node, uid, frozenset(member.devices) if member is not None and head.state != "ended" else frozenset())
    silent = {n: life for n, life in job.silent.items() if (n, life) != (node, incarnation.life)}
    job = job.model_copy(update={"head": head, "silent": silent})
    if head.state == "forming" and _not_ready(s, job, head) is None:
        return _activated(s, job, head)
    return settled(s, job)


def activate(s: State, uid: str, token: Token) -> JobRecord:
    job = s.job(uid)
    head = _expect_head(job, token)
    if head.state == "active":
        return job
    if head.state == "ended":
        raise StoreRefusedError("stale", f"generation {head.number} of job {job.name} has ended: read it again")
    reason = _not_ready(s, job, head)
    if reason is not None:
        raise StoreRefusedError("not_live", f"generation {head.number} of job {job.name} cannot start: {reason}")
    return _activated(s, job, head)


def keep(
    s: State,
    uid: str,
    token: Token,
    node: str,
    incarnation: Incarnation,
    expect: Mapping[str, str],
    keepers: Mapping[str, str],
) -> JobRecord:
    s.current(node, incarnation)
    job = s.job(uid)
    head = _expect_head(job, token)
    name = f"generation {head.number} of job {job.name}"
    if head.state != "active":
        raise StoreRefusedError("stale", f"{name} is {head.state}, not active: read it again")
    if job.keepers != dict(expect):
        raise StoreRefusedError("stale", f"the keepers of {name} have changed: read it again")
    if node not in job.keepers and (job.keepers or node not in head.members):
        raise StoreRefusedError("stale", f"node {node} may not choose the keepers of {name}")
    return s.save_job(job.model_copy(update={"keepers": dict(keepers)}))


def report(s: State, uid: str, token: Token, node: str, incarnation: Incarnation, value: PodReport) -> JobRecord:
    s.current(node, incarnation)
    job = s.job(uid)
    head = _expect_head(job, token)
    if head.state != "active":
        raise StoreRefusedError(
            "stale", f"generation {head.number} of job {job.name} is {head.state}, not active: read it again"
        )
    member = head.members.get(node)
    if member is None or member.life != incarnation.life:
        raise StoreRefusedError("stale", f"node {node} is no member of generation {head.number} of job {job.name}")
    entry = _sequenced(head.reports, node, value)
    first = entry.seq and (node not in head.reports or not head.reports[node].seq)
    job = s.save_job(job.model_copy(update={"head": head.model_copy(update={"reports": head.reports | {node: entry}})}))
    if first:
        kind = "WorkerFailed" if value.state == "failed" else "PodFailed"
        text = value.reason or f"the pod of job {job.name} on node {node}: {value.state}"
        s.event(kind, job=job, node=node, generation=head.number, by=node, text=text)
    elif value.state == "running" and node not in head.reports:
        s.event("GenerationStarted", job=job, node=node, generation=head.number, by=node, text=value.reason)
    return job


def end(s: State, e: Ending) -> JobRecord:
    job = s.job(e.uid)
    if _ended_before(job, e):
        return job
    _check_open(job)
    _check_expected(job, e.expect, e.expect_state, e.control_rev)
    head = job.head
    if e.phase == "succeeded":
        _check_success(job)
    _check_lost(s, job, e.lost)
    declare_lost(s, job, e.lost, e.by)
    before = job
    update = _spent(job, e.spend) | _closed(job, e.spend)
    holders = next_holders(s, job, e.lost)
    if head is not None:
        changed: dict[str, object] = {"holders": holders}
        if head.state != "ended":
            changed |= {
                "state": "ended",
                "planned": e.planned,
                "grace": None,
                "reports": {},
                "since": s.served,
                "deadline": 0,
            }
        update["head"] = head.model_copy(update=changed)
    update |= {"outcome": e.outcome, "not_before": s.served + e.delay_ms}
    phase: Phase = "paused" if e.phase == "pausing" and not holders else e.phase
    job = enter_phase(s, job.model_copy(update=update), phase, e.reason)
    if terminal(job):
        job = job.model_copy(update={"ended": e.wall})
    rebook(s, before, job)
    job = s.save_job(job)
    if (before.phase, before.reason) != (job.phase, job.reason) or (head is not None and head.state != "ended"):
        number = head.number if head is not None else 0
        s.event(f"Job{job.phase.capitalize()}", job=job, generation=number, by=e.by, text=e.reason)
    return job


def settle(s: State, e: Settlement) -> JobRecord:
    job = s.job(e.uid)
    control = e.control.model_copy(update={"rev": e.control_rev + 1})
    if job.control == control:
        return job
    _check_open(job)
    _check_expected(job, e.expect, e.expect_state, e.control_rev)
    job = s.save_job(job.model_copy(update={"control": control}))
    s.event(e.event, job=job, generation=job.head.number if job.head else 0, by=e.by, text=e.text)
    return job


def judge(s: State, e: Judgement) -> JobRecord:
    job = s.job(e.uid)
    number = str(e.number)
    if job.budget.get(number) == e.spend:
        return job
    _check_open(job)
    _check_expected(job, e.expect, e.expect_state, e.control_rev)
    if job.last_number != e.number or number not in job.budget:
        raise StoreRefusedError("stale", f"generation {number} of job {job.name} is not the one that ended last")
    job = s.save_job(job.model_copy(update={"budget": job.budget | {number: e.spend}, "silent": {}}))
    s.event("FaultJudged", job=job, generation=e.number, by=e.by, text=e.spend.text)
    return job


# --- checks


def _check_open(job: JobRecord) -> None:
    if terminal(job):
        raise StoreRefusedError("ended", f"job {job.name} has ended ({job.phase})")


def _check_expected(job: JobRecord, expect: Token | None, state: str, control_rev: int) -> None:
    head = job.head
    if (head.token if head else None) != expect or (head is not None and head.state != state):
        seen = f"{state} generation {expect.number}" if expect else "none"
        now = f"{head.state} generation {head.number}" if head else "none"
        raise StoreRefusedError("stale", f"the head of job {job.name} is {now} by now, not {seen}: read it again")
    if job.control.rev != control_rev:
        raise StoreRefusedError(
            "stale", f"the control of job {job.name} has revision {job.control.rev} by now, not {control_rev}"
        )


def _expect_head(job: JobRecord, token: Token) -> Head:
    if job.head is None or job.head.token != token:
        now = f"generation {job.head.number}" if job.head else "none"
        raise StoreRefusedError(
            "stale", f"the head of job {job.name} is {now} by now, not generation {token.number}: read it again"
        )
    return job.head


def _check_lost(s: State, job: JobRecord, lost: Iterable[str]) -> None:
    for node in sorted(set(lost)):
        lives = lives_of(job.head, node)
        if not lives:
            raise StoreRefusedError("stale", f"node {node} is neither member nor holder in job {job.name}")
        if not all(s.gone(node, life) for life in lives):
            raise StoreRefusedError("stale", f"node {node} holds its lease: it is not lost")


def _check_member(s: State, job: JobRecord, node: str, member: Member) -> None:
    record = s.nodes.get(node)
    if record is None or record.incarnation.life != member.life or s.lapsed(node):
        raise StoreRefusedError("not_live", f"node {node} is not live in the life that was proposed")
    if record.cordon is not None:
        raise StoreRefusedError("not_live", f"node {node} is cordoned: {record.cordon.reason}")
    taken = s.alloc.get(node, {})
    for device in member.devices:
        if taken.get(device, job.uid) != job.uid:
            raise StoreRefusedError("busy", f"device {device} of node {node} is job {taken[device]}'s")


def _check_success(job: JobRecord) -> None:
    head = job.head
    if head is None or head.state != "active":
        raise StoreRefusedError("unsupported", f"job {job.name} has no active generation that could have succeeded")
    for node in sorted(head.members):
        if node not in head.reports or head.reports[node].state != "succeeded":
            raise StoreRefusedError(
                "unsupported", f"node {node} has not reported success of generation {head.number} of job {job.name}"
            )


def _not_ready(s: State, job: JobRecord, head: Head) -> str | None:
    """Why this forming head cannot become active."""
    if head.holders:
        return f"node {min(head.holders)} may still run an older generation"
    for node in sorted(head.members):
        life = head.members[node].life
        if node not in head.acks or head.acks[node].life != life:
            return f"node {node} has not acknowledged"
        if s.not_live(node, life):
            return f"node {node} is not live"
    let_go = [node for node in job.keepers if node in head.acks and not head.acks[node].lends]
    if job.keepers and not let_go and job.active is not None:
        keepers = ", ".join(sorted(job.keepers))
        return f"no keeper of generation {job.active.number} ({keepers}) has let go"
    return None


def _ended_before(job: JobRecord, e: Ending) -> bool:
    """This very step has been done before (its reply was lost, or another agent was faster)."""
    same_phase = job.phase == e.phase or (e.phase == "pausing" and job.phase == "paused")
    if not same_phase or (job.head.token if job.head else None) != e.expect:
        return False
    return terminal(job) or (job.head is not None and job.head.state == "ended" and e.expect_state != "ended")


# --- effects


def _closed(job: JobRecord, spend: Spend | None) -> dict[str, object]:
    """The reports of a head that was active are kept, and who has yet to answer before its fault is judged. An entry
    that comes later and does not count is the judgement."""
    head = job.head
    if head is None or head.state != "active":
        return {"silent": {}} if spend is not None and not spend.counts else {}
    members = head.members.values() if spend is not None and spend.counts else ()
    ended = {n for n, r in head.reports.items() if r.state in FAILURES}
    silent = {m.node: m.life for m in members if m.node not in ended}
    return {"last_reports": head.reports, "last_number": head.number, "silent": silent}


def _spent(job: JobRecord, spend: Spend | None) -> dict[str, object]:
    if spend is None or job.active is None:
        return {}
    budget = job.budget | {str(job.active.number): spend}
    # Those that do not count go first: a counted one must not be forgotten for the sake of a mere note.
    oldest = sorted(budget, key=lambda number: (budget[number].counts, int(number)))
    kept = sorted(oldest[max(0, len(oldest) - BUDGET_KEPT) :], key=int)
    return {"budget": {number: budget[number] for number in kept}}


def _sequenced(reports: Mapping[str, PodReport], node: str, value: PodReport) -> PodReport:
    """The report with its order of arrival among the faults of its generation."""
    seq = reports[node].seq if node in reports else 0
    if not seq and value.state in FAILURES:
        seq = 1 + max((r.seq for r in reports.values()), default=0)
    return value.model_copy(update={"seq": seq})


def _activated(s: State, job: JobRecord, head: Head) -> JobRecord:
    first = head.acks[head.ordered()[0].node]
    head = head.model_copy(
        update={
            "state": "active",
            "address": first.address,
            "store_hosted": first.store_hosted,
            "since": s.served,
            "deadline": 0,
        }
    )
    update: dict[str, object] = {"head": head, "active": head.token, "keepers": head.keepers}
    if job.first_active is None:
        update |= {"first_active": s.served, "started": s.now / 1000}
    else:
        update["restarts"] = job.restarts + 1
    text = f"generation {head.number} runs on {len(head.members)} node{'s' if len(head.members) > 1 else ''}"
    job = s.save_job(enter_phase(s, job.model_copy(update=update), "running", text))
    s.event("GenerationActive", job=job, generation=head.number, text=text)
    return job
