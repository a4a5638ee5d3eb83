"""The real PodHost: starts shims, speaks to them, finds them again after the agent's restart.

Owns the run, state and log folders of this node's pods. Decides nothing; a shim is left running whatever happens to
the agent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from nodeagent.lease.grants import (
    ANSWERS,
    NOTHING,
    Grant,
    grant_keys,
    grants_folder,
    make_grant,
    read_grant_of,
    remove_grant,
)
from nodeagent.model.jobspec import JobSpec
from nodeagent.model.pod import PodPhase
from nodeagent.model.world import Token
from nodeagent.osutil import units
from nodeagent.osutil.linux import (
    MARK,
    boot_id,
    has_mark,
    is_over,
    kill_marked,
    passing,
    pidfd_ended,
    power_mark,
    prefer_session,
    refuse_descriptors,
    stat_fields,
)
from nodeagent.osutil.untrusted import (
    AsideByOwner,
    HungError,
    NotSeenError,
    OneAside,
    UntrustedError,
    UntrustedFolder,
)
from nodeagent.pods import become
from nodeagent.pods.base import NOBODY, CommitRequest, GivenUp, PodStatus, StartOrder
from nodeagent.pods.cgroup import PodCgroup, cgroup_of_pod, cgroup_of_unit, cgroups_left
from nodeagent.pods.clearing import Clearing
from nodeagent.pods.folder import (
    PodRecord,
    PodRecords,
    folder_name,
    log_folder,
    make_run_folder,
    own_folder,
    pod_file,
    pods_folder,
    promised_number,
    run_folder,
    state_folder,
)
from nodeagent.pods.login import FindLogin, Login, Logins, NoAnswerError, UserError
from nodeagent.pods.pod import LOOK_AGAIN, SHIM_LOG, FoundShim, NotStartedError, PodHandle, SharedByPods
from nodeagent.pods.speech import SpeechByOwner
from nodeagent.pods.sweep import Sweeper
from nodeagent.spec.agentconfig import DirsConfig, JobsConfig

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).parents[2]
PID_MAX = 1 << 22
"""The kernel's own limit."""
LISTEN_LIMIT = 10.0
"""Seconds from a shim's start to its socket."""
ADOPT_LIMIT = 0.5
"""Seconds that an agent's start waits for looks at its pods; those that take longer are unknown meanwhile."""
LOOK_LIMIT = 20.0
"""Seconds for a look for a pod's shim; if it was begun and has not come back by then, the pod is killed."""
NO_GRANT = "its shim has no grant record: somebody removed it"
FOLDERS_LIMIT = 5.0
"""Seconds that a new pod waits for its state and log folders."""
PROMISED_LIMIT = 2.0
"""Seconds for a look at what was promised here: an agent waits for it before it joins."""


@dataclass(frozen=True, slots=True)
class ShimStart:
    """How a shim is started."""

    python: str = sys.executable
    """Its interpreter: each job's user must be able to run it."""
    unit: str = ""
    """The agent's own one, where systemd starts the shims as services; empty where they are the agent's children."""
    make_folder: Callable[[Path, int, int], None] = own_folder
    """Makes a folder on a disk, which may block."""


