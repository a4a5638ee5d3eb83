"""The site's rules about jobs: who may submit, how large a job may be, who may be preferred, what one user may keep.

Every refusal names the key of the config that says so. Root, the agent's own user and operators are bound by none.
"""

from __future__ import annotations

from nodeagent.api.auth import Caller, in_group
from nodeagent.api.errors import ApiError
from nodeagent.model.job import Quota
from nodeagent.model.jobspec import JobSpec
from nodeagent.spec.limitsconfig import LimitsConfig

RESTART_WINDOW = 3600.0
"""Seconds that restarts are counted within at least, where the site limits them: a short window would be no limit."""


def may_submit_at_all(who: Caller, limits: LimitsConfig, node: str) -> None:
    """Raises ``ApiError`` unless the site lets the caller submit. May block on the user database."""
    allowed = limits.submit
    if who.operator or not (allowed.users or allowed.groups) or who.name in allowed.users:
        return
    if any(in_group(who.name, who.gid, group) for group in allowed.groups):
        return
    raise ApiError(
        "permission",
        f"{who.name} may not submit jobs: limits.submit in the config of node {node} lists neither this user nor a "
        "group of theirs",
        "ask an operator; nothing was submitted",
    )


def within_policy(who: Caller, spec: JobSpec, limits: LimitsConfig, node: str) -> None:
    """Raises ``ApiError`` where the job asks for what only operators may have."""
    if who.operator:
        return
    most, nodes = limits.nodes_per_job, spec.role.nodes.max
    if most is not None and nodes > most:
        raise ApiError(
            "permission",
            f"job {spec.name!r} asks for up to {nodes} nodes; limits.nodes_per_job in the config of node {node} is "
            f"{most}",
            f"write a max of {most} nodes or fewer, or ask an operator; nothing was submitted",
        )
    few, asked = limits.restarts_per_job, spec.restarts
    if few is not None and asked.max and (asked.max > few or asked.window < RESTART_WINDOW):
        within = f", within {RESTART_WINDOW:g} s or longer" if asked.max <= few else ""
        raise ApiError(
            "permission",
            f"job {spec.name!r} asks for {asked.max} restarts within {asked.window:g} s; limits.restarts_per_job in "
            f"the config of node {node} is {few}{within}",
            f"write restarts: {{max: {few}}} or less, with a window of 1h or longer, or ask an operator; nothing was "
            "submitted",
        )
    if spec.priority > 0:
        raise ApiError(
            "permission",
            f"job {spec.name!r} has priority {spec.priority}; priorities above 0 are for operators (the group of "
            f"jobs.operators in the config of node {node}), and {who.name} is none",
            "leave out `priority:` or write 0 or less; nothing was submitted",
        )


def quota(who: Caller, limits: LimitsConfig) -> Quota | None:
    """What the store holds the caller's jobs to; None: to nothing."""
    return None if who.operator else Quota(jobs=limits.jobs, bytes=limits.job_bytes)
