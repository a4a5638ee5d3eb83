"""What the tests of real shims share: a host in its own folders, waits with a bound, and a look for leftovers."""

from __future__ import annotations

import asyncio
import os
import pwd
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from nodeagent.lease.grants import ANSWERS, Grant, grant_keys, grants_folder, write_grant
from nodeagent.lease.main import read_obeyed
from nodeagent.model.jobspec import Hang, Hooks, JobSpec, Nodes, Role, Submitter
from nodeagent.model.pod import WorkerState
from nodeagent.model.world import Token
from nodeagent.osutil.linux import boottime, marked, pids, stat_fields
from nodeagent.pods.base import PodStatus, StartOrder
from nodeagent.pods.folder import PodRecords, folder_name, log_folder
from nodeagent.pods.host import ShimHost, ShimStart
from nodeagent.pods.login import find_login
from nodeagent.spec.agentconfig import DirsConfig, JobsConfig, LogsConfig
from tests.bounds import Bound
from tests.processes import command_line

UID = "0123456789abcdef0123456789abcdef"
ME = pwd.getpwuid(os.geteuid()).pw_name
LOOK = 1.0
"""Seconds between two looks at a bound while no status changes."""
LAST_WORD = Hooks(post_stop=("echo", "over"))
"""A shim has one thread that writes all logs, so this comes after what the workers printed."""


def make_spec(
    command: tuple[str, ...],
    working_dir: Path,
    *,
    env: Mapping[str, str] | None = None,
    preload: tuple[str, ...] = (),
    guessed: tuple[str, ...] = (),
    fork_server: bool = True,
    user: str = ME,
    hooks: Hooks | None = None,
    limits: Mapping[str, int | str] | None = None,
    checkpoint_dir: str | None = None,
    env_file: str | None = None,
    environ: Mapping[str, str] | None = None,
    hang: Hang | None = None,
    workers: int | Literal["gpu"] = "gpu",
) -> JobSpec:
    """A job of this machine's own user."""
    recorded = {"PATH": os.environ["PATH"]} if environ is None else dict(environ)
    return JobSpec.model_validate(
        {
            "name": "train",
            "roles": (Role(command=command, nodes=Nodes(min=1, max=1, target=1), workers_per_node=workers),),
            "working_dir": str(working_dir),
            "user": user,
            "env": dict(env or {}),
            "preload": preload,
            "guessed": guessed,
            "fork_server": fork_server,
            "hooks": hooks or Hooks(),
            "limits": dict(limits or {}),
            "checkpoint_dir": checkpoint_dir,
            "env_file": env_file,
            "hang": hang,
            "submitter": Submitter(user=user, uid=os.getuid(), gid=os.getgid(), host="h", cwd="/", environ=recorded),
        }
    )


def pid_of(worker: WorkerState) -> int:
    """Its pid, of a worker that must have one."""
    assert worker.pid is not None
    return worker.pid


def token(number: int) -> Token:
    return Token(number=number, id=f"id{number}")


def shim_with(folder: Path, change: str) -> str:
    """An "interpreter" whose shims begin with this change."""
    (folder / "changed.py").write_text(
        "import sys, time\nsys.argv = ['shim', *sys.argv[4:]]\nfrom nodeagent.shim import exits, fence, gang, "
        "grace, main, output, prepare, snapshots\nfrom nodeagent.shim.forkserver import client\n"
        f"{change}\nmain.main()\n"
    )
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {folder / "changed.py"} "$@"\n')
    program.chmod(0o755)
    return str(program)


