"""The site's rules about jobs (``limits`` and ``policy`` of the agent's config): who may submit, how large a job may
be, who may be preferred, what one user may keep, and what of that one user has.

Every refusal names the key of the config that says so. Root, the agent's own user and operators are bound by none.
"""

from __future__ import annotations

import asyncio
import os

from nodeagent.api import auth
from nodeagent.api.auth import Caller, in_group
from nodeagent.api.errors import ApiError
from nodeagent.api.shapes import Json
from nodeagent.api.usage import Usage
from nodeagent.api.users import UserDatabase
from nodeagent.api.view import AgentView
from nodeagent.model.job import TERMINAL, JobRecord, Quota
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
    most, nodes = limits.nodes_per_job, spec.nodes.max
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


def limits_json(limits: LimitsConfig) -> Json:
    """The values in force at one agent; None where there is no limit. Numbers are counts, bytes and (``requests``)
    requests a second."""
    return limits.model_dump(mode="json")


async def owner_json(view: AgentView, usage: Usage, names: UserDatabase, job: JobRecord) -> Json | None:
    """The limits of the job's owner, and what of them is used; None of an owner who has none."""
    owner, config = job.owner, view.config
    if owner in (0, os.geteuid()) or await _operator(view, names, job):
        return None
    own = [j for j in view.cluster().jobs.values() if j.owner == owner]
    # In a thread: at the limit these are megabytes of JSON, and the loop renews the lease.
    size = await asyncio.to_thread(lambda: sum(len(j.spec.to_json().encode()) for j in own))
    under_way, following = usage.held(owner)
    live = sum(j.phase not in TERMINAL for j in own)
    return {
        "owner": names.shown(owner),
        "node": view.node,
        "values": limits_json(config.limits),
        "used": {"jobs": live, "job_bytes": size, "concurrent": under_way, "followers": following},
    }


async def _operator(view: AgentView, names: UserDatabase, job: JobRecord) -> bool:
    """Whether the owner is an operator, as far as the user database says so in time."""
    who, group = job.spec.submitter, view.config.jobs.operators
    if group is None or who.uid != job.owner:
        return False
    try:
        return await names.ask(
            ("operator", who.user, who.gid, group), lambda: auth.in_group(who.user, who.gid, group), f"user {who.user}"
        )
    except ApiError:
        return False
