"""The process that replaces systemd and the machines: it keeps a local cluster's Redis and agents running.

An agent that ends is restarted after 100 ms, without limit, unless its node has no power or the agent's exit code says
that a restart is useless; the systemd unit does the same. On request of the control socket, on SIGTERM, or at the end
of its owner, the supervisor ends everything and removes the cluster's folders. Must never speak to an agent or know of
jobs: it knows only processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nodeagent.local import power
from nodeagent.local.control import Reply
from nodeagent.local.layout import LocalError, LocalRefusedError, NotFoundError, make_folder
from nodeagent.local.privateredis import PrivateRedis, PrivateRedisError
from nodeagent.local.registry import LocalCluster, load, node_names, remove, remove_run, write_config
from nodeagent.osutil.linux import hold_folder
from nodeagent.osutil.stderr import lossy_stderr
from nodeagent.osutil.tether import tethered
from nodeagent.trust.key import KeyFileError, make

AGAIN = 1.0
"""Seconds until an agent for which there was no process, or no room on the disk, is started again."""
RESTART_DELAY = 0.1
"""Seconds; the unit's RestartSec."""
REDIS_STARTS = 5
"""Starts of Redis in a row that may fail before the cluster is given up."""
HOPELESS = 78
"""The agent's exit code for errors that a restart cannot repair; the unit's RestartPreventExitStatus."""
REQUEST_TIMEOUT = 5.0
"""Seconds for a client to write its request."""
UMASK = 0o077
"""Of all that runs here; the unit's UMask. Root's logs say what jobs of several users write and do."""
AGENT = (sys.executable, "-P", "-m", "nodeagent.agent.main", "run")
"""The agent's command, to which ``--config FILE`` is added."""


class _EndingError(Exception):
    """The cluster was asked to end: cancels all its tasks."""


