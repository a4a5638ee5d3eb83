"""What systemd says about this agent: which unit it is, and why it is asked to end.

Asks the ``systemctl`` program, off every path that hurries. Must never ask systemd to do anything.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import structlog

BOOTED = Path("/run/systemd/system")
"""Exists where systemd is the init system."""
ASK_LIMIT = 3.0
"""Seconds for an answer."""


def own_unit(environ: Mapping[str, str], control_groups: str, uid: int, pid: int, booted: bool) -> str:
    """The system's service whose main process this is; empty if systemd did not start it as one. ``control_groups`` is
    /proc/self/cgroup: the unified hierarchy's line, or that of the old one that systemd keeps."""
    if uid != 0 or not booted or "NOTIFY_SOCKET" not in environ:
        return ""
    if environ.get("SYSTEMD_EXEC_PID", str(pid)) != str(pid):  # systemd 248 and later: it was meant for a parent
        return ""
    for line in control_groups.splitlines():
        number, controllers, path = line.split(":", 2)
        unit = path.rpartition("/")[2]
        if (number == "0" or controllers == "name=systemd") and unit.endswith(".service"):
            return unit
    return ""


def this_unit() -> str:
    """``own_unit`` of this process."""
    return own_unit(os.environ, Path("/proc/self/cgroup").read_text(), os.geteuid(), os.getpid(), BOOTED.exists())


async def comes_back(unit: str) -> bool:
    """Whether somebody starts this agent again after the SIGTERM that it has just got. Where nobody knows, yes: if
    nobody does, the lease process ends what runs here in its time."""
    if not unit:
        return True
    log = structlog.get_logger("systemd").bind(unit=unit)
    try:
        process = await asyncio.create_subprocess_exec(
            "systemctl", "list-jobs", "--plain", "--no-legend", "--no-pager", "--full",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        log.error("cannot ask why this is the end: taken for a restart", why=str(error))
        return True
    try:
        async with asyncio.timeout(ASK_LIMIT):
            jobs, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        log.error("systemd does not say why this is the end: taken for a restart", waited=ASK_LIMIT)
        return True
    job = job_of(unit, jobs.decode())
    log.info("asked to end", job=job or "none")
    return job != "stop"


def job_of(unit: str, jobs: str) -> str:
    """The type of the job that systemd does with the unit now (``restart``, ``stop``), from ``systemctl list-jobs``.
    A shutdown is a stop. None where the signal came from elsewhere."""
    for line in jobs.splitlines():
        match line.split():
            case [_, name, kind, _] if name == unit:
                return kind
    return ""
