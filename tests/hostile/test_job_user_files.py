"""A job's user against root's agent, with all that he may do to the folders that are his: nothing hangs, nobody else's
pod notices, and nothing outside of them is read, written or removed. Each attack is made by a process of another real
uid."""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from nodeagent.lease.grants import answer_file, grant_keys
from nodeagent.lease.main import read_obeyed
from nodeagent.model.jobspec import JobSpec
from nodeagent.osutil import untrusted
from nodeagent.osutil.linux import has_mark, is_running, start_time
from nodeagent.pods import host
from nodeagent.pods.base import PodStatus
from nodeagent.pods.folder import folder_name, log_folder, run_folder
from tests import readable
from tests.integration.shim_support import UID, Bench, make_spec, open_bench, pid_of, wait_for

SYSTEM_PYTHON = "/usr/bin/python3"
ATTACKER = "nobody"
THEIRS = "fedcba9876543210fedcba9876543210"
"""The attacker's pod; ``UID`` is another user's."""
HANG = 60
"""Seconds until a test is taken to hang."""
SLEEP = ("sleep", "600")


def _can_run() -> bool:
    with suppress(OSError, subprocess.CalledProcessError):
        probe = [SYSTEM_PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        return subprocess.run(probe, check=False).returncode == 0
    return False


pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be attacked by another user"),
    pytest.mark.skipif(not _can_run(), reason="needs a Python 3.11 that every user can run"),
]


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """A blocked event loop can give itself no bound."""

    def hung(*_: object) -> None:
        raise AssertionError("the agent's loop is blocked")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANG)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can pass through (pytest's own are private)."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def attack(folder: Path, code: str) -> None:
    """Run this as the attacker, in his folder."""
    user = pwd.getpwnam(ATTACKER)
    subprocess.run(
        [SYSTEM_PYTHON, "-c", f"import os, json, socket\n{code}"], cwd=folder, check=True, user=user.pw_uid,
        group=user.pw_gid, extra_groups=(), timeout=HANG, env={},
    )  # fmt: skip


TRAPS = {
    "fifo": "os.mkfifo(name)",
    "link to a secret": "os.symlink('{secret}', name)",
    "link to a device": "os.symlink('/dev/zero', name)",
    "array": "open(name, 'w').write('[]')",
    "deep": "open(name, 'w').write('[' * 60000)",
    "numbers": "open(name, 'w').write(json.dumps(dict(pid=10**40, start=True, boot=[], uid=7, mark=None, logs=3)))",
    "sparse": "open(name, 'w').truncate(1 << 40)",
    "folder": "os.mkdir(name)",
    "socket": "socket.socket(socket.AF_UNIX).bind(name)",
    "nothing": "",
}


def spoil(folder: Path, name: str, trap: str, secret: Path) -> None:
    """Put the trap in the place of a file."""
    code = TRAPS[trap].format(secret=secret)
    attack(folder, f"name = {name!r}\nif os.path.lexists(name): os.rename(name, os.urandom(8).hex())\n{code}")


@dataclass
class Field:
    """Two pods of one node: the attacker's, and another user's, which must not notice."""

    bench: Bench
    spec: JobSpec
    shim: int
    """Of the other user's pod."""
    secret: Path

    @property
    def run(self) -> Path:
        """The attacker's run folder."""
        return run_folder(self.bench.root / "run", THEIRS)

    @property
    def logs(self) -> Path:
        return log_folder(self.bench.root / "logs", "train", THEIRS)

    @property
    def theirs(self) -> PodStatus | None:
        return self.bench.host.status().get(THEIRS)

    async def prepared(self) -> int:
        """The attacker's pod, with a new shim; its pid."""
        self.bench.host.prepare(THEIRS, self.spec)
        await wait_for(lambda: (s := self.theirs) and s.phase == "ready" and s.shim_pid)
        assert self.theirs is not None
        assert self.theirs.shim_pid is not None
        self.bench.note_marks()
        return self.theirs.shim_pid

    async def restarted(self) -> None:
        """Another agent's start: it takes over the other user's pod as it was."""
        await self.bench.host.close()
        self.bench.host = self.bench.new_host()
        await self.bench.host.adopt()
        self.bench.grant()
        status = await self.bench.until(lambda s: s.phase == "running")
        assert status.shim_pid == self.shim
        assert is_running(pid_of(status.workers[0]))


@pytest.fixture
def spec(open_folder: Path) -> JobSpec:
    return make_spec(SLEEP, open_folder, user=ATTACKER, fork_server=False, environ={"PATH": "/usr/bin:/bin"})


async def field(bench: Bench, spec: JobSpec) -> Field:
    await bench.ready(make_spec(SLEEP, bench.root, fork_server=False, environ={"PATH": "/usr/bin:/bin"}))
    status = await bench.running()
    assert status.shim_pid is not None
    secret = bench.root / "secret"
    secret.write_text('{"root": "only"}')
    secret.chmod(0o600)
    made = Field(bench, spec, status.shim_pid, secret)
    await made.prepared()
    return made


@pytest.mark.parametrize("name", ["pod.json", "shim.json", "s"])
async def test_an_agent_starts_whatever_lies_in_a_run_folder(open_folder: Path, spec: JobSpec, name: str) -> None:
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        here = await field(bench, spec)
        for trap in TRAPS:
            signal.alarm(HANG)
            spoil(here.run, name, trap, here.secret)
            await here.restarted()
            if here.theirs is None or here.theirs.phase == "gone":
                await here.prepared()
        assert here.secret.read_text() == '{"root": "only"}'


@pytest.mark.parametrize("trap", TRAPS)
async def test_a_pod_that_died_is_prepared_anew_whatever_lies_in_its_folders(
    open_folder: Path, spec: JobSpec, trap: str
) -> None:
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        here = await field(bench, spec)
        assert here.theirs is not None
        pid = here.theirs.shim_pid
        assert pid is not None
        for name in ("pod.json", "pod.json.new", "shim.json", "s"):
            spoil(here.run, name, trap, here.secret)
        os.kill(pid, signal.SIGKILL)
        await wait_for(lambda: (s := here.theirs) and s.phase == "gone")
        assert await here.prepared() != pid
        assert here.secret.stat().st_uid == 0
        assert bench.state().phase == "running"


@pytest.mark.parametrize("trap", ["fifo", "link to a secret", "link to a device", "folder", "socket"])
async def test_a_log_that_is_none_is_not_written_to(open_folder: Path, spec: JobSpec, trap: str) -> None:
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        here = await field(bench, spec)
        assert here.theirs is not None
        assert here.theirs.shim_pid is not None
        spoil(here.logs, "shim.log", trap, here.secret)
        os.kill(here.theirs.shim_pid, signal.SIGKILL)
        await wait_for(lambda: (s := here.theirs) and s.phase == "gone")
        bench.host.prepare(THEIRS, spec)
        bench.host.retire(THEIRS)
        await wait_for(lambda: here.theirs is None)
        bench.host.prepare(THEIRS, spec)
        await wait_for(lambda: (s := here.theirs) and s.phase == "unfit")
        assert here.theirs is not None
        assert "shim.log" in here.theirs.reason
        assert here.secret.read_text() == '{"root": "only"}'
        assert bench.state().phase == "running"


async def test_a_pod_cannot_pass_for_anothers(open_folder: Path, spec: JobSpec) -> None:
    """What the next agent sends to the other user's pod (its start order, with his environment) goes to no other."""
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        here = await field(bench, spec)
        attack(
            here.run,
            f"pod = json.load(open('pod.json')); pod['uid'] = {UID!r}\n"
            "json.dump(pod, open('new', 'w')); os.rename('new', 'pod.json')",
        )
        await here.restarted()
        assert here.theirs is not None
        assert here.theirs.shim_pid != here.shim
        await here.restarted()


async def test_another_process_than_the_shim_is_not_taken_for_it(open_folder: Path, spec: JobSpec) -> None:
    """Neither one of the attacker's without the mark, nor the other user's shim, nor a listener in its place."""
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        here = await field(bench, spec)
        start = (Path("/proc") / str(here.shim) / "stat").read_text().rpartition(")")[2].split()[19]
        attack(
            here.run,
            f"said = json.load(open('shim.json')); said['pid'] = {here.shim}; said['start'] = {start}\n"
            "json.dump(said, open('new', 'w')); os.rename('new', 'shim.json')",
        )
        await here.restarted()
        await wait_for(lambda: (s := here.theirs) and s.phase == "gone")
        await here.prepared()
        user = pwd.getpwnam(ATTACKER)
        listen = (
            "import os, socket, time; os.rename('s', 'old'); s = socket.socket(socket.AF_UNIX); s.bind('s')\n"
            "s.listen(); print(flush=True); time.sleep(600)"
        )
        with subprocess.Popen(  # noqa: ASYNC220
            [SYSTEM_PYTHON, "-c", listen], cwd=here.run, user=user.pw_uid, group=user.pw_gid, stdout=subprocess.PIPE
        ) as listener:  # fmt: skip
            assert listener.stdout is not None
            await asyncio.to_thread(listener.stdout.readline)
            await here.restarted()
            await wait_for(lambda: (s := here.theirs) and s.phase == "gone")
            listener.kill()


async def test_a_process_that_is_named_as_the_shim_and_hangs_holds_up_no_other_user(
    open_folder: Path, spec: JobSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment cannot be read, for as long as its user likes."""
    opened, looked = threading.Event(), list[int]()
    monkeypatch.setattr(untrusted, "OWNER_MAX", 1)
    user = pwd.getpwnam(ATTACKER)
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        here = await field(bench, spec)
        with subprocess.Popen(SLEEP, user=user.pw_uid, group=user.pw_gid) as named:  # noqa: ASYNC220

            def hangs(pid: int, mark: str, owner: int) -> bool:
                if pid == named.pid:
                    looked.append(pid)
                    opened.wait(HANG)
                return has_mark(pid, mark, owner)

            monkeypatch.setattr(host, "has_mark", hangs)
            attack(
                here.run,
                f"known = json.load(open('shim.json')) | dict(pid={named.pid}, start={start_time(named.pid)})\n"
                "json.dump(known, open('new', 'w')); os.rename('new', 'shim.json')",
            )
            await here.restarted()
            await here.restarted()
            assert looked == [named.pid] * 2
            assert here.theirs is not None
            assert here.theirs.phase == "unknown"
            opened.set()
            await wait_for(lambda: (s := here.theirs) and s.phase == "gone")
            assert named.poll() is None, "it is none of the pod's"
            named.kill()
        assert bench.state().phase == "running"


async def test_a_grant_is_not_given_by_those_it_is_for(open_folder: Path, spec: JobSpec) -> None:
    """Neither written nor replaced; and nobody answers for another user's pod."""
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        await field(bench, spec)
        theirs, other = folder_name(THEIRS), folder_name(UID)
        answers = answer_file(bench.grants / theirs).parent
        attack(
            bench.grants,
            f"theirs, other, answers = {theirs!r}, {other!r}, {str(answers)!r}\n"
            "assert len(open(theirs, 'rb').read()) == 48\n"
            "open(f'{answers}/{theirs}', 'r+b').close()\n"
            "def refused(act, *given):\n"
            "    try:\n"
            "        act(*given)\n"
            "    except PermissionError:\n"
            "        return\n"
            "    raise AssertionError(given)\n"
            "for name in (theirs, other, f'{answers}/{other}'):\n"
            "    refused(open, name, 'r+b')\n"
            "    refused(os.truncate, name, 0)\n"
            "for name in (theirs, other, f'{answers}/{theirs}', f'{answers}/{other}'):\n"
            "    refused(os.unlink, name)\n"
            "    refused(os.rename, name, name + '-elsewhere')\n"
            "for folder in ('.', answers):\n"
            "    refused(os.mkfifo, f'{folder}/anew')",
        )


ANSWERS = {
    "empty": "os.truncate(name, 0)",
    "sparse": "os.truncate(name, 1 << 40)",
    "unreadable": "os.chmod(name, 0)",
    "never": "open(name, 'r+b').write(struct.pack('=d', math.nan) * 2)",
    "for ever": "open(name, 'r+b').write(struct.pack('=d', math.inf) * 2)",
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_an_answer_concerns_its_own_pod_only(open_folder: Path, spec: JobSpec, answer: str) -> None:
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        here = await field(bench, spec)
        key = folder_name(THEIRS)
        place = answer_file(bench.grants / key).parent
        attack(place, f"import math, struct\nname = {key!r}\n{ANSWERS[answer]}")
        assert read_obeyed(bench.grants, key) == 0.0
        asked = bench.stop_in_order()
        await wait_for(lambda: bench.obeyed() == asked)
        await wait_for(lambda: bench.state().phase == "exited")  # said on another way
        bench.host.retire(THEIRS)
        await wait_for(lambda: here.theirs is None)
        assert grant_keys(bench.grants) == [folder_name(UID)]


async def test_an_answer_that_is_kept_open_holds_up_nobody_who_reads_it(open_folder: Path, spec: JobSpec) -> None:
    """Its owner may ask the kernel to let him finish first (a lease): an open that waits, waits for 45 seconds."""
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        await field(bench, spec)
        key = folder_name(THEIRS)
        keep = (
            "import fcntl, os, signal, sys, time\nsignal.signal(signal.SIGIO, signal.SIG_IGN)\n"
            f"fd = os.open({key!r}, os.O_RDWR)\nfcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
            "print(flush=True)\ntime.sleep(600)"
        )
        user, place = pwd.getpwnam(ATTACKER), answer_file(bench.grants / key).parent
        with subprocess.Popen(  # noqa: ASYNC220
            [SYSTEM_PYTHON, "-c", keep], cwd=place, user=user.pw_uid, group=user.pw_gid, stdout=subprocess.PIPE
        ) as keeper:  # fmt: skip
            try:
                assert keeper.stdout is not None
                assert await asyncio.to_thread(keeper.stdout.readline) == b"\n"
                signal.alarm(HANG // 2)
                assert read_obeyed(bench.grants, key) == 0.0
                asked = bench.stop_in_order()
                await wait_for(lambda: bench.obeyed() == asked)
            finally:
                keeper.kill()
        await wait_for(lambda: read_obeyed(bench.grants, key) == asked)


async def test_removing_a_pods_folder_removes_nothing_else(open_folder: Path, spec: JobSpec) -> None:
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        here = await field(bench, spec)
        kept = open_folder / "kept"
        (kept / "sub").mkdir(parents=True)
        (kept / "sub" / "file").touch()
        attack(
            here.run,
            f"os.makedirs('a/b/c'); os.symlink({str(kept)!r}, 'a/b/link'); os.symlink({str(kept)!r}, 'link')\n"
            "os.mkfifo('a/fifo'); os.chmod('a/b', 0)",
        )
        run = here.run
        bench.host.retire(THEIRS)
        await wait_for(lambda: here.theirs is None and not list(run.parent.glob(".left-*")) and not run.exists())
        assert (kept / "sub" / "file").exists()


@pytest.mark.parametrize("agent", ["runs", "comes"])
async def test_what_is_mounted_on_a_run_folder_is_detached_before_it_is_removed(
    open_folder: Path, spec: JobSpec, agent: str
) -> None:
    """A user may do it with a file system that never answers (``fusermount3``): here root does it for him."""
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        here = await field(bench, spec)
        kept, run = open_folder / "kept", here.run
        kept.mkdir()
        (kept / "file").touch()
        try:
            for retired in (False, True):
                attack(run, "os.mkdir('inside')")
                for place in (run / "inside", run, run):
                    if subprocess.run(["mount", "--bind", kept, place], check=False).returncode:  # noqa: ASYNC221
                        pytest.skip("nothing can be mounted here")
                assert here.theirs is not None
                assert here.theirs.shim_pid is not None
                os.kill(here.theirs.shim_pid, signal.SIGKILL)
                if agent == "comes":
                    await here.restarted()
                await wait_for(lambda: (s := here.theirs) and s.phase == "gone")
                if retired:
                    bench.host.retire(THEIRS)
                    await wait_for(lambda: here.theirs is None)
                else:
                    await here.prepared()
                await wait_for(partial(only_has, run, folder=not retired))
            assert mounts_in(open_folder) == []
            assert (kept / "file").exists()
        finally:
            for mounted in reversed(mounts_in(open_folder)):
                subprocess.run(["umount", "-l", mounted], check=False)  # noqa: ASYNC221


def only_has(run: Path, *, folder: bool) -> bool:
    """Nothing of it is left beside the folder of a pod that there may be."""
    return run.exists() == folder and not list(run.parent.glob(".left-*"))


def mounts_in(folder: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [place for _, place, *_ in map(str.split, lines) if place.startswith(str(folder))]


def test_this_interpreter_is_another_than_the_attackers() -> None:
    """The attacks would prove nothing as root."""
    assert pwd.getpwnam(ATTACKER).pw_uid != os.geteuid(), sys.executable
