"""Carrying out what was decided: pod actions on this node, steps of jobs in the store. Idempotent; never decides.

An effect is believed only when the next snapshot or status shows it. What a message about one job says is guarded
(``undecided.py``); sending it is not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from nodeagent.agent.comparison import Comparison
from nodeagent.agent.context import AgentContext
from nodeagent.agent.membership import Membership
from nodeagent.agent.reach import Reach
from nodeagent.agent.stopwatch import Recovery, Stopwatch
from nodeagent.agent.verifier import AdmissionVerifier
from nodeagent.model.base import first_error
from nodeagent.model.job import RETENTION, BudgetEntry, Checkpoint, Control, JobRecord
from nodeagent.model.world import PodReport
from nodeagent.plan import steps
from nodeagent.plan.pods import actions
from nodeagent.pods.base import StartOrder
from nodeagent.pods.environment import roles_file, worker_environments
from nodeagent.store.base import StepFailedError, StoreRefusedError
from nodeagent.store.messages import Ending, Judgement, Proposal, Settlement
from nodeagent.trust.seal import Seal

T = TypeVar("T")

LOGGED_MOST = 1024
"""Jobs of which the last thing logged is known, before those that are gone are forgotten."""
REFUSED_LONG = 10.0
"""Seconds for which a step is refused again and again, of a job that stays as it is, until the log says so."""
FAILED = "failed"
"""In the place of a refusal's code: the step itself failed."""


@dataclass(slots=True)
class _Refused:
    """A step that the store refuses each time, of a job of this revision. ``since``: our clock's time."""

    rev: int
    since: float
    logged: bool = False


