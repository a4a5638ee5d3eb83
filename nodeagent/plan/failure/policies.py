"""What a job's policies make of an event, and the steps that end or pause a job by one. Reads the record and served
time only; which faults there are is ``faults.py``'s."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from nodeagent.model.job import BudgetEntry, Ends, JobRecord, Outcome
from nodeagent.model.jobspec import ActionName, EventName, JobSpec, Policy
from nodeagent.plan.cluster import Cluster
from nodeagent.plan.nodes.members import holding_nodes
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
GO_ON = "; go on with: nodeagentctl resume "
"""In the reason of a paused job, before its name."""
BY = "a policy of the job"
"""Who wrote a control that pauses the job by a policy."""
EVENTS: Mapping[str, EventName] = {
    "worker_failed": "WorkerFailed",
    "collective": "WorkerFailed",
    "hang": "WorkerHung",
    "pod_failed": "PodFailed",
    "node_lost": "NodeLost",
    "fenced": "NodeLost",
    "drain": "PodEvicted",
    "hardware": "PodEvicted",
}
"""The event of each kind of cause that is one for policies. ``collective`` is ``worker_failed`` in other words."""


def match(policies: Sequence[Policy], event: EventName, exit_code: int | None) -> ActionName | None:
    """The action of the first policy without a timeout that names this event (or, of a fault, ``*``) and, if it names a
    code, this code; None if none does."""
    found = (one.do for one in policies if one.timeout is None and one.names(event, exit_code))
    return next(found, None)


def answer(spec: JobSpec, roles: Collection[str], event: EventName, exit_code: int | None = None) -> ActionName | None:
    """The action for an event that concerns places of these roles: of the first list that has one."""
    found = (match(policies, event, exit_code) for policies in spec.policies_of(roles))
    return next((action for action in found if action is not None), None)


def roles_on(job: JobRecord, nodes: Iterable[str]) -> tuple[str, ...]:
    """Whose places its newest generation has on these nodes; none in a job of one role."""
    members = job.generation.members if job.generation is not None else {}
    found = {place.role for node in nodes if node in members for place in members[node].places}
    return tuple(role.name for role in job.spec.roles if role.name in found)


def sentence(action: ActionName, event: EventName, what: str) -> str:
    """Why the job ends or is paused."""
    return f"{BY} says {action} for {event}: {what}"


def ending(
    cluster: Cluster,
    job: JobRecord,
    ends: Ends,
    outcome: Outcome,
    gone: tuple[str, ...],
    spend: BudgetEntry | None = None,
    *,
    in_order: bool = True,
) -> Decision:
    """The job's end, or its pause, for the reason that ``outcome`` gives. ``in_order``: workers take their grace.

    A pause starts nothing again, so the fault that led to it costs nothing; nor is it judged once more when the job is
    resumed."""
    text, code = outcome.text, outcome.code
    if ends == "paused":
        runs = (job.generation is not None and job.generation.state == "active") or bool(holding_nodes(cluster, job))
        text = f"{text}{GO_ON}{job.name}"
        free = spend.model_copy(update={"counts": False, "fails": ""}) if spend is not None else None
        control = job.control.model_copy(update={"desired": "pause", "by": BY})
        step = End("pausing" if runs else "paused", text, gone, spend=free, planned=in_order, control=control)
        return Decision(step, (text,))
    code = {"stopped": STOPPED_CODE, "succeeded": 0}.get(ends, code)
    outcome = Outcome(code=code, text=text, error=outcome.error if ends == "failed" else "")
    step = End(ends, text, gone, outcome, spend, planned=in_order, by_policy=ends == "succeeded")
    return Decision(step, (text,))


def tasks_asked_for(spec: JobSpec) -> tuple[str, ...]:
    """The roles for whose completion a policy waits; of one role the end of its workers says enough."""
    if not spec.several:
        return ()
    return tuple(role.name for role in spec.roles if answer(spec, (role.name,), "TaskCompleted") is not None)


def task_completed(job: JobRecord) -> tuple[ActionName, str] | None:
    """What a policy does about a role of the active generation whose workers have all exited 0, and why; None: there is
    no such role, or no such policy."""
    generation, spec = job.generation, job.spec
    if generation is None or generation.state != "active":
        return None
    asked = tasks_asked_for(spec)
    for role in asked:
        nodes = [node for node, member in generation.members.items() if member.ranks_of(role)]
        if all((report := generation.reports.get(node)) is not None and role in report.tasks for node in nodes):
            return _completed(spec, (role,), f"every worker of role {role} of generation {generation.number} exited 0")
    if not spec.several and all(
        (report := generation.reports.get(node)) is not None and report.state == "succeeded"
        for node in generation.members
    ):
        return _completed(spec, (), f"every worker of generation {generation.number} exited 0")
    return None


def _completed(spec: JobSpec, roles: tuple[str, ...], what: str) -> tuple[ActionName, str] | None:
    action = answer(spec, roles, "TaskCompleted")
    return None if action is None else (action, sentence(action, "TaskCompleted", what))
