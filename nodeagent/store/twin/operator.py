"""The steps of operators in the twin: submit, control, remove; and renewing an admission.

The twin of ``scripts/{submit,control,renew,remove}.lua``; must never touch a generation.
"""

from __future__ import annotations

from nodeagent.model.job import Admission, Control, JobRecord, Quota
from nodeagent.model.jobspec import JobSpec
from nodeagent.store.base import StoreRefusedError
from nodeagent.store.messages import Answer
from nodeagent.store.twin.holders import still_held
from nodeagent.store.twin.state import State, terminal
from nodeagent.store.words import too_many_bytes, too_many_jobs


def submit(
    s: State, uid: str, spec: JobSpec, owner: int, wall: float, by: str, request: str, control: Control,
    admission: Admission | None, quota: Quota | None,
) -> JobRecord:  # fmt: skip
    if request and request in s.requests:
        return s.job(s.requests[request].subject)
    if uid in s.jobs:
        return s.jobs[uid]
    for record in s.changes:
        if record.startswith("job:") and not s.has(record):
            s.distrust((record,))
            raise StoreRefusedError(
                "recovering",
                f"somebody removed or damaged {record} in the store: the agents give it back, and nothing is decided "
                "meanwhile; then try again",
            )
    # By the records themselves: what names say may have been removed by hand.
    namesakes = [job for job in s.jobs.values() if job.name == spec.name]
    old = next((job for job in namesakes if not terminal(job)), namesakes[-1] if namesakes else None)
    if old is not None:
        held = still_held(s, old)
        if not terminal(old):
            raise StoreRefusedError(
                "name_taken",
                f"a job named {spec.name} is live (uid {old.uid}, {old.phase}): choose another name, or stop it first",
            )
        if held:
            raise StoreRefusedError(
                "name_taken",
                f"the job named {spec.name} (uid {old.uid}, {old.phase}) still stops its workers on node {held[0]}: "
                "try again in a moment",
            )
    if quota is not None:
        _within(s, quota, spec, owner, by, old)
    if old is not None:
        s.delete_job(old)
    s.order += 1
    job = s.save_job(
        JobRecord(
            uid=uid,
            name=spec.name,
            owner=owner,
            spec=spec,
            admission=admission,
            control=control,
            phase="queued",
            reason="submitted, waits for nodes",
            submitted=wall,
            since=s.served,
            order=s.order,
        )
    )
    s.names[spec.name] = uid
    s.remember(request, Answer(subject=uid))
    s.event("JobSubmitted", job=job, by=by, text=f"job {spec.name} submitted")
    return job


def _within(s: State, quota: Quota, spec: JobSpec, owner: int, by: str, old: JobRecord | None) -> None:
    """Raises StoreRefusedError ``limit``. ``old``: the ended job that gives way to the new one."""
    kept = [job for job in s.jobs.values() if job.owner == owner and job is not old]
    live = sum(not terminal(job) for job in kept)
    if live >= quota.jobs:
        raise StoreRefusedError("limit", too_many_jobs(by, live))
    size = len(spec.to_json().encode()) + sum(map(s.size, kept))
    if size > quota.bytes:
        raise StoreRefusedError("limit", too_many_bytes(by, size, quota.bytes))


def control(
    s: State, uid: str, expect_rev: int, value: Control | None, request: str, event: str, text: str, did: str
) -> JobRecord:
    job = s.job(uid)
    if request and request in s.requests:
        return job
    old = job.control
    only_delete = value is not None and (value.delete, value.desired, value.target, value.restart) == (
        True,
        old.desired,
        old.target,
        old.restart,
    )
    if terminal(job) and not only_delete:
        raise StoreRefusedError("ended", f"job {job.name} has ended ({job.phase})")
    if old.rev != expect_rev:
        raise StoreRefusedError(
            "stale", f"the control of job {job.name} has revision {old.rev} by now, not {expect_rev}"
        )
    s.remember(request, Answer(subject=uid, did=did))
    if value is None:
        return job
    new = value.model_copy(update={"rev": max(expect_rev + 1, value.rev)})
    job = s.save_job(job.model_copy(update={"control": new}))
    s.event(event, job=job, by=value.by, text=text)
    return job


def renew(s: State, uid: str, expect: str, admission: Admission) -> JobRecord:
    job = s.job(uid)
    if terminal(job):
        raise StoreRefusedError("ended", f"job {job.name} has ended ({job.phase})")
    signed = job.admission.signature if job.admission is not None else None
    if signed == admission.signature:
        return job
    if signed != expect:
        raise StoreRefusedError("stale", f"the admission of job {job.name} is another by now: read it again")
    return s.save_job(job.model_copy(update={"admission": admission}))


def remove(s: State, uid: str) -> None:
    job = s.jobs.get(uid)
    if job is None:
        return
    if not terminal(job):
        raise StoreRefusedError("stale", f"job {job.name} has not ended ({job.phase}): stop it first")
    held = still_held(s, job)
    if held:
        raise StoreRefusedError("stale", f"job {job.name} still stops its workers on node {held[0]}")
    s.delete_job(job)
    s.event("JobDeleted", job=job, text=f"job {job.name} deleted")