class Applier:
    """Carries out the decisions of one agent."""

    def __init__(
        self,
        context: AgentContext,
        membership: Membership,
        *,
        seal: Seal,
        verifier: AdmissionVerifier,
        stopwatch: Stopwatch,
        reach: Reach,
    ) -> None:
        self._membership, self._store, self._host = membership, context.store, context.host
        self._clock, self._snapshot, self._random_id = context.clock, context.snapshot, context.random_id
        self._seal, self._verifier, self._stopwatch, self._reach = seal, verifier, stopwatch, reach
        self._undecided = context.undecided
        self._comparison = Comparison(context, membership)
        self._logged: dict[str, object] = {}
        self._refusals: dict[str, dict[str, _Refused]] = {}
        """By job and kind of step, of jobs of which no step has gone through since."""
        self._log = structlog.get_logger("apply").bind(node=membership.node)

    async def pod(self, action: actions.PodAction) -> bool:
        """Carry out one pod action; true if the snapshot changed by it. Raises StoreUnavailableError."""
        if self._snapshot.recovering:  # since this was decided: the view may be older than what others have seen
            return False
        job = self._snapshot.job(action.uid)
        log = self._log.bind(job=job.name if job is not None else action.uid)
        match action:
            case actions.Prepare(uid, why):
                if job is not None and self._allowed(job):
                    log.debug("prepare", why=why)
                    self._host.prepare(uid, job.spec)
            case actions.Stop(uid, grace, why, given_up, broken, sooner, later):
                log.debug("stop", why=why, grace=grace)
                self._host.stop(uid, grace, given_up, broken, sooner, later)
            case actions.Promise(uid, token, rendezvous, why, ports, above):
                log.debug("promise", generation=token.number, why=why)
                self._host.promise(uid, token, rendezvous, ports, above)
            case actions.Start(uid, token, why):
                if job is not None and self._allowed(job):
                    log.debug("start", generation=token.number, why=why)
                    if (order := self._message(uid, partial(self._start_order, job))) is not None:
                        self._host.start(uid, order)
            case actions.Release(uid, token, roles, why):
                if job is not None and self._allowed(job):
                    if self._news(uid, ("release", token, roles)):
                        log.info("release", generation=token.number, roles=list(roles), why=why)
                    self._host.release(uid, token, roles)
            case actions.StopRole(uid, token, role, number, why):
                log.info("stop role", generation=token.number, role=role, round=number, why=why)
                self._host.stop_role(uid, token, role, number)
            case actions.StartRole(uid, token, role, number, wait, why):
                if job is not None and self._allowed(job):
                    log.info("start role", generation=token.number, role=role, round=number, wait=wait, why=why)
                    self._host.start_role(uid, token, role, number, wait)
            case actions.LookAtWorkers(uid, why, limit):
                log.debug("look", why=why)
                self._host.look(uid, limit)
            case actions.Retire(uid, why):
                status = self._host.status().get(uid)
                if job is None and status is not None and not status.quiet and not self._membership.seasoned:
                    log.debug("not retired: the store may just have lost its job", why=why)
                    return False
                log.debug("retire", why=why)
                self._host.retire(uid)
            case actions.SendAck(uid, token, ack, last, why):
                if self._news(uid, ("ack", token)):
                    log.info("acknowledge", generation=token.number, why=why)
                me = self._membership
                timed = self._stopwatch.stamp(uid, token, ack, self._clock.now())
                own = timed.model_copy(update={"host": me.facts.address})
                signed = self._seal.ack(uid, token, me.node, own)
                return await self._write(uid, "ack", self._store.ack(uid, token, me.node, me.incarnation, signed, last))
            case actions.ReportPod(uid, token, report, why):
                if self._news(uid, ("report", token, report.state)):
                    log.info("report", generation=token.number, state=report.state, why=why)
                ends = [end.at for end in report.exits if not end.stopped and end.at]
                if report.state == "failed" and ends:  # both of this machine's wall clock
                    late = max(0.0, self._clock.wall() - min(ends))
                    report = report.model_copy(update={"detected": round(late, 4)})
                report = report.model_copy(update={"unreachable": self._peers_of(uid)})
                text = why if report.state == "failed" else ""
                membership = self._membership
                reported = self._store.report(uid, token, membership.node, membership.incarnation, report, text)
                return await self._write(uid, "report", reported)
            case actions.SetFailsafeMembers(uid, token, expect, failsafe_members, why):
                log.info("set failsafe members", generation=token.number, why=why)
                me = self._membership
                done = self._store.set_failsafe_members(uid, token, me.node, me.incarnation, expect, failsafe_members)
                return await self._write(uid, "set_failsafe_members", done)
        return False

    def _allowed(self, job: JobRecord) -> bool:
        """Asked of the very record that something is about to be started from: it may be newer than the decision."""
        return self._verifier.refusal(job, self._clock.wall()) is None

    async def shelve(self, jobs: Sequence[JobRecord], before: float, most: int) -> bool:
        """Move ended jobs into the history, and what is too old out of it; true if there may be more to remove. Raises
        StoreUnavailableError and StoreRefusedError."""
        if jobs:
            self._log.info("into the history", jobs=len(jobs))
        return await self._store.shelve([job.uid for job in jobs], before, most)

    def _steps_saved(self, uid: str) -> bool:
        """Its pod here has snapshots in memory, from which the gang goes on."""
        status = self._host.status().get(uid)
        return status is not None and status.snapshot_bytes > 0

    def _peers_of(self, uid: str) -> dict[str, str]:
        """Members of the job's gang that this node cannot reach, each with the address that does not answer."""
        job, peers = self._snapshot.jobs.get(uid), self._reach.unreachable.get(uid, ())
        members = job.generation.members if job is not None and job.generation is not None else ()
        return {n: node.facts.peer for n in peers if n in members and (node := self._snapshot.node(n)) is not None}

    def _news(self, uid: str, what: object) -> bool:
        """Whether this was not logged before: what is sent again while the store is away is logged once."""
        if len(self._logged) > LOGGED_MOST:
            self._logged = {job: logged for job, logged in self._logged.items() if job in self._snapshot.jobs}
        news = self._logged.get(uid) != what
        self._logged[uid] = what
        return news

    def _message(self, uid: str, build: Callable[[], T]) -> T | None:
        return self._undecided.guard("message", uid, build)

    def _start_order(self, job: JobRecord) -> StartOrder | None:
        """None: not in this round."""
        me = self._snapshot.node(self._membership.node)
        if job.generation is None or me is None:
            return None
        not_after = min(self._membership.fence_at, self._host.granted(job.uid).until)
        if self._clock.now() >= not_after:
            # Its shim would refuse, at the job's cost: the next round tries again, with time or without a lease.
            return None
        member = job.generation.members[self._membership.node]
        nodes = {}
        for other in job.generation.members:
            record = self._snapshot.node(other)
            if record is None:
                return None  # its record has not been read yet: the next round tries again
            signed = record.facts.model_copy(update={"address": job.generation.hosts[other]})
            nodes[other] = record.model_copy(update={"facts": signed})
        # What the store has of it, others may have written.
        me = me.model_copy(update={"facts": self._membership.facts})
        addresses = {name: record.facts.address for name, record in nodes.items()}
        return StartOrder(
            token=job.generation.token,
            environments=worker_environments(job, job.generation, me, nodes),
            places=tuple(p.name for p in member.places for _ in range(p.workers)) if job.spec.several else (),
            roles_file=roles_file(job.generation, addresses) if job.spec.several else "",
            ranks=tuple(range(member.first_rank, member.first_rank + member.workers)),
            not_after=not_after,
            devices=member.devices,
        )

    async def give_back(self, recovery: Recovery) -> bool:
        """Have a finished recovery, or a first start, in the audit log. One that another report came before is not
        written there."""
        job, node = self._snapshot.job(recovery.uid), self._membership.node
        if job is None or job.generation is None:
            return False
        what = "started" if recovery.first else "recovered"
        self._log.info(what, job=job.name, generation=recovery.token.number, text=recovery.text)
        if job.generation.token != recovery.token or job.generation.state != "active" or node in job.generation.reports:
            return False
        report = PodReport(state="running", reason=recovery.text, started=max(0.0, self._clock.now() - recovery.at))
        reported = self._store.report(recovery.uid, recovery.token, node, self._membership.incarnation, report)
        return await self._write(recovery.uid, "report", reported)

    async def job(self, job: JobRecord, decision: steps.Decision, rev: int) -> bool:
        """Take one step of a job in the store; true if it was taken (by us). ``rev``: of the view that this was decided
        on. Raises StoreUnavailableError."""
        why = "; ".join(decision.why)
        log = self._log.bind(job=job.name)
        match decision.step:
            case steps.Propose() as step:
                log.info("propose", nodes=sorted(step.members), cause=step.cause.kind, why=why)
                proposal = self._message(job.uid, partial(self._proposal, job, step, rev))
                return proposal is not None and await self._write(job.uid, "propose", self._store.propose(proposal))
            case steps.End() as step:
                log.info("end", phase=step.phase, why=why)
                ending = self._message(job.uid, partial(self._ending, job, step))
                return ending is not None and await self._write(job.uid, "end", self._store.end(ending))
            case steps.Activate(active):
                return await self._write(job.uid, "activate", self._store.activate(job.uid, active))
            case steps.Settle() as step:
                log.info("settle", kind=step.event, why=why)
                settlement = self._message(job.uid, partial(self._settlement, job, step))
                return settlement is not None and await self._write(job.uid, "settle", self._store.settle(settlement))
            case steps.JudgeFault() as step:
                log.info("judge", generation=step.number, cause=step.spend.kind, why=why)
                judgement = self._message(job.uid, partial(self._judgement, job, step))
                return judgement is not None and await self._write(job.uid, "judge", self._store.judge(judgement))
            case steps.Remove():
                log.info("remove", why=why)
                try:
                    by = job.control.by if job.control.delete else RETENTION
                    await self._store.remove(job.uid, by)
                except (StoreRefusedError, StepFailedError) as refusal:
                    return await self._refused(job.uid, "remove", refusal)
                self._refusals.pop(job.uid, None)
                self._snapshot.forget_job(job.uid)
                return True
            case None:
                return False

    def _seen(self, job: JobRecord) -> dict[str, Any]:
        """The fields of a ``CheckedStep``."""
        generation = job.generation
        return {
            "uid": job.uid,
            "expect": generation.token if generation is not None else None,
            "expect_state": generation.state if generation is not None else "",
            "control_rev": job.control.rev,
            "by": self._membership.node,
        }

    def _next_control(self, job: JobRecord, control: Control) -> Control:
        return self._seal.control(job.uid, control.model_copy(update={"rev": job.control.rev + 1}))

    def _proposal(self, job: JobRecord, step: steps.Propose, rev: int) -> Proposal:
        return Proposal(**self._end(job, step), id=self._random_id(), read=rev)

    def _ending(self, job: JobRecord, step: steps.End) -> Ending:
        control = self._next_control(job, step.control) if step.control is not None else None
        return Ending(**self._end(job, step) | {"control": control}, wall=self._clock.wall())

    def _end(self, job: JobRecord, step: steps.Propose | steps.End) -> dict[str, Any]:
        """What the step says, and what it expects: the fields of the message have the names of the step's."""
        says = {field.name: getattr(step, field.name) for field in fields(step)}
        return self._seen(job) | says | {"spend": _counted(job, step.spend), "steps_saved": self._steps_saved(job.uid)}

    def _settlement(self, job: JobRecord, step: steps.Settle) -> Settlement:
        control = self._next_control(job, step.control)
        return Settlement(**self._seen(job), control=control, event=step.event, text=step.text)

    def _judgement(self, job: JobRecord, step: steps.JudgeFault) -> Judgement:
        counted = step.spend.model_copy(update={"counted_by": _counter(job, step.number)})
        return Judgement(**self._seen(job), number=step.number, spend=counted)

    async def _write(self, uid: str, kind: str, step: Awaitable[JobRecord]) -> bool:
        """Await a store step and take in its reply."""
        try:
            job = await step
        except (StoreRefusedError, StepFailedError) as refusal:
            return await self._refused(uid, kind, refusal)
        self._refusals.pop(uid, None)
        return self._snapshot.absorb_job(job)

    async def _refused(self, uid: str, kind: str, refusal: StoreRefusedError | StepFailedError) -> bool:
        """The view was old, or the store cannot do this step, while others go on: read again. No step was taken:
        false."""
        code = refusal.code if isinstance(refusal, StoreRefusedError) else FAILED
        self._log.debug("refused", code=code, why=str(refusal))
        self._warn_when_long(uid, kind, code, str(refusal))
        before = self._snapshot.job(uid)
        await self._membership.beat()
        after = self._snapshot.job(uid)
        if before is not None and after is not None and before.rev == after.rev:
            await self._comparison.written_over(uid, refusal)
        return False

    def _warn_when_long(self, uid: str, kind: str, code: str, why: str) -> None:
        """Once for a job that stays as it is: it stands still because of this, and shows nothing else."""
        now, job = self._clock.now(), self._snapshot.job(uid)
        if len(self._refusals) > LOGGED_MOST:
            self._refusals = {job: kinds for job, kinds in self._refusals.items() if job in self._snapshot.jobs}
        kinds, rev = self._refusals.setdefault(uid, {}), job.rev if job is not None else 0
        found = kinds.get(kind)
        if found is None or (found.rev != rev and code != FAILED):  # a race may be lost, if others move the job on
            found = kinds[kind] = _Refused(rev, now)
        if now - found.since >= REFUSED_LONG and not found.logged:
            found.logged = True
            name = job.name if job is not None else uid
            self._log.warning("the store refuses a step again and again", job=name, step=kind, code=code, why=why)


