"""Who asks, and what they may change. On the unix socket the kernel says who (SO_PEERCRED), over https what the
request was let in with (remote.py); anybody who was let in may read.

Owns every permission of the API. Must never trust a name or an id that came in a request's body.
"""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from nodeagent.api.errors import ApiError
from nodeagent.api.users import DATABASE, UserDatabase, name_of
from nodeagent.model.job import JobRecord
from nodeagent.spec.agentconfig import JobsConfig


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    uid: int
    """``NOBODY`` where it is no user of this machine."""
    gid: int
    name: str
    """User name, or the uid as text where it has none; of a token that acts as no user what it is called."""
    operator: bool
    """Root, the agent's own user, or a member of the operators' group."""
    trusted: bool
    """Root or the agent's own user, on the unix socket: may submit for others."""
    reads_only: bool = False
    """May change nothing at all."""
    remote: bool = False
    """Came over https: the name that a job was written under elsewhere means nothing here."""


NOBODY = -1
"""The uid of a caller who is no user; no job's owner has it."""
Names = Callable[[int], str]
"""What a user is called, by uid."""
USERS = web.AppKey("nodeagent.users", UserDatabase)
"""Where an application keeps its database of users."""
CALLER = web.RequestKey("nodeagent.caller", Caller)
"""Where ``remote.py`` leaves the caller with the request."""


def user_id(name: str) -> int | None:
    """The user's number, or None where this node does not know the name. May block on the user database."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def in_group(name: str, gid: int, group: str) -> bool:
    """Whether the user, of this primary group, is a member. May block on the user database."""
    try:
        wanted = grp.getgrnam(group).gr_gid
        return wanted in os.getgrouplist(name, gid)
    except KeyError:
        return False


def identify(uid: int, gid: int, jobs: JobsConfig, agent_uid: int) -> Caller:
    """The caller behind a uid. May block on the user database."""
    trusted = uid in (0, agent_uid)
    name = name_of(uid)
    operator = trusted or (jobs.operators is not None and in_group(name, gid, jobs.operators))
    return Caller(uid=uid, gid=gid, name=name, operator=operator, trusted=trusted)


async def caller(request: web.Request, jobs: JobsConfig) -> Caller:
    """Who sent this request. Raises ``ApiError`` when nobody says or the user database is stuck."""
    known: Caller | None = request.get(CALLER)
    if known is not None:
        return known
    uid, gid = peer(request)
    return await database(request).ask(
        (uid, gid, jobs.operators), lambda: identify(uid, gid, jobs, os.geteuid()), f"uid {uid}"
    )


def database(request: web.Request) -> UserDatabase:
    """Of the application that serves the request."""
    return request.app.get(USERS, DATABASE)


def peer(request: web.Request) -> tuple[int, int]:
    """The uid and gid at the other end of the unix socket, by the kernel. Raises ``ApiError`` on any other socket."""
    return peer_of(request.transport)


def peer_of(transport: asyncio.BaseTransport | None) -> tuple[int, int]:
    """As ``peer``, of a connection."""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        raise ApiError("permission", "nobody says who asks", "ask on the unix socket, or over https with a token")
    size = struct.calcsize("3i")
    _pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid, gid


def may_change_job(who: Caller, job: JobRecord, names: Names = DATABASE.shown) -> None:
    """Raises ``ApiError`` unless the caller owns the job or is an operator. ``names``: users by uid."""
    if who.uid != job.owner and not who.operator:
        owner = names(job.owner)
        raise ApiError(
            "permission",
            f"job {job.name!r} belongs to {owner}; {who.name} may read it, not change it",
            f"ask {owner} or an operator; nothing was changed",
        )


def may_see(who: Caller, job: JobRecord) -> bool:
    """Whether what the job was given (its ``env``) and what its workers wrote is for the caller's eyes."""
    runs_as = who.uid != NOBODY and who.name == job.spec.user
    return who.uid == job.owner or runs_as or who.operator


def may_read_logs(who: Caller, job: JobRecord, names: Names = DATABASE.shown) -> None:
    """As ``may_change_job``."""
    if not may_see(who, job):
        owner = names(job.owner)
        raise ApiError(
            "permission",
            f"what job {job.name!r} wrote is for {owner} and operators; {who.name} may see its state",
            f"nodeagentctl describe {job.name}; or ask {owner}",
        )


def may_change_nodes(who: Caller, node: str) -> None:
    """Raises ``ApiError`` unless the caller is an operator."""
    if not who.operator:
        raise ApiError(
            "permission",
            f"{who.name} may not change node {node}: only root and operators may",
            "ask an operator (the group of jobs.operators in the agent's config); nothing was changed",
        )


def may_submit(who: Caller, user: str, jobs: JobsConfig) -> None:
    """Raises ``ApiError`` if the caller may not run jobs as ``user``. May block on the user database."""
    if who.uid == NOBODY:
        raise ApiError(
            "permission",
            f"{who.name} acts as no user, so no job can be its own",
            "use a token that has `user:` in the agent's tokens file; nothing was submitted",
        )
    if user not in (who.name, str(who.uid)) and not who.trusted:
        raise ApiError(
            "permission",
            f"{who.name} may not run a job as {user!r}",
            f"leave out `user:` or write `user: {who.name}`; nothing was submitted",
        )
    if (user_id(user) == 0 or user == "0") and not jobs.allow_root:
        raise ApiError(
            "permission",
            "jobs do not run as root here (jobs.allow_root is false in this node's config)",
            "submit as an ordinary user, or write `user: NAME` in the job file; nothing was submitted",
        )
