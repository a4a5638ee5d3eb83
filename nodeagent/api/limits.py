"""The site's rules about jobs (``limits`` of the config): who may submit, what a job may ask for, how much a user's
jobs may take.

Every refusal names the key of the config behind it. Root, the agent's own user and operators have no limits.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from nodeagent.agent.view import AgentView
from nodeagent.api import auth, requests
from nodeagent.api.auth import Caller, UserDatabase, in_group
from nodeagent.api.errors import ApiError, from_refused
from nodeagent.api.serializers import Json
from nodeagent.api.throttle import Throttle
from nodeagent.model.job import TERMINAL, Filled, JobRecord, Owned, Quota
from nodeagent.model.jobspec import JobSpec
from nodeagent.spec.sections import LimitsConfig
from nodeagent.store import client
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError
from nodeagent.store.recordroom import OF_USERS

RESTART_WINDOW = 3600.0
"""The shortest window in which restarts are counted, if the site limits them: a shorter window would be no limit."""
_UID = re.compile(r"\buid (\d{1,10})\b")
"""Of a user, in the store's sentence."""


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


def few_enough_nodes(who: Caller, spec: JobSpec, limits: LimitsConfig, node: str, nothing: str) -> None:
    """Raises ``ApiError`` where the job asks for more nodes than only operators may have. ``nothing``: what was not
    done."""
    most, nodes = limits.nodes_per_job, spec.nodes.max
    if most is not None and nodes > most and not who.operator:
        raise ApiError(
            "permission",
            f"job {spec.name!r} asks for up to {nodes} nodes; limits.nodes_per_job in the config of node {node} is "
            f"{most}",
            f"write a max of {most} nodes or fewer, or ask an operator; {nothing}",
        )


def within_policy(who: Caller, spec: JobSpec, limits: LimitsConfig, node: str) -> None:
    """Raises ``ApiError`` where the job asks for what only operators may have."""
    few_enough_nodes(who, spec, limits, node, "nothing was submitted")
    if who.operator:
        return
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
            f"jobs.operators in the config of node {node}), and {who.name} is not an operator",
            "leave out `priority:` or write 0 or less; nothing was submitted",
        )


def quota(who: Caller, limits: LimitsConfig) -> Quota | None:
    """The quota that the store enforces for the caller's jobs; None: no quota."""
    return None if who.operator else Quota(jobs=limits.jobs, bytes=limits.job_bytes)


def within_quota(who: Caller, quota: Quota, new: Sequence[tuple[JobSpec, int]]) -> None:
    """Raises ``ApiError`` where these jobs, each with the number of such jobs, are over the quota by themselves. The
    store says so too, but a thousand large jobs keep it, and this agent, busy for seconds until then."""
    count, size = sum(number for _, number in new), 0
    for spec, number in new:
        if count <= quota.jobs and size <= quota.bytes:
            size += spec_bytes(spec) * number
    if count > quota.jobs:
        raise ApiError(
            "limit",
            f"these are {count} jobs, more than the {quota.jobs} that limits.jobs allows {who.name} at a time",
            "submit fewer at once; nothing was submitted",
        )
    if size > quota.bytes:
        raise ApiError(
            "limit",
            f"{'this job' if count == 1 else 'these jobs'} would take {size} bytes or more, and limits.job_bytes "
            f"allows {who.name} {quota.bytes}",
            f"{'' if count == 1 else 'submit fewer at once, or '}put long texts into files that the nodes can read; "
            "nothing was submitted",
        )


async def no_room(refused: StoreRefusedError, names: UserDatabase) -> ApiError:
    """The store's refusal of what all jobs leave no room for, with the names of the users who have most."""
    await names.learn({int(uid) for uid in _UID.findall(str(refused))})

    def named(found: re.Match[str]) -> str:
        name = names.shown(int(found[1]))
        return found[0] if name == found[1] else name

    return from_refused(StoreRefusedError(refused.code, _UID.sub(named, str(refused))))


