"""What the store makes of decisions, for tests that carry them out one after the other: every generation is active at
once, and what it leaves is free at once. Must never decide anything."""

from __future__ import annotations

from nodeagent.model.job import JobRecord
from nodeagent.model.world import Generation, Token
from nodeagent.plan.steps import Decision, End, Propose, Settle


def carried_out(job: JobRecord, decision: Decision, served: int) -> JobRecord:
    """The job's record once this decision's step was taken, at this served time."""
    step, generation = decision.step, job.generation
    if isinstance(step, Settle):
        return job.model_copy(update={"control": step.control})
    assert isinstance(step, Propose | End), step
    last = job.active.number if job.active is not None else 0
    spent = {str(last): step.spend} if step.spend is not None and last else {}
    changes: dict[str, object] = {"budget": job.budget | spent, "last_number": last}
    if isinstance(step, Propose):
        number = generation.number + 1 if generation is not None else 1
        token = Token(number=number, id=f"g{number}")
        formed = Generation(
            number=number, id=token.id, state="active", members=step.members, cause=step.cause, planned=step.planned,
            since=served,
        )  # fmt: skip
        changes |= {"generation": formed, "active": token, "phase": "running", "not_before": 0}
        changes |= {"first_active": job.first_active or served, "running_since": job.running_since or served}
    else:
        assert generation is not None, "one that has not started does not end here"
        ended = generation.model_copy(update={"state": "ended", "since": served, "planned": step.planned})
        changes |= {"generation": ended, "phase": step.phase, "running_since": None, "reason": step.reason}
        changes["not_before"] = served + step.delay_ms
    if changes["phase"] != job.phase:
        changes["since"] = served
    return job.model_copy(update=changes)