@dataclass(slots=True)
class _Node:
    """One node: its power switch and its agent."""

    name: str
    gpus: tuple[str, ...] = ()
    on: bool = True
    switched: asyncio.Event = field(default_factory=asyncio.Event)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    """How often a process of its agent was started."""
    unstarted: int = 0
    """How often none could be started."""
    lacks: str = ""
    """Why none could be started the last time; empty once one is."""
    crashes: int = 0
    """How often its agent has ended with an error since its power was last switched on."""
    failed: bool = False
    """Its agent ended with ``HOPELESS``; reset when its power is switched."""
    away: float = 0.0
    """Seconds that the next start waits, after a requested restart."""
    last_end: str = ""
    """How its agent last ended by itself."""
    switching: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while its power is switched: a cut must be over before the power comes back."""


class Supervisor:
    """One cluster's processes, from the first to the last."""

    def __init__(
        self, cluster: LocalCluster, shares: Sequence[tuple[str, ...]], slots: int, agent: Sequence[str]
    ) -> None:
        self._cluster = cluster
        self._slots = slots
        self._agent = agent
        names = node_names(len(shares))
        self._nodes = {name: _Node(name, gpus) for name, gpus in zip(names, shares, strict=True)}
        self._redis = PrivateRedis(cluster.layout.redis, persist=True)
        self._ending = asyncio.Event()
        self._keep_logs = False
        self._keep_data = True
        """False only after a request to end; otherwise the log must stay and show why it ended."""

    async def run(self, owner: int | None) -> None:
        """Runs until a request to end. ``owner``: a file descriptor whose end of file ends the cluster."""
        loop = asyncio.get_running_loop()
        self._children = LocalChildren()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.set)
        if owner is not None:
            loop.add_reader(owner, self._watch_owner, owner)
        held = [hold_folder(folder) for folder in (self._cluster.run, self._cluster.data)]
        try:
            make(self._cluster.layout.key)
            await self._start_redis()
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._keep_redis())
                for node in self._nodes.values():
                    self._install(node)
                server = await asyncio.start_unix_server(self._accept, self._cluster.layout.control)
                self._cluster.layout.control.chmod(0o600)
                async with server:
                    await self._ending.wait()
                    raise _EndingError
        except* _EndingError:
            self._keep_data = self._keep_logs
        finally:
            self._clear_away()
            for folder in held:
                os.close(folder)

    def _watch_owner(self, owner: int) -> None:
        if not os.read(owner, 4096):
            asyncio.get_running_loop().remove_reader(owner)
            self._ending.set()

    def _clear_away(self) -> None:
        try:
            power.cut(self._cluster.uid)  # nodes first, so that no agent sees its store disappear
        finally:
            self._redis.stop()
            remove(self._cluster, keep_data=self._keep_data)

    # Redis and the agents

    async def _start_redis(self) -> None:
        self._redis.spawn()  # not in a thread: Redis dies with the thread that started it
        if (pid := self._redis.pid) is not None:
            self._children.own(pid)
        try:
            await asyncio.to_thread(self._redis.wait_ready)
        except PrivateRedisError:
            if pid is not None:
                self._children.reaped(pid)
            raise

    async def _keep_redis(self) -> None:
        """As systemd would: one that dies is started again, also if it dies as it starts, but not for ever."""
        failed = 0
        while True:
            if (pid := self._redis.pid) is not None:
                await self._children.ended(pid)
                self._redis.stop()
                self._children.reaped(pid)
                announce("redis ended; starting it again")
            await asyncio.sleep(RESTART_DELAY)
            try:
                await self._start_redis()
                failed = 0
            except (PrivateRedisError, OSError) as error:
                failed += 1
                if failed == REDIS_STARTS:
                    raise
                announce(f"redis did not start; starting it again: {error}")

    def _install(self, node: _Node) -> None:
        write_config(self._cluster, node.name, gpus=node.gpus, slots=self._slots)
        self._nodes[node.name] = node
        self._group.create_task(self._keep_agent(node))

    async def _keep_agent(self, node: _Node) -> None:
        while True:
            while not node.on or node.failed:
                node.switched.clear()
                await node.switched.wait()
            try:
                process = node.process = self._start_agent(node)
            except OSError as error:  # no process, no room on the disk: the other nodes go on
                node.unstarted += 1
                node.lacks = f"not started: {_words(error)}"
                announce(f"{node.name}: its agent is not started; trying again: {error}")
                await asyncio.sleep(AGAIN)
                continue
            await self._children.ended(process.pid)
            code = process.wait()
            node.process = None
            self._children.reaped(process.pid)
            if node.on:
                node.last_end = f"exit {code}" if code >= 0 else f"signal {-code}"
                node.crashes += code != 0
                node.failed = code == HOPELESS
                announce(f"{node.name}: agent {process.pid} ended ({node.last_end})")
                away, node.away = node.away, 0.0
                node.switched.clear()
                with contextlib.suppress(TimeoutError):  # a cut or `start` ends the wait
                    await asyncio.wait_for(node.switched.wait(), max(away, RESTART_DELAY))

    def _start_agent(self, node: _Node) -> subprocess.Popen[bytes]:
        layout = self._cluster.layout.node(node.name)
        for folder in (layout.run, layout.state, layout.logs):
            make_folder(folder)
        environ = power.unmarked(os.environ) | {power.MARK: power.mark(self._cluster.uid, node.name)}
        environ.pop("NOTIFY_SOCKET", None)
        process = self._children.start([*self._agent, "--config", str(layout.config)], environ, layout.agent_log)
        node.starts += 1
        node.lacks = ""
        announce(f"{node.name}: agent {process.pid} started")
        return process

    # Requests of the control socket

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._group.create_task(self._converse(reader, writer))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                request = json.loads(await asyncio.wait_for(reader.readline(), REQUEST_TIMEOUT))
            except (OSError, ValueError, RecursionError):  # nothing was asked that could be answered
                return
            if not isinstance(request, dict):
                return
            try:
                reply = await self._answer(request) | {"ok": True}
            except (LocalError, OSError, ValueError) as error:
                code = error.code if isinstance(error, LocalError) else LocalError.code
                text = f"cannot {request.get('do')}: {_words(error)}" if isinstance(error, OSError) else str(error)
                reply = {"ok": False, "error": text, "code": code}
            with contextlib.suppress(OSError):  # who asked is gone
                writer.write(json.dumps(reply).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), REQUEST_TIMEOUT)
            if request.get("do") == "down":
                self._ending.set()

    async def _answer(self, request: dict[str, object]) -> Reply:
        match request.get("do"):
            case "status":
                return self._status()
            case "add":
                node = _Node(node_names(1, first=len(self._nodes) + 1)[0])
                self._install(node)
                return {"node": node.name}
            case "kill":
                return await self._cut(self._find(request))
            case "start":
                return await self._power_on(self._find(request))
            case "restart":
                return self._restart(self._find(request), float(str(request.get("away", 0))))
            case "down":
                self._keep_logs = bool(request.get("keep_logs"))
                return {"pid": os.getpid()}
            case other:
                raise LocalError(f"the supervisor does not know how to {other!r}")

    def _find(self, request: dict[str, object]) -> _Node:
        node = self._nodes.get(str(request.get("node")))
        if node is None:
            raise NotFoundError(f"no node {request.get('node')!r} here; there is {', '.join(self._nodes)}")
        return node

    async def _cut(self, node: _Node) -> Reply:
        """A power cut: the node is marked as off first, so that nothing is restarted; then all its processes are killed
        at once, and its run folder is removed, as /run would be, and its pods' cgroups."""
        async with node.switching:
            was_on, node.on, node.failed = node.on, False, False
            killed = await asyncio.to_thread(power.cut, self._cluster.uid, node.name)
            run = self._cluster.layout.node(node.name).run
            await asyncio.to_thread(remove_run, run)
        announce(f"{node.name}: power cut, {killed} processes killed")
        return {"node": node.name, "changed": was_on, "killed": killed}

    async def _power_on(self, node: _Node) -> Reply:
        async with node.switching:
            was_on = node.on and not node.failed
            node.on, node.failed = True, False
            if not was_on:
                node.crashes, node.last_end, node.lacks = 0, "", ""
            node.switched.set()
        return {"node": node.name, "changed": not was_on}

    def _restart(self, node: _Node, away: float) -> Reply:
        """Does what `systemctl restart` does: asks the agent to end, and starts it again after this many seconds."""
        if node.process is None:
            if node.on and not node.failed:
                why = f"it is started again by itself ({node.lacks or node.last_end or 'for the first time'})"
                raise LocalRefusedError(f"{node.name} has no agent to restart: {why}; see: nodeagentctl local status")
            why = f"it ended with {node.last_end}, and needs a correction" if node.failed else "its power is off"
            step = f"nodeagentctl local start {node.name}"
            raise LocalRefusedError(f"{node.name} has no agent to restart: {why}; start it: {step}")
        node.away = away
        node.process.terminate()
        return {"node": node.name, "agent_pid": node.process.pid}

    def _status(self) -> Reply:
        return {
            "name": self._cluster.name,
            "pid": os.getpid(),
            "redis": {"url": self._redis.url, "pid": self._redis.pid},
            "data": str(self._cluster.data),
            "nodes": [
                {
                    "name": node.name,
                    "power": "on" if node.on else "off",
                    "agent_pid": node.process.pid if node.process else None,
                    "starts": node.starts,
                    "unstarted": node.unstarted,
                    "crashes": node.crashes,
                    "failed": node.failed,
                    "last_end": node.lacks or node.last_end,
                    "gpus": list(node.gpus),
                    "socket": str(self._cluster.layout.node(node.name).api_socket),
                    "log": str(self._cluster.layout.node(node.name).agent_log),
                }
                for node in self._nodes.values()
            ],
        }