def room_of_users() -> Filled:
    """What all users together may fill."""
    return Filled(int(OF_USERS * client.MOST_JOBS), int(OF_USERS * client.MOST_OF_JOBS))


def limits_json(limits: LimitsConfig) -> Json:
    """The values in force at one agent; None if there is no limit. Numbers are counts, bytes and (``requests``)
    requests a second."""
    return limits.model_dump(mode="json")


def spec_bytes(spec: JobSpec) -> int:
    """What a spec takes in the store."""
    return len(spec.to_json().encode())


class JobSizes:
    """What the specs of jobs take in the store, each written once: at the limit they are megabytes. ``most``: jobs that
    are remembered."""

    def __init__(self, most: int, size: Callable[[JobSpec], int]) -> None:
        self._most, self._size = most, size
        self._sizes: dict[str, int] = {}
        """By uid, the newest asked for last. A job's spec never changes."""

    async def of(self, jobs: Sequence[JobRecord]) -> int:
        """Bytes of all of these together."""
        have = {job.uid: self._sizes[job.uid] for job in jobs if job.uid in self._sizes}
        if new := [job for job in jobs if job.uid not in have]:
            found = await requests.written(lambda: {job.uid: self._size(job.spec) for job in new})
            have |= found
            self._sizes |= found
            for uid in list(self._sizes)[: max(0, len(self._sizes) - self._most)]:
                del self._sizes[uid]
        return sum(have.values())


async def owner_json(
    view: AgentView, throttle: Throttle, sizes: JobSizes, names: UserDatabase, job: JobRecord
) -> Json | None:
    """The limits of the job's owner, and how much of them is used; None for an owner without limits."""
    owner, config = job.owner, view.config
    if await unlimited(view, names, job):
        return None
    own = (await owned(view, sizes, [owner]))[owner]
    under_way, following = throttle.under_way(owner)
    return {
        "owner": names.shown(owner),
        "node": view.node,
        "values": limits_json(config.limits),
        "used": {"jobs": own.jobs, "job_bytes": own.bytes, "concurrent": under_way, "followers": following},
    }


async def owned(view: AgentView, sizes: JobSizes, owners: Collection[int]) -> dict[int, Owned]:
    """What each of these owners has of his quota, as the store's step counts it when he submits. While the store is
    away, without what is in the history."""
    past: Mapping[int, int] = {}
    if view.health().store_away_since is None:
        with contextlib.suppress(StoreUnavailableError):
            past = await view.store.history_bytes(owners)
    jobs: dict[int, list[JobRecord]] = {owner: [] for owner in owners}
    for job in view.cluster().jobs.values():
        if job.owner in jobs:
            jobs[job.owner].append(job)
    return {
        owner: Owned(sum(job.phase not in TERMINAL for job in own), await sizes.of(own) + past.get(owner, 0))
        for owner, own in jobs.items()
    }


async def filled(view: AgentView, sizes: JobSizes) -> dict[int, Filled]:
    """What each owner's jobs in the view take, operators' too."""
    jobs: dict[int, list[JobRecord]] = {}
    for job in view.cluster().jobs.values():
        jobs.setdefault(job.owner, []).append(job)
    return {owner: Filled(len(own), await sizes.of(own)) for owner, own in jobs.items()}


async def unlimited(view: AgentView, names: UserDatabase, job: JobRecord) -> bool:
    """Returns whether the job's owner has no limits: root, the agent's own user, and operators."""
    return job.owner in (0, os.geteuid()) or await _operator(view, names, job)


async def _operator(view: AgentView, names: UserDatabase, job: JobRecord) -> bool:
    """Returns whether the owner is an operator, if the user database answers in time."""
    who, group = job.spec.submitter, view.config.jobs.operators
    if group is None or who.uid != job.owner:
        return False
    try:
        return await names.ask(
            ("operator", who.user, who.gid, group), lambda: auth.in_group(who.user, who.gid, group), f"user {who.user}"
        )
    except ApiError:
        return False
