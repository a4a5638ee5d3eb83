"""What a job's policies make of an event, and the steps that end or pause a job by one. Reads the record and served
time only; which faults there are is ``faults.py``'s."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from nodeagent.model.job import Ends, JobRecord, Outcome, Spend
from nodeagent.model.jobspec import ActionName, EventName, JobSpec, Policy
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.membership import holding_nodes
from nodeagent.plan.steps import Decision, End

ENDS: Mapping[ActionName, Ends] = {
    "AbortJob": "paused",
    "TerminateJob": "stopped",
    "CompleteJob": "succeeded",
    "FailJob": "failed",
}
"""What the actions that do not go on with the job make of it."""
STOPPED_CODE = 143
"""Exit code of a job that was stopped, as of a process that SIGTERM ends."""
BY = "a policy of the job"
"""Who wrote a control that pauses the job by a policy."""


def match(policies: Sequence[Policy], event: EventName, exit_code: int | None) -> ActionName | None:
    """The action of the first policy that names this event (or ``*``) and, if it names a code, this code; None if
    none does."""
    for policy in policies:
        if event not in policy.on and "*" not in policy.on:
            continue
        if policy.exit_code is not None and policy.exit_code != exit_code:
            continue
        return policy.do
    return None


def answer(spec: JobSpec, roles: Collection[str], event: EventName, exit_code: int | None = None) -> ActionName | None:
    """The action for an event that concerns places of these roles: of the first list that has one."""
    found = (match(policies, event, exit_code) for policies in spec.policies_of(roles))
    return next((action for action in found if action is not None), None)


def sentence(action: ActionName, event: EventName, what: str) -> str:
    """Why the job ends or is paused."""
    return f"{BY} says {action} for {event}: {what}"


def ending(
    cluster: Cluster,
    job: JobRecord,
    ends: Ends,
    outcome: Outcome,
    gone: tuple[str, ...],
    spend: Spend | None = None,
    *,
    in_order: bool = True,
) -> Decision:
    """The job's end, or its pause, for the reason that ``outcome`` gives. ``in_order``: workers take their grace.

    A pause starts nothing again, so the fault that led to it costs nothing; nor is it judged once more when the job is
    resumed."""
    text, code = outcome.text, outcome.code
    if ends == "paused":
        runs = (job.head is not None and job.head.state == "active") or bool(holding_nodes(cluster, job))
        text = f"{text}; go on with: nodeagentctl resume {job.name}"
        free = spend.model_copy(update={"counts": False, "fails": ""}) if spend is not None else None
        control = job.control.model_copy(update={"desired": "pause", "by": BY})
        step = End("pausing" if runs else "paused", text, gone, spend=free, planned=in_order, control=control)
        return Decision(step, (text,))
    code = {"stopped": STOPPED_CODE, "succeeded": 0}.get(ends, code)
    outcome = Outcome(code=code, text=text, error=outcome.error if ends == "failed" else "")
    step = End(ends, text, gone, outcome, spend, planned=in_order, by_policy=ends == "succeeded")
    return Decision(step, (text,))