class ShimHost:
    """See base.PodHost."""

    def __init__(
        self,
        node: str,
        dirs: DirsConfig,
        jobs: JobsConfig,
        address: str,
        ports: tuple[int, int],
        how: ShimStart,
        look: FindLogin,
        granted: Callable[[], None] = lambda: None,
    ) -> None:
        """``ports``: the first and the last one that the pods use at ``address``. ``look``: who says whom a job's user
        is; it may block. ``granted``: called when a new pod has a grant record, in which no time is granted yet."""
        self.changed = asyncio.Event()
        self._node, self._jobs, self._how = node, jobs, how
        self._run, self._state, self._logs = dirs.run, dirs.state, dirs.logs
        self._address, self._ports = address, ports
        self._pods: dict[str, PodHandle] = {}
        self._records = PodRecords(dirs.run)
        self._unfit: dict[str, tuple[float, PodStatus]] = {}
        self._logins, self._granted = Logins(node, look, time.monotonic), granted
        self._looking: dict[str, asyncio.Task[None]] = {}
        """Pods that wait for what the user database says, or for their folders, by uid."""
        self._looks = AsideByOwner()
        """At what is the pods' users'."""
        self._clearing = Clearing(how.unit, self._looks, self._in_use)
        self._promised, self._shared = OneAside(), SharedByPods(Sweeper(kill_marked), self._looks, SpeechByOwner())
        self._pings = 0

    def status(self) -> Mapping[str, PodStatus]:
        return {uid: status for uid, (_, status) in self._unfit.items()} | {
            uid: pod.status for uid, pod in self._pods.items()
        }

    async def adopt(self) -> None:
        cgroups = cgroups_left(self._run)  # before the records: a pod has its record first
        known, folders, grants = self._records.all(), pods_folder(self._run), grant_keys(grants_folder(self._run))
        for folder in sorted(folders.iterdir()) if folders.is_dir() else []:
            if folder.name not in known and folder.name != ANSWERS:
                log.warning("no pod is known in %s, it is removed", folder)
                self._clearing.remove(folder)
        for key in grants:
            if key not in known:
                self._remove_grant(key)
        for key, cgroup in cgroups.items():
            if key not in known:
                self._clearing.end(cgroup)
        found = []
        for name, record in known.items():
            handle, useless = self._handle(record, folders / name, "unknown"), "" if name in grants else NO_GRANT
            found.append(handle.finds(self._found(folders / name, record), useless))
        later = (await asyncio.wait(found, timeout=ADOPT_LIMIT))[1] if found else ()
        if later:
            log.warning("%d shims are not found yet", len(later))
        self.relocate(self._address)  # they may be older than it

    async def promised(self, uids: Iterable[str]) -> Mapping[str, int]:
        try:
            return await self._promised.run(partial(_promised_numbers, self._state, tuple(uids)), PROMISED_LIMIT)
        except NotSeenError as error:
            log.warning("what pods in %s promised is unknown and counts as nothing: %s", self._state, error)
            return {}

    def prepare(self, uid: str, spec: JobSpec) -> None:
        pod = self._pods.get(uid)
        if pod is not None and not pod.may_restart:
            return
        if uid in self._looking or (uid in self._unfit and time.monotonic() < self._unfit[uid][0]):
            return
        task = asyncio.get_running_loop().create_task(self._begin(uid, spec))
        self._looking[uid] = task
        task.add_done_callback(lambda done: self._looked_up(uid, done))

    async def _begin(self, uid: str, spec: JobSpec) -> None:
        try:
            login = await self._logins.find(spec.user, self._jobs.allow_root)
            await self._start_shim(uid, spec, login)
        except (UserError, UntrustedError, OSError) as error:
            self._cannot_start(uid, error)
        self.changed.set()

    def _looked_up(self, uid: str, done: asyncio.Task[None]) -> None:
        if self._looking.get(uid) is done:
            del self._looking[uid]

    def _cannot_start(self, uid: str, error: UserError | UntrustedError | OSError) -> None:
        self._remove_grant(folder_name(uid))
        if uid not in self._pods:
            self._records.forget(uid)
            self._clearing.remove(run_folder(self._run, uid))
        text = str(error) if isinstance(error, UserError) else f"the shim could not be started: {error}"
        silent = isinstance(error, NoAnswerError | NotSeenError)
        may_pass = silent or (isinstance(error, OSError) and passing(error))
        if uid in self._pods:
            self._pods[uid].not_started_again(text, may_pass)
            return
        status = PodStatus(uid=uid, phase="unfit", reason=text, passing=may_pass)
        self._unfit[uid] = (time.monotonic() + LOOK_AGAIN, status)
        self.changed.set()

    def relocate(self, address: str) -> None:
        """The node is reached at this address from now on: what pods hold for their next generation is there."""
        self._address = address
        for pod in self._pods.values():
            pod.command("relocate", address=address)

    def promise(self, uid: str, token: Token, rendezvous: bool, ports: int = 0, above: int = 0) -> None:
        if uid in self._pods:
            self._pods[uid].promise(ports, token=token.model_dump(), rendezvous=rendezvous, above=above)

    def start(self, uid: str, order: StartOrder) -> None:
        if uid in self._pods:
            self._pods[uid].start(order)

    def release(self, uid: str, token: Token, roles: tuple[str, ...]) -> None:
        self._command(uid, "release", token=token.model_dump(), roles=list(roles))

    def stop_role(self, uid: str, token: Token, role: str, number: int) -> None:
        self._command(uid, "stop_role", token=token.model_dump(), role=role, number=number)

    def start_role(self, uid: str, token: Token, role: str, number: int, wait: float) -> None:
        self._command(uid, "start_role", token=token.model_dump(), role=role, number=number, wait=wait)

    def stop(
        self,
        uid: str,
        grace: float | None,
        given_up: GivenUp | None = None,
        broken: bool = False,
        sooner: Mapping[str, float] = NOBODY,
        later: tuple[str, ...] = (),
    ) -> None:
        plain = given_up.model_dump() if given_up is not None else None
        if uid in self._pods:
            self._pods[uid].stop(grace=grace, given_up=plain, broken=broken, sooner=dict(sooner), later=later)

    def look(self, uid: str, limit: float | None = None) -> None:
        self._command(uid, "look", **({} if limit is None else {"limit": limit}))

    def retire(self, uid: str) -> None:
        self._unfit.pop(uid, None)
        if (looking := self._looking.pop(uid, None)) is not None:
            looking.cancel()
        if uid in self._pods:
            self._pods[uid].retire()

    def committed(self, uid: str, request: CommitRequest, refused: str) -> None:
        self._command(uid, "committed", request=request.model_dump(), refused=refused)

    def granted(self, uid: str) -> Grant:
        return read_grant_of(grants_folder(self._run), folder_name(uid)) if uid in self._pods else NOTHING

    def ping(self) -> None:
        self._pings += 1
        for pod in self._pods.values():
            pod.ping(self._pings)

    def connected(self, uid: str) -> bool:
        """This pod's shim hears us now."""
        return uid in self._pods and self._pods[uid].connected

    def reconfigure(self, jobs: JobsConfig) -> None:
        """For shims that start from now on."""
        self._jobs = jobs

    async def close(self) -> None:
        for looking in self._looking.values():
            looking.cancel()
        for pod in self._pods.values():
            pod.let_go()
        self._pods.clear()
        await self._clearing.close()

    def _command(self, uid: str, op: str, **arguments: Any) -> None:
        pod = self._pods.get(uid)
        if pod is not None:
            pod.command(op, **arguments)

    def _handle(self, record: PodRecord, folder: Path, phase: PodPhase) -> PodHandle:
        handle = PodHandle(
            record, folder, phase, changed=self.changed.set, swept=lambda: self._remove_grant(folder.name),
            ended=self._ended, keep=self._keep, shared=self._shared,
        )  # fmt: skip
        self._pods[record.uid] = handle
        return handle

    def _keep(self, record: PodRecord) -> None:
        try:
            self._records.write(record)
        except OSError as error:  # the next agent knows what was written before
            log.warning("the record of %s stays as it was: %s", record.uid, error)

    def _ended(self, pod: PodHandle) -> None:
        if self._pods.get(pod.uid) is pod:
            del self._pods[pod.uid]
            self._records.forget(pod.uid)
            self._clearing.remove(pod.folder)
        self.changed.set()

    def _remove_grant(self, key: str) -> None:
        """Nothing of the pod runs any more."""
        try:
            remove_grant(grants_folder(self._run), key)
        except OSError as error:
            log.warning("the grant of pod %s is not removed: %s", key, error)

    def _in_use(self, folder: Path) -> bool:
        return any(pod.folder == folder for pod in self._pods.values())

    async def _start_shim(self, uid: str, spec: JobSpec, login: Login) -> None:
        state, logs = state_folder(self._state, uid), log_folder(self._logs, spec.name, uid)
        await self._clearing.free(run_folder(self._run, uid))
        with await self._own_folders(uid, state, logs, login) or nullcontext() as log_file:
            self._unfit.pop(uid, None)
            folder, grants = run_folder(self._run, uid), grants_folder(self._run)
            content = pod_file(
                uid, spec, login.name == spec.submitter.user, state, logs, grants / folder.name, self._address,
                self._ports, self._jobs.logs.max_bytes, self._jobs.logs.keep,
            )  # fmt: skip
            if (before := make_run_folder(folder, content, login.uid, login.gid)) is not None:
                self._clearing.remove(before)
            unit = units.unit_name(folder.name) if self._how.unit else ""
            cgroup = cgroup_of_unit(unit) if unit else cgroup_of_pod(self._run, folder.name)
            record = PodRecord(uid, login.uid, content["mark"], logs, cgroup, asked=content["preforked"])
            self._records.write(record)
            make_grant(grants, folder.name, login.uid, login.gid)
            self._granted()
            env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(_SOURCE), "LANG": "C.UTF-8", MARK: content["mark"]}
            env |= power_mark()
            command = [self._how.python, "-sP", "-m", "nodeagent.shim", str(folder)]
            if log_file is None:
                whole = units.start_command(unit, self._how.unit, spec.name, login.name, env, command)
                handle = self._handle(record, folder, "preparing")
                handle.starts(self._started_as(unit, whole, folder, record))
            else:
                process, link = self._fork_shim(command, env, log_file, login)
                handle = self._handle(record, folder, "preparing")
                handle.started(process)
                handle.attach(link)

    async def _own_folders(self, uid: str, state: Path, logs: Path, login: Login) -> BinaryIO | None:
        """Makes them beside the loop, since their disks may hang; what a child of ours writes its log to."""

        def work() -> BinaryIO | None:
            for path in (state, logs):
                self._how.make_folder(path, login.uid, login.gid)
            if self._how.unit:
                return None
            with UntrustedFolder(logs.parent, logs.name, owner=login.uid) as folder:
                return folder.append(SHIM_LOG, 0o640, also=os.geteuid())

        try:
            return await self._looks.run(
                login.uid, f"folders of {uid}", work, FOLDERS_LIMIT, discard=lambda late: late is None or late.close()
            )
        except NotSeenError as error:
            log.warning("the folders of %s are looked at again: %s", uid, error)
            raise NotSeenError(
                f"its folders {state} and {logs} could not be looked at: {error}; see that their disks answer, it is "
                f"tried again"
            ) from error

    async def _started_as(self, unit: str, command: list[str], folder: Path, record: PodRecord) -> FoundShim:
        """Have systemd start a shim: the one that listens then. Raises NotStartedError."""
        try:
            await units.start(command)
        except units.UnitError as error:
            raise NotStartedError(f"{error}; more in: journalctl -u {unit}") from error
        deadline = time.monotonic() + LISTEN_LIMIT
        while time.monotonic() < deadline:
            with suppress(UntrustedError):  # it is not there yet
                return await self._look_for(folder, record, ADOPT_LIMIT)
            await asyncio.sleep(LISTEN_LIMIT / 1000)
        raise NotStartedError(f"it does not listen; more in: journalctl -u {unit}")

    async def _found(self, folder: Path, record: PodRecord) -> FoundShim:
        """The shim that an earlier agent started. A look that could not be made is made again, however long that takes:
        it says nothing of the shim. Raises NotStartedError: it is not there, or to look for it hangs."""
        while True:
            try:
                return await self._look_for(folder, record, LOOK_LIMIT)
            except HungError as error:
                log.error("the shim of %s cannot be looked for: %s", record.uid, error)
                raise NotStartedError(f"{folder} cannot be looked at: {error}") from error
            except NotSeenError as error:
                log.warning("the shim of %s is looked for again: %s", record.uid, error)
            except UntrustedError as error:
                log.warning("no shim of %s: %s", record.uid, error)
                raise NotStartedError(str(error)) from error
            await asyncio.sleep(ADOPT_LIMIT)

    async def _look_for(self, folder: Path, record: PodRecord, seconds: float) -> FoundShim:
        work = partial(_find_shim, folder, record)
        return await self._looks.run(record.owner, f"shim of {record.uid}", work, seconds, discard=_forget)

    def _fork_shim(
        self, command: list[str], env: Mapping[str, str], log_file: BinaryIO, login: Login
    ) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """A child of ours, and a connection to it. It is nobody's but ours until it is executed, which this waits for:
        a user may stop what is his."""
        ours, theirs = socket.socketpair()
        refuse_descriptors(ours)
        if os.geteuid() == 0:
            whom = [login.name, str(login.uid), str(login.gid), ",".join(map(str, login.groups))]
            command = [sys.executable, "-ISP", become.__file__, *whom, *command]
        with theirs:
            try:
                process = subprocess.Popen(
                    [*command, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
                    cwd="/", env=env, umask=0o022, start_new_session=True, pass_fds=(theirs.fileno(),),
                )  # fmt: skip
            except OSError:
                ours.close()
                raise
        prefer_session(process.pid)  # the job's user may not
        return process, ours


def _promised_numbers(state_dir: Path, uids: Iterable[str]) -> dict[str, int]:
    found = {}
    for uid in uids:
        try:
            found[uid] = promised_number(state_dir, uid)
        except NotSeenError as error:
            log.warning("what pod %s promised is unknown and counts as nothing: %s", uid, error)
    return {uid: number for uid, number in found.items() if number}


def _find_shim(folder: Path, record: PodRecord) -> FoundShim:
    """The pod's shim. What shim.json says is only where to look: it must be a living process in the pod's cgroup, or
    one of the job's user that carries the pod's mark: to look for that may block, if the process hangs in the kernel.
    Raises UntrustedError."""
    with UntrustedFolder(folder.parent, folder.name, owner=record.owner) as run:
        stored = run.read_object("shim.json")
    pid = stored.get("pid")
    if type(pid) is not int or not 0 < pid < PID_MAX:
        raise UntrustedError(f"{folder / 'shim.json'} names no process")
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise UntrustedError(f"its process {pid} is gone") from error
    except OSError as error:
        raise NotSeenError(f"its process {pid} cannot be looked at: {error}") from error
    try:
        fields = stat_fields(pid)
        if fields is None and not pidfd_ended(pidfd):
            raise NotSeenError(f"its process {pid} cannot be looked at")
        runs = fields is not None and not is_over(fields) and stored.get("start") == int(fields[19])
        cgroup = PodCgroup.of(pid)
        inside = cgroup is not None and cgroup.path == record.cgroup
        if not (runs and stored.get("boot") == boot_id() and (inside or has_mark(pid, record.mark, record.owner))):
            raise UntrustedError(f"process {pid} is not its shim")
        return FoundShim(pid, pidfd, cgroup)
    except OSError as error:
        os.close(pidfd)
        raise NotSeenError(f"its process {pid} cannot be looked at: {error}") from error
    except UntrustedError:
        os.close(pidfd)
        raise


def _forget(found: FoundShim) -> None:
    os.close(found.pidfd)
