"""How an agent ends in order: what systemd says about it (which unit it is, why it is asked to end), what the agent
tells systemd, and what it does then. It leaves for a moment, while the lease process looks after the node's lease, or
for longer, and then drains the node.

Asks the ``systemctl`` program, off every path that hurries. Must never ask systemd to do anything.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from nodeagent.model.node import Cordon
from nodeagent.store.base import StoreRefusedError, StoreUnavailableError

if TYPE_CHECKING:
    from nodeagent.agent.loop import Agent
    from nodeagent.osutil.clock import Clock


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


class Notifier:
    """Sends to NOTIFY_SOCKET (a path, or abstract with a leading @)."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        usec = environ.get("WATCHDOG_USEC", "")
        self.watchdog = int(usec) / 1e6 if usec.isdigit() else None
        """Seconds between two pings that systemd allows at most; None without a watchdog."""
        self._status = ""

    def ready(self) -> None:
        self._send(f"READY=1\nMAINPID={os.getpid()}")

    def alive(self) -> None:
        """Feed the watchdog: call only after real progress of the loop."""
        if self.watchdog is not None:
            self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``; sent only when it changed."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def stopping(self, patience: float | None = None) -> None:
        """``patience``: seconds that this may take, whatever the unit says."""
        self._send("STOPPING=1" + (f"\nEXTEND_TIMEOUT_USEC={round(patience * 1e6)}" if patience is not None else ""))

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
            try:
                out.sendto(message.encode(), address)
            except OSError:  # systemd went away or the socket is full: it will ask again by itself
                return


BY = "systemctl stop"
"""Who drained the node, in the store: no user can be called so."""


async def restart(agent: Agent, clock: Clock) -> None:
    """Returns when this agent may end and be back soon. Where nobody counts on it, its lease was given back."""
    log = structlog.get_logger("goodbye").bind(node=agent.node)
    why, limit = agent.needed_by(), agent.config.without_agent
    if not why:
        await agent.leave()
        return
    began = clock.now()
    while not await agent.reports_restart():  # what this agent alone knows, a store that comes back may have lost
        if clock.now() - began > limit:
            log.warning("the store is still away: this cannot be published", waited=limit)
            break
        await asyncio.sleep(agent.config.timing.heartbeat / 2)
    log.info("ends, and is to be back soon", because=why, at_most=limit)


async def drain(agent: Agent, clock: Clock) -> None:
    """Returns when nobody counts on this node any more; at the latest after the config's ``drain``. The agent runs on
    meanwhile: it is the caller's to have it leave."""
    log = structlog.get_logger("goodbye").bind(node=agent.node)
    why, limit = agent.needed_by(), agent.config.drain
    if not why:
        return
    began, refused = clock.now(), ""
    log.info("drains before the end", because=why, at_most=limit)
    while agent.needed_by():
        me = agent.me()
        if me is None or me.cordon is None or not me.cordon.drain:
            mark = Cordon(reason="its agent was asked to stop", by=BY, at=clock.wall())
            if me is not None and me.cordon is not None:  # a person's words stay
                mark = me.cordon
            mark = mark.model_copy(update={"drain": True, "for_stop": True})
            try:
                await agent.store.cordon(agent.node, mark, secrets.token_hex(8))
                await agent.refresh()
            except (StoreUnavailableError, StoreRefusedError) as error:
                if str(error) != refused:
                    refused = str(error)
                    log.warning("not drained yet", why=refused)
        if clock.now() - began > limit:
            log.warning("still not drained: stops the workers and leaves", because=agent.needed_by(), waited=limit)
            return
        await asyncio.sleep(agent.config.timing.heartbeat / 2)
    log.info("drained", took=round(clock.now() - began, 3))


async def come_back(agent: Agent) -> None:
    """Take new work again, if only the stop kept it away; a person's cordon stays, without the drain of the stop."""
    await agent.joined.wait()
    refused = ""
    while True:
        me = agent.me()
        if me is not None and (me.cordon is None or not me.cordon.for_stop):
            return
        try:
            if me is not None and me.cordon is not None:
                before = me.cordon.model_copy(update={"drain": False, "for_stop": False})
                await agent.store.cordon(agent.node, None if before.by == BY else before, secrets.token_hex(8))
            await agent.refresh()
        except (StoreUnavailableError, StoreRefusedError) as error:
            if me is not None and str(error) != refused:
                refused = str(error)
                structlog.get_logger("goodbye").warning("still marked as drained", node=agent.node, why=refused)
        await asyncio.sleep(agent.config.timing.heartbeat / 2)