def _counter(job: JobRecord, number: int) -> str:
    """The node whose agent counts the start of this generation: of its group rank 0."""
    if job.generation is not None and job.generation.number == number:
        return job.generation.ordered()[0].node
    entry = job.budget.get(str(number))
    return entry.counted_by if entry is not None else ""


def _counted(job: JobRecord, spend: BudgetEntry | None) -> BudgetEntry | None:
    """The entry of the newest generation that was ever active."""
    if spend is None or job.active is None:
        return spend
    return spend.model_copy(update={"counted_by": _counter(job, job.active.number)})


PUT_BACK_EACH = 1.0
"""Seconds between two tries to put one job's checkpoint back."""
OTHERS_WAIT = 5.0
"""Seconds for which nodes that have no part in a job leave that to those that have."""


class CommitRequests:
    """Those of one node. And it puts back what somebody has turned back: the newest checkpoint of a job, the queues,
    the maintenance windows."""

    def __init__(self, context: AgentContext, membership: Membership, seal: Seal, verifier: AdmissionVerifier) -> None:
        self._seal, self._verifier, self._clock = seal, verifier, context.clock
        self._comparison = Comparison(context, membership)
        self._due: dict[str, float] = {}
        """When (our clock) to put a job's checkpoint back, by job (uid), or queues or windows."""
        self._membership, self._store = membership, context.store
        self._host, self._snapshot = context.host, context.snapshot
        self._log = structlog.get_logger("commits").bind(node=membership.node)

    @property
    def pending(self) -> bool:
        """There is something to be put back."""
        return bool(self._due or self._verifier.older_queues or self._verifier.older_windows)

    async def carry(self) -> None:
        """Carry out all requests of now. Raises StoreUnavailableError and StoreRefusedError: the requests stay for
        another time."""
        await self._put_back()
        for uid, status in self._host.status().items():
            wanted = status.commit
            if wanted is None:
                continue
            membership = self._membership
            log = self._log.bind(uid=uid, checkpoint=wanted.name, generation=wanted.token.number)
            try:
                pointer = Checkpoint(name=wanted.name, step=wanted.step, number=wanted.token.number, order=wanted.order)
            except ValidationError as error:  # the shim is the job's user's
                log.warning("not committed", why=first_error(error))
                self._host.committed(uid, wanted, "it is no name of a checkpoint, or has no number")
                continue
            try:
                signature = self._seal.pointer(uid, pointer).signature
                known = self._snapshot.job(uid)
                void = self._verifier.void(known) if known is not None else None
                job = await self._store.commit(
                    uid, wanted.token, membership.node, membership.incarnation, wanted.name, wanted.step, wanted.order,
                    signature, void,
                )  # fmt: skip
            except StoreRefusedError as refusal:
                if refusal.code == "recovering" or await self._comparison.written_over(uid, refusal):
                    continue  # it is decided when every agent has sent what it knows
                log.warning("not committed", code=refusal.code, why=str(refusal))
                self._host.committed(uid, wanted, str(refusal))
            except StepFailedError as error:  # the other jobs need not wait
                log.debug("not committed yet", why=str(error))
            else:
                self._snapshot.absorb_job(job)
                log.info("committed", step=wanted.step)
                self._host.committed(uid, wanted, "")

    async def _put_back(self) -> None:
        """The newest checkpoint that was committed, of each job whose record has another one that does not count."""
        now, due = self._clock.now(), dict[str, float]()
        for uid in self._verifier.misled:
            job, pointer = self._snapshot.job(uid), self._verifier.pointer(uid)
            if job is None or pointer is None or job.active is None or pointer.number > job.active.number:
                continue
            me = self._membership
            due[uid] = self._due.get(uid, now if job.concerns(me.node) else now + OTHERS_WAIT)
            if now < due[uid]:
                continue
            due[uid] = now + PUT_BACK_EACH
            log = self._log.bind(job=job.name, checkpoint=pointer.name)
            try:
                back = await self._store.put_back(
                    uid, job.active, me.node, me.incarnation, pointer, self._verifier.void(job)
                )
            except StoreRefusedError as refusal:
                log.debug("checkpoint not put back", code=refusal.code, why=str(refusal))
            else:
                log.warning("somebody wrote another checkpoint into the store: the newest is put back")
                self._snapshot.absorb_job(back)
        queues, windows = self._verifier.older_queues, self._verifier.older_windows
        if queues is not None:
            await self._replace("queues", now, due, partial(self._store.queues, *queues))
        if windows is not None:
            await self._replace("windows", now, due, partial(self._store.windows, *windows))
        self._due = due

    async def _replace(
        self, record: str, now: float, due: dict[str, float], write: Callable[[str, str], Awaitable[object]]
    ) -> None:
        """Each agent may have the newest: the first one to write it is enough, and the others see that it is there."""
        key = f"all {record}"
        due[key] = self._due.get(key, now)
        if now < due[key]:
            return
        due[key] = now + PUT_BACK_EACH
        try:
            await write(
                f"back-{self._membership.node}-{now:.3f}", f"the newest {record} are put back: older ones were there"
            )
        except StoreRefusedError as refusal:
            self._log.debug("not put back", record=record, code=refusal.code, why=str(refusal))
        else:
            self._log.warning("somebody wrote an older record into the store: the newest is put back", record=record)