def _words(error: OSError) -> str:
    """What the system says, and of which file."""
    return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)


def announce(text: str) -> None:
    """A line in the supervisor's log."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="nodeagent.local.supervisor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="the cluster's run folder")
    parser.add_argument("--shares", type=json.loads, required=True, help="JSON: one list of GPU UUIDs per node")
    parser.add_argument("--slots", type=int, required=True, help="workers without a GPU per node")
    parser.add_argument("--agent", type=json.loads, default=AGENT, help="JSON: the agent's command")
    parser.add_argument("--until-eof", action="store_true", help="end at the end of standard input")
    arguments = parser.parse_args()
    sys.stderr = lossy_stderr()
    os.umask(UMASK)
    try:
        cluster = load(arguments.run)
    except LocalError as wrong:
        sys.exit(str(wrong))
    if cluster is None:
        sys.exit(f"{arguments.run} holds no local cluster")

    async def supervise() -> None:
        shares = [tuple(share) for share in arguments.shares]
        supervisor = Supervisor(cluster, shares, arguments.slots, arguments.agent)
        await supervisor.run(sys.stdin.fileno() if arguments.until_eof else None)

    try:
        asyncio.run(supervise())
    except* (KeyFileError, PrivateRedisError, LocalError) as group:
        for error in group.exceptions:
            announce(str(error))
        sys.exit(1)


PR_SET_CHILD_SUBREAPER = 36


class LocalChildren:
    """All children of this process, in the main thread of an event loop.

    This process adopts the orphans among its descendants (shims outlive their agent) and reaps them: in a container
    there may be no other process that does.
    """

    def __init__(self) -> None:
        self._own: set[int] = set()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def start(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command that dies with this process, in a session of its own, like a service; its output is appended
        to ``log``."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                tethered(command), env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self.own(process.pid)
        return process

    def own(self, pid: int) -> None:
        """The code that started this child will reap it."""
        self._own.add(pid)

    async def ended(self, pid: int) -> None:
        """Return when this own child has ended; the caller reaps it."""
        loop = asyncio.get_running_loop()
        handle = os.pidfd_open(pid)
        try:
            over = asyncio.Event()
            loop.add_reader(handle, over.set)
            try:
                await over.wait()
            finally:
                loop.remove_reader(handle)
        finally:
            os.close(handle)

    def reaped(self, pid: int) -> None:
        """Call after reaping this own child: forgets it, and looks for orphans that had to wait behind it."""
        self._own.discard(pid)
        self._reap()

    def _reap(self) -> None:
        while self._orphan_over():
            pass

    def _orphan_over(self) -> bool:
        """Reap one orphan. An own child that has ended hides those behind it until ``reaped``."""
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if found is None or found.si_pid in self._own:
            return False
        os.waitpid(found.si_pid, 0)
        return True


if __name__ == "__main__":
    main()
