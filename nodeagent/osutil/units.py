"""Shims and the lease process as services of systemd, each in a unit of its own, made for it and gone with it: whatever
happens to the agent's unit does not touch it.

A shim is in the slice of all jobs; it has the job's user, groups and a login's rights, and nothing of the agent's
sandbox. Knows how such a unit is started; must never decide what runs in it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import subprocess
from collections.abc import Mapping, Sequence

SLICE = "nodeagent.slice"
START_LIMIT = 20.0
"""Seconds for systemd to start a unit."""
LIMITS = {
    "NOFILE": resource.RLIMIT_NOFILE, "MEMLOCK": resource.RLIMIT_MEMLOCK, "NPROC": resource.RLIMIT_NPROC,
    "CORE": resource.RLIMIT_CORE, "STACK": resource.RLIMIT_STACK, "AS": resource.RLIMIT_AS,
    "FSIZE": resource.RLIMIT_FSIZE,
}  # fmt: skip
"""What a unit's Limit... settings can be of what a job may ask for: the agent's own are the most that jobs may have."""
OWN = (
    "Type=exec", "CollectMode=inactive-or-failed", "TasksMax=infinity",
    "KillSignal=SIGKILL",  # nothing of a pod outlives its shim
    "OOMPolicy=continue",  # a worker that the kernel kills is the job's affair
    "UMask=0022",
)  # fmt: skip


KEPT = (
    "Type=exec", "CollectMode=inactive-or-failed", "OOMPolicy=continue", "OOMScoreAdjust=-900", "UMask=0077",
    # By systemd itself, whether there is an agent or not; an exit in order is one for good.
    "Restart=always", "RestartPreventExitStatus=0", "RestartSec=50ms", "StartLimitIntervalSec=0",
    # What the shims answer is their users' alone, and the store's socket may be its user's; and it has to see the same
    # id of the boot as the agent (``linux.boot_id``).
    "CapabilityBoundingSet=CAP_DAC_OVERRIDE CAP_SYS_PTRACE",
    "NoNewPrivileges=yes", "ProtectSystem=full", "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
    "RestrictNamespaces=yes", "RestrictRealtime=yes", "RestrictSUIDSGID=yes", "LockPersonality=yes",
    "SystemCallArchitectures=native", "SystemCallFilter=@system-service", "SystemCallErrorNumber=EPERM",
)  # fmt: skip
"""The lease process's."""


class UnitError(Exception):
    """The unit did not start; ``str()`` is what systemd said."""


def unit_name(folder: str) -> str:
    """Of the shim with this run folder; never used twice."""
    return f"nodeagent-pod-{folder}-{secrets.token_hex(4)}.service"


def start_command(
    unit: str, agent: str, job: str, user: str, environ: Mapping[str, str], command: Sequence[str]
) -> list[str]:
    """The command that has systemd run ``command``. ``agent`` is a unit."""
    settings = [*OWN, f"User={user}"]
    settings += [f"Limit{name}={_span(*resource.getrlimit(number))}" for name, number in LIMITS.items()]
    return _command(unit, agent, f"job {job}", settings, environ, command, f"--slice={SLICE}")


def lease_unit(agent: str) -> str:
    """Of the lease process beside this agent, a unit."""
    return f"nodeagent-lease{agent.removeprefix('nodeagent')}" if agent.startswith("nodeagent") else f"lease-of-{agent}"


def lease_command(agent: str, environ: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """The command that has systemd run the lease process, and keep it running."""
    return _command(lease_unit(agent), agent, "the node's lease", KEPT, environ, command)


def stop_command(unit: str) -> list[str]:
    """The command that has systemd end it and forget it."""
    return ["systemctl", "--quiet", "--no-ask-password", "stop", unit]


def _command(
    unit: str, agent: str, what: str, settings: Sequence[str], environ: Mapping[str, str], command: Sequence[str],
    *options: str,
) -> list[str]:  # fmt: skip
    """At shutdown ``agent`` ends first: it drains the node."""
    settings = [*settings, f"Before={agent}", f"Nice={os.getpriority(os.PRIO_PROCESS, 0)}"]
    return [
        "systemd-run", "--quiet", "--no-ask-password", f"--unit={unit}", f"--description=nodeagent: {what}", *options,
        *(f"--property={setting}" for setting in settings),
        *(f"--setenv={name}={value}" for name, value in environ.items()),
        "--", *(word.replace("$", "$$") for word in command),
    ]  # fmt: skip


def _span(soft: int, hard: int) -> str:
    return ":".join("infinity" if value == resource.RLIM_INFINITY else str(value) for value in (soft, hard))


async def start(command: Sequence[str]) -> None:
    """Run one of these commands; returns when systemd has done it. Raises UnitError.

    No child watcher of asyncio: those that wait in threads are lost when the agent's process is copied.
    """
    try:
        process = subprocess.Popen(  # noqa: ASYNC220 (it returns when the program has begun)
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
        )  # fmt: skip
    except OSError as error:
        raise UnitError(str(error)) from error
    assert process.stderr is not None
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    handle = os.pidfd_open(process.pid)
    loop.add_reader(handle, ended.set)
    try:
        async with asyncio.timeout(START_LIMIT):
            await ended.wait()
    except TimeoutError:
        raise UnitError(f"systemd did not start it within {START_LIMIT:g} s") from None
    finally:
        loop.remove_reader(handle)
        os.close(handle)
        if not ended.is_set():
            process.kill()  # its request may still be carried out: the mark finds what comes of it
        with process.stderr as complaints:
            code = process.wait()
            text = complaints.read(4000).decode(errors="replace").strip()
    if code:
        raise UnitError(text.splitlines()[0] if text else f"systemd-run ended with {code}")
