"""What an operator may want of a job, as a pure step from its record to its next control (scales: ``scaling.py``).

Each intent refuses (``ApiError``), says that it is so already (None), or gives the change. Asked again for every
repetition of a write, so it only ever acts on what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nodeagent.api.errors import ApiError
from nodeagent.model.job import TERMINAL, Control, JobRecord
from nodeagent.plan.cluster import Refusal


@dataclass(frozen=True, slots=True)
class Wish:
    """Fields of the control to change, and the event that tells of it."""

    change: dict[str, Any]
    event: str
    text: str


def foundation(job: JobRecord, refusal: Refusal | None, *, ends: bool) -> JobRecord:
    """The job as a new wish may build on it: of a control that nobody signed only the revision is kept. ``ends``: the
    wish is for its end, which any record may be given. Raises ``ApiError`` (``state``)."""
    if refusal is None:
        return job
    if refusal.kind != "control" and not ends:
        raise ApiError("state", f"job {job.name!r} is not run: {refusal.text}", "nothing was changed")
    if refusal.controlled:
        return job
    rev, target = max(job.control.rev, refusal.rev), job.spec.role.nodes.target
    fresh = Control(rev=rev, target=target, restart=job.restart_done)
    return job.model_copy(update={"control": fresh})


Intent = Callable[[JobRecord], Wish | None]


def _alive(job: JobRecord, verb: str) -> None:
    if job.phase in TERMINAL:
        raise ApiError(
            "state",
            f"job {job.name!r} has ended ({job.phase}: {job.reason}); there is nothing to {verb}",
            "submit it again: nodeagentctl submit FILE",
        )


def not_stopping(job: JobRecord, verb: str) -> None:
    """Refuse for a job that has ended or is about to."""
    _alive(job, verb)
    if job.control.desired == "stop":
        raise ApiError(
            "state",
            f"job {job.name!r} is being stopped (by {job.control.by}); it cannot {verb} any more",
            "wait for its end, then submit it again: nodeagentctl submit FILE",
        )


def pause(job: JobRecord) -> Wish | None:
    """Stop the workers gracefully, keep the job."""
    not_stopping(job, "pause")
    if job.control.desired == "pause":
        return None
    return Wish({"desired": "pause"}, "JobPaused", "pause")


def resume(job: JobRecord) -> Wish | None:
    """Run again after a pause."""
    not_stopping(job, "resume")
    if job.control.desired == "run":
        return None
    return Wish({"desired": "run"}, "JobResumed", "resume")


def restart(job: JobRecord) -> Wish | None:
    """Re-form the gang once, without spending the budget."""
    not_stopping(job, "restart")
    if job.control.desired == "pause":
        raise ApiError(
            "state", f"job {job.name!r} is paused; there is nothing to restart", "start it: nodeagentctl resume"
        )
    if job.active is None:
        raise ApiError(
            "state",
            f"job {job.name!r} has not started yet ({job.phase}); there is nothing to restart",
            f"see what it waits for: nodeagentctl describe {job.name}",
        )
    return Wish({"restart": job.control.restart + 1}, "JobRestarted", "restart")


def stop(job: JobRecord) -> Wish | None:
    """End the job for good."""
    _alive(job, "stop")
    if job.control.desired == "stop":
        return None
    return Wish({"desired": "stop"}, "JobStopped", "stop")


def delete(job: JobRecord) -> Wish | None:
    """Remove the record; a live job is stopped first."""
    if job.control.delete:
        return None
    if job.phase in TERMINAL:
        return Wish({"delete": True}, "JobDeleted", "delete")
    return Wish({"desired": "stop", "delete": True}, "JobDeleted", "stop and delete")
