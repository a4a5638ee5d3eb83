"""Shims and the lease process as services of systemd. Each has a transient unit of its own, so changes of the agent's
unit do not affect it.

A shim is in the slice of all jobs. It has the job's user, groups and the rights of a login, and no part of the agent's
sandbox. This module knows how such a unit is started; it must never decide what runs in it.
"""

from __future__ import annotations

import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nodeagent.osutil.commands import DIES, ends

SLICE = "nodeagent.slice"
START_LIMIT = 20.0
"""Seconds for systemd to start a unit."""
LIMITS = {
    "NOFILE": resource.RLIMIT_NOFILE, "MEMLOCK": resource.RLIMIT_MEMLOCK, "NPROC": resource.RLIMIT_NPROC,
    "CORE": resource.RLIMIT_CORE, "STACK": resource.RLIMIT_STACK, "AS": resource.RLIMIT_AS,
    "FSIZE": resource.RLIMIT_FSIZE,
}  # fmt: skip
"""A unit's Limit... settings for the limits that a job may ask for: the agent's own limits are the most that jobs may
have."""
OWN = (
    "Type=exec", "CollectMode=inactive-or-failed", "TasksMax=infinity",
    "KillSignal=SIGKILL",  # nothing of a pod outlives its shim
    "OOMPolicy=continue",  # a worker that the kernel kills does not stop the unit
    "UMask=0022",
)  # fmt: skip


KEPT = (
    "Type=exec", "CollectMode=inactive-or-failed", "OOMPolicy=continue", "OOMScoreAdjust=-900", "UMask=0077",
    # systemd restarts it, even without an agent; after an exit with success it stays ended.
    "Restart=always", "RestartPreventExitStatus=0", "RestartSec=50ms", "StartLimitIntervalSec=0",
    # Only the shims' users may read the shims' answers, and perhaps only its user the store's socket. The lease
    # process must also see the same boot id as the agent (``linux.boot_id``).
    "CapabilityBoundingSet=CAP_DAC_OVERRIDE CAP_SYS_PTRACE",
    "NoNewPrivileges=yes", "ProtectSystem=full", "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
    "RestrictNamespaces=yes", "RestrictRealtime=yes", "RestrictSUIDSGID=yes", "LockPersonality=yes",
    "SystemCallArchitectures=native", "SystemCallFilter=@system-service", "SystemCallErrorNumber=EPERM",
)  # fmt: skip
"""Settings of the lease process's unit."""


DETACHES = ("Type=oneshot", "CollectMode=inactive-or-failed", "TimeoutStartSec=10s")
"""Settings of a unit that detaches mounts."""
REMOVES = (
    "import sys, pathlib; from nodeagent.osutil.untrusted import remove_tree; "
    "remove_tree(pathlib.Path(sys.argv[1]), sys.argv[2])"
)
"""What such a unit runs to remove a folder: in this one, the entry of this name."""
_SOURCE = Path(__file__).parents[2]


class UnitError(Exception):
    """The unit did not start; ``str()`` is systemd's message."""


def unit_name(folder: str) -> str:
    """Name for the unit of the shim with this run folder; never used twice."""
    return f"nodeagent-pod-{folder}-{secrets.token_hex(4)}.service"


def start_command(
    unit: str, agent: str, job: str, user: str, environ: Mapping[str, str], command: Sequence[str]
) -> list[str]:
    """The command that makes systemd run ``command``. ``agent`` is a unit."""
    settings = [*OWN, f"User={user}"]
    settings += [f"Limit{name}={_span(*resource.getrlimit(number))}" for name, number in LIMITS.items()]
    return _command(unit, agent, f"job {job}", settings, environ, command, f"--slice={SLICE}")


def lease_unit(agent: str) -> str:
    """Name of the unit of the lease process beside this agent, which is a unit."""
    return f"nodeagent-lease{agent.removeprefix('nodeagent')}" if agent.startswith("nodeagent") else f"lease-of-{agent}"


def lease_command(agent: str, environ: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """The command that makes systemd run the lease process, and restart it."""
    return _command(lease_unit(agent), agent, "the node's lease", KEPT, environ, command)


def detach_command(agent: str, folder: Path) -> list[str]:
    """The command that makes systemd detach whatever is mounted on this folder, which nobody but root can replace. The
    agent's sandbox lets it do so neither here nor for the machine."""
    unit = f"nodeagent-detach-{secrets.token_hex(4)}.service"
    script = ["/bin/sh", "-c", 'while umount -l -i -c "$0" 2>/dev/null; do :; done', str(folder)]
    return _command(unit, agent, f"mounts on {folder}", DETACHES, {}, script)


def remove_command(agent: str, folder: Path) -> list[str]:
    """The command that makes systemd remove this folder, which nobody but root can replace, and detach whatever is
    mounted in it: by its descriptors, since a path in it leads where its user wants."""
    unit = f"nodeagent-detach-{secrets.token_hex(4)}.service"
    script = [sys.executable, "-sSP", "-c", REMOVES, str(folder.parent), folder.name]
    return _command(unit, agent, f"removes {folder}", DETACHES, {"PYTHONPATH": str(_SOURCE)}, script)


def stop_command(unit: str) -> list[str]:
    """The command that makes systemd stop the unit and forget it."""
    return ["systemctl", "--quiet", "--no-ask-password", "stop", unit]


def _command(
    unit: str, agent: str, what: str, settings: Sequence[str], environ: Mapping[str, str], command: Sequence[str],
    *options: str,
) -> list[str]:  # fmt: skip
    """At shutdown ``agent`` stops first, because it drains the node."""
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

    Uses no child watcher of asyncio: watchers that wait in threads are lost when the agent's process is copied.
    """
    try:
        process = subprocess.Popen(  # noqa: ASYNC220 (it returns when the program has begun)
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
        )  # fmt: skip
    except OSError as error:
        raise UnitError(str(error)) from error
    assert process.stderr is not None
    with process.stderr as complaints:
        try:
            if not await ends(process, START_LIMIT):
                raise UnitError(f"systemd did not start it within {START_LIMIT:g} s")
        finally:
            if process.returncode is None:
                process.kill()  # systemd may still run its request: the mark finds the processes
                await ends(process, DIES)
        text = complaints.read(4000).decode(errors="replace").strip()
    if process.returncode:
        raise UnitError(text.splitlines()[0] if text else f"systemd-run ended with {process.returncode}")