class Bench:
    """A host with its folders."""

    def __init__(self, root: Path, python: str = sys.executable) -> None:
        self.root, self.python = root, python
        self.marks: set[str] = set()
        self.owners = {os.geteuid()}
        self.granted_until = 0.0
        """What the pods were granted last (CLOCK_BOOTTIME)."""
        self.stop_before = 0.0
        self.host = self.new_host()

    def new_host(self, **changes: Any) -> ShimHost:
        """Its folders may have longer names than a config takes."""
        folders: dict[str, Any] = {name: self.root / name for name in ("run", "state", "logs")}
        settings: dict[str, Any] = {
            "node": "n7",
            "dirs": DirsConfig.model_construct(**folders),
            "jobs": JobsConfig(allow_root=True, logs=LogsConfig(max_bytes=1 << 20, keep=2)),
            "address": "127.0.0.1",
            "ports": (23100, 23999),
            "how": ShimStart(self.python),
            "look": find_login,
            "granted": self._write_grants,
        }
        return ShimHost(**(settings | changes))

    @property
    def logs(self) -> Path:
        return log_folder(self.root / "logs", "train", UID)

    def state(self) -> PodStatus:
        self.note_marks()
        return self.host.status()[UID]

    def note_marks(self) -> None:
        for record in PodRecords(self.root / "run").all().values():
            self.marks.add(record.mark)
            self.owners.add(record.owner)

    @property
    def grants(self) -> Path:
        return grants_folder(self.root / "run")

    def grant(self, seconds: float = 60.0, stop_before: float = 0.0) -> None:
        """In the place of the lease process. The pods that are made later have the same time."""
        self.granted_until, self.stop_before = boottime() + seconds, stop_before
        self._write_grants()

    def _write_grants(self) -> None:
        for key in grant_keys(self.grants):
            write_grant(self.grants, key, Grant(self.granted_until, self.stop_before))

    def stop_in_order(self) -> float:
        """The workers that run are to be stopped; when that was said."""
        self.grant(stop_before=boottime())
        return self.stop_before

    def obeyed(self) -> float:
        return read_obeyed(self.grants, folder_name(UID))

    @asynccontextmanager
    async def renewing(self, seconds: float = 2.0) -> AsyncIterator[None]:
        """So much time, granted anew again and again, which ends that long after this block."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(seconds / 20)
                self.grant(seconds)

        self.grant(seconds)
        task = asyncio.create_task(renew())
        try:
            yield
        finally:
            task.cancel()

    async def until(self, wanted: Callable[[PodStatus], object], bound: float = 30.0) -> PodStatus:
        """Wait for a status."""
        limit = Bound(bound)
        while True:
            self.host.changed.clear()
            status = self.host.status().get(UID)
            self.note_marks()
            if status is not None and wanted(status):
                return status
            assert not limit.over, f"not reached: {status}"
            with suppress(TimeoutError):
                await asyncio.wait_for(self.host.changed.wait(), LOOK)

    async def ready(self, spec: JobSpec, bound: float = 30.0) -> PodStatus:
        if self.granted_until < boottime():
            self.grant()
        self.host.prepare(UID, spec)
        return await self.until(lambda s: s.phase in ("ready", "unfit") and s.shim_pid, bound)

    def order(self, number: int, environments: tuple[dict[str, str], ...] = ({},), late: float = 30.0) -> StartOrder:
        return StartOrder(
            token=token(number),
            environments=environments,
            ranks=tuple(range(len(environments))),
            not_after=boottime() + late,
        )

    async def run(
        self, number: int = 1, environments: tuple[dict[str, str], ...] = ({},), bound: float = 30.0
    ) -> PodStatus:
        """Start a generation and wait for its end."""
        self.host.start(UID, self.order(number, environments))
        return await self.until(lambda s: s.generation == token(number) and s.phase == "exited", bound)

    async def running(
        self, number: int = 1, environments: tuple[dict[str, str], ...] = ({},), bound: float = 30.0
    ) -> PodStatus:
        self.host.start(UID, self.order(number, environments))
        return await self.until(lambda s: s.generation == token(number) and s.phase == "running", bound)

    async def run_another(self, number: int) -> None:
        """A later generation starts, and can be stopped. Its workers may have failed by then: they find nothing set."""
        self.host.start(UID, self.order(number))
        await self.until(lambda s: s.generation == token(number) and s.workers)
        self.host.stop(UID, None)
        await self.until(lambda s: s.generation == token(number) and s.phase == "exited")

    def output(self, number: int = 1, rank: int = 0, stream: str = "stdout") -> list[str]:
        """Texts of one rank's records."""
        file = self.logs / f"g{number}" / f"rank{rank}.log"
        lines = file.read_text().splitlines() if file.exists() else []
        records = [line.split(" ", 3) for line in lines]
        return [text for _, source, _, text in records if source == stream]

    async def printed(self, *lines: str, number: int = 1, rank: int = 0) -> None:
        """Wait until these are all that a rank has printed: a status comes after a moment, also if a thread of the
        shim has not written all output by then."""
        try:
            await wait_for(lambda: self.output(number, rank) == list(lines))
        except AssertionError:
            raise AssertionError(f"{self.output(number, rank)} instead of {list(lines)}") from None

    async def logged(self, text: str, file: str = "pod.log", times: int = 1) -> None:
        """Wait until a log has this, so often."""
        log = self.logs / file
        await wait_for(lambda: log.exists() and log.read_text().count(text) >= times)

    async def over(self, generations: int = 1) -> None:
        """Wait until so many that had ``LAST_WORD`` have all their output written."""
        await self.logged(" stdout F over\n", times=generations)

    async def output_line(self, text: str, number: int = 1, rank: int = 0, bound: float = 30.0) -> None:
        """Wait until a rank has printed this line."""
        await wait_for(lambda: text in self.output(number, rank), bound)

    def own(self) -> set[int]:
        """Living processes of the pod that are not the job's: shim, watchdog (a fork of it), fork server."""
        status = self.state()
        shim, own = status.shim_pid, {status.shim_pid, status.fork_server_pid}
        assert shim is not None
        line = command_line(shim)
        assert line, "the shim is gone"
        own |= {pid for pid in children(shim) if command_line(pid) == line}
        return {pid for pid in own if pid}

    def preforked(self) -> set[int]:
        """Forks of the fork server that were never given work, those that still warm up among them."""
        status = self.state()
        forks = children(status.fork_server_pid) if status.fork_server_pid else []
        return set(forks) - {worker.pid for worker in status.workers}

    def left(self) -> list[int]:
        self.note_marks()
        found = marked({(mark, owner) for mark in self.marks for owner in self.owners})
        return [pid for pids_of_one in found.values() for pid in pids_of_one]


