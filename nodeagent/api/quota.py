"""What users may have and ask for (``limits`` of the agent's config), and what of it one user has: for people.

Refuses nothing: ``policy.py``, ``usage.py`` and the store's step do. Must never make the loop wait.
"""

from __future__ import annotations

import asyncio
import os

from nodeagent.api import auth
from nodeagent.api.errors import ApiError
from nodeagent.api.shapes import Json
from nodeagent.api.usage import Usage
from nodeagent.api.users import UserDatabase
from nodeagent.api.view import AgentView
from nodeagent.model.job import TERMINAL, JobRecord
from nodeagent.spec.limitsconfig import LimitsConfig


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