def children(parent: int) -> list[int]:
    return [pid for pid in pids() if (fields := stat_fields(pid)) and int(fields[1]) == parent]


async def wait_for(condition: Callable[[], object], bound: float = 30.0) -> None:
    limit = Bound(bound)
    while not condition():
        assert not limit.over, "the condition was not reached"
        await asyncio.sleep(0.005)


def run_folders(root: Path) -> list[Path]:
    """Of pods, and what is still to be removed."""
    folder = root / "run" / "pods"
    return [one for one in folder.iterdir() if one.name != ANSWERS] if folder.exists() else []


@asynccontextmanager
async def open_bench(root: Path, python: str = sys.executable) -> AsyncIterator[Bench]:
    """A bench whose pods are retired at the end; fails if a process or a runtime file is left."""
    bench = Bench(root, python)
    try:
        yield bench
        bench.note_marks()
    finally:
        for uid in bench.host.status():
            bench.host.retire(uid)
        await wait_for(lambda: not bench.host.status(), 20)
        await bench.host.close()
    assert bench.left() == []
    assert run_folders(root) == list((root / "run" / "pods" / ANSWERS).glob("*")) == []
    assert grant_keys(bench.grants) == []


NOBODY = 65534
"""A user who has nothing to do with any job."""
STRANGER = """
import os, socket, sys, time
os.setuid(int(sys.argv[2]))
while True:
    try:
        one = socket.create_server(("127.0.0.1", int(sys.argv[1])))
        break
    except OSError:
        time.sleep(0.001)
print("has it", flush=True)
time.sleep(600)
"""


def start_stranger(port: str) -> subprocess.Popen[str]:
    """A process of another user that takes this port as soon as it can, and says so. Only root can start it."""
    return subprocess.Popen([sys.executable, "-c", STRANGER, port, str(NOBODY)], stdout=subprocess.PIPE, text=True)
