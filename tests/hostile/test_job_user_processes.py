"""A job's user against the fence: whatever his processes do to leave their worker, none of them outlives what it may.
Each attack is made by a process of another real uid."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from nodeagent.osutil.linux import is_running
from nodeagent.pods.base import PodStatus
from nodeagent.pods.cgroup import PodCgroup, cgroup_of_pod, cgroups_left
from nodeagent.pods.folder import folder_name
from nodeagent.pods.host import ShimHost, ShimStart
from nodeagent.pods.login import Login, find_login
from nodeagent.shim.gang import STUCK_AFTER
from nodeagent.spec.agentconfig import DirsConfig, JobsConfig
from tests.integration.shim_support import UID, Bench, make_spec, open_bench, pid_of, wait_for
from tests.processes import command_line

SYSTEM_PYTHON = "/usr/bin/python3"
ATTACKER = "nobody"
GRANTED = 5.0
"""Seconds from a shim's stop to the end of its pod, and how long the machine may stand still before that."""

ESCAPE = """
import ctypes, os, signal, sys, time
STEPS = "import os, signal, sys, time\\n" \\
    "for n in (1, 2, 3, 10, 12, 13, 15): signal.signal(n, signal.SIG_IGN)\\n" \\
    "open('pids/%d' % os.getpid(), 'w').close()\\n" \\
    "while True: time.sleep(0.01)\\n"
def steps():
    os.execve(sys.executable, [sys.executable, "-Sc", STEPS], {})
def child(body):
    if os.fork() == 0:
        body()
        os._exit(0)
def own_session():
    os.setsid(); steps()
def twice():
    os.setsid()
    child(steps)
def own_subreaper():
    os.setsid()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    child(twice)
    steps()
def of_a_thread():
    import threading
    threading.Thread(target=child, args=(own_session,)).start()
    time.sleep(600)
def without_its_main_thread():
    import threading
    os.setsid()
    open('pids/%d' % os.getpid(), 'w').close()
    threading.Thread(target=time.sleep, args=(600,)).start()
    ctypes.CDLL(None).pthread_exit(None)
def as_another():
    os.execve("./other", ["./other", "-Sc", "import os\\nos.setresuid(*[os.geteuid()] * 3)\\n" + STEPS], {})
def chain():
    os.setsid()
    for _ in range(20000):
        if os.fork():
            os._exit(0)
    steps()
WAYS = {w.__name__: w for w in (own_session, twice, own_subreaper, of_a_thread, without_its_main_thread)}
for way in sys.argv[1:]:
    child(globals()[way])
print("up", flush=True)
time.sleep(600)
"""
WAYS = {"own_session": 1, "twice": 1, "own_subreaper": 2, "of_a_thread": 1, "without_its_main_thread": 1}
"""How a process leaves its worker's group, and how many come of it. All but the last clear their environment."""


STOPPED_UID = 61_017
"""Nobody else's on this machine: all of its processes are stopped and killed."""
BOUND = 30.0
"""Seconds until an agent counts as held up for ever."""
OTHER = 100000
"""A uid that the attacker has a file of with the setuid bit: of /etc/subuid, or an accomplice's."""


def _can_run() -> bool:
    with suppress(OSError):
        probe = [SYSTEM_PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        return subprocess.run(probe, check=False).returncode == 0
    return False


pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be attacked by another user"),
    pytest.mark.skipif(not _can_run(), reason="needs a Python 3.11 that every user can run"),
]


@pytest.fixture
def root() -> Iterator[Path]:
    """With the job's folder, which is the attacker's."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        user = pwd.getpwnam(ATTACKER)
        for folder in (root / "job", root / "job" / "pids"):
            folder.mkdir()
            os.chown(folder, user.pw_uid, user.pw_gid)
        (root / "job" / "t.py").write_text(ESCAPE)
        yield root
        for pid in escaped(root):  # only what a failed test has left
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def other(root: Path) -> None:
    """A program that runs as somebody else, whoever starts it."""
    program = root / "job" / "other"
    shutil.copy(Path(SYSTEM_PYTHON).resolve(), program)
    os.chown(program, OTHER, OTHER)
    program.chmod(0o4755)
    (root / "job" / "pids").chmod(0o777)


@pytest.fixture(params=["cgroup", "no cgroup"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Whether root has a cgroup of the pod, or only the tree of its processes."""
    if request.param == "no cgroup":
        monkeypatch.setattr("nodeagent.pods.cgroup.MOUNTS", ())
    elif cgroup_of_pod(tmp_path, "key") is None:
        pytest.skip("needs a cgroup v2 that can be written")
    return str(request.param)


@pytest.fixture
async def bench(root: Path) -> AsyncIterator[Bench]:
    async with open_bench(root, SYSTEM_PYTHON) as bench:
        yield bench


def escaped(root: Path) -> list[int]:
    """Living processes that have left their worker. (A number alone may be another's by now: the chain uses many.)"""
    pids = [int(file.name) for file in (root / "job" / "pids").iterdir()]
    return [pid for pid in pids if is_running(pid) and _is_escaped(pid)]


def _is_escaped(pid: int) -> bool:
    line = command_line(pid)
    return "pids/" in " ".join(line) or not any(line)  # whose main thread has ended has none


async def attack(bench: Bench, *ways: str, count: int, fork_server: bool = True) -> PodStatus:
    """A pod whose worker runs, and so many processes that have left it."""
    command = (SYSTEM_PYTHON, "t.py", *ways)
    environ = {"PATH": "/usr/bin:/bin"}
    spec = make_spec(command, bench.root / "job", user=ATTACKER, environ=environ, fork_server=fork_server)
    status = await bench.ready(spec)
    assert status.phase == "ready", status.reason
    status = await bench.running()
    await bench.output_line("up")
    await wait_for(lambda: len(escaped(bench.root)) >= count)
    return status


@pytest.mark.parametrize("way", WAYS)
async def test_what_left_its_session_ends_with_the_granted_time_of_a_stopped_shim(bench: Bench, way: str) -> None:
    async with bench.renewing(GRANTED):
        status = await attack(bench, way, count=WAYS[way])
        assert status.shim_pid is not None
        os.kill(status.shim_pid, signal.SIGSTOP)
    try:
        # One kill ends both; which of them is gone first is the kernel's matter.
        await wait_for(lambda: not escaped(bench.root) and not any(is_running(pid_of(w)) for w in status.workers))
    finally:
        os.kill(status.shim_pid, signal.SIGCONT)
    ended = await bench.until(lambda s: s.phase == "exited")
    assert ended.fenced
    assert ended.fork_server_pid == status.fork_server_pid, "the fork server lives on"


async def test_what_left_its_session_ends_with_the_granted_time(bench: Bench) -> None:
    await attack(bench, *WAYS, count=sum(WAYS.values()), fork_server=False)
    bench.grant(0.5)
    ended = await bench.until(lambda s: s.phase == "exited")
    assert (ended.fenced, escaped(bench.root)) == (True, [])


@pytest.mark.usefixtures("other", "where")
async def test_what_runs_as_another_user_ends_with_the_granted_time(bench: Bench) -> None:
    """The shim, and its watchdog, may not signal it. It ends before the shim says that something does not."""
    status = await attack(bench, "as_another", "own_session", count=2, fork_server=False)
    bench.grant(0.5)
    ended = await bench.until(lambda s: s.phase == "exited", STUCK_AFTER - 1.0)
    assert (ended.fenced, escaped(bench.root)) == (True, [])
    assert ended.shim_pid == status.shim_pid, "nobody else of the pod is harmed"


@pytest.mark.usefixtures("other", "where")
@pytest.mark.parametrize("how", ["stop", "retire"])
async def test_what_runs_as_another_user_ends_before_its_pod_is_quiet(bench: Bench, how: str) -> None:
    """Each state of the pod is looked at: none may say that it is stuck, or that nothing of it is left, before."""
    await attack(bench, "as_another", "own_session", count=2, fork_server=False)
    if how == "stop":
        bench.host.stop(UID, 0.2)
        ended = await bench.until(lambda s: s.quiet or s.phase == "stuck")
        assert (ended.phase, escaped(bench.root)) == ("gone", [])
        assert ended.reason == "its shim could not end all that it had started, and was killed with it"
        return
    bench.host.retire(UID)
    await wait_for(lambda: not bench.host.status())
    assert escaped(bench.root) == []


@pytest.mark.usefixtures("other", "where")
async def test_what_runs_as_another_user_ends_with_the_next_agent(bench: Bench) -> None:
    """Its time ends while no agent runs."""
    await attack(bench, "as_another", count=1, fork_server=False)
    bench.grant(0.5)
    await bench.host.close()
    await asyncio.sleep(1.5)
    assert escaped(bench.root) != []
    bench.host = bench.new_host()
    await bench.host.adopt()
    await wait_for(lambda: not escaped(bench.root), STUCK_AFTER - 2.0)
    await bench.until(lambda s: s.phase == "exited")


async def test_a_generation_has_ended_only_when_what_left_its_session_has(bench: Bench) -> None:
    await attack(bench, *WAYS, count=sum(WAYS.values()))
    bench.host.stop(UID, 0.2)
    await bench.until(lambda s: s.phase == "exited")
    assert escaped(bench.root) == []


async def test_a_chain_of_forks_ends_with_a_stopped_shims_time(bench: Bench) -> None:
    """Each link lives only as long as it takes to fork the next."""
    async with bench.renewing(GRANTED):
        status = await attack(bench, "chain", count=0)
        assert status.shim_pid is not None
        os.kill(status.shim_pid, signal.SIGSTOP)
    try:
        await wait_for(lambda: not any(is_running(pid_of(w)) for w in status.workers))
    finally:
        os.kill(status.shim_pid, signal.SIGCONT)
    await bench.until(lambda s: s.phase == "exited")
    assert escaped(bench.root) == []


@pytest.mark.parametrize("way", WAYS)
async def test_what_left_its_session_does_not_outlive_a_shim_that_is_killed(bench: Bench, way: str) -> None:
    """Its environment is gone, and with it the mark; its parent, too."""
    status = await attack(bench, way, count=WAYS[way])
    assert status.shim_pid is not None
    os.kill(status.shim_pid, signal.SIGKILL)
    await bench.until(lambda s: s.phase == "gone")
    # One that the kernel has taken out of its cgroup as it ends is a process for a moment more.
    await wait_for(lambda: not escaped(bench.root))


async def test_what_left_its_session_does_not_outlive_a_shim_that_is_killed_while_no_agent_runs(bench: Bench) -> None:
    """The next agent finds no shim, and no mark; only where it was to look for them is known."""
    status = await attack(bench, *WAYS, count=sum(WAYS.values()))
    assert status.shim_pid is not None
    cgroup = PodCgroup.of(status.shim_pid)
    if cgroup is None:
        pytest.skip("needs a cgroup v2 that can be written")
    await bench.host.close()
    os.kill(status.shim_pid, signal.SIGKILL)
    await wait_for(lambda: not is_running(status.shim_pid or 0))
    assert escaped(bench.root) != []
    bench.host = bench.new_host()
    await bench.host.adopt()
    await bench.until(lambda s: s.phase == "gone")
    await wait_for(lambda: not escaped(bench.root))
    assert not cgroup.exists


async def test_an_agent_that_starts_ends_what_no_pod_has_and_leaves_alone_what_one_has(bench: Bench) -> None:
    """A cgroup of its run folder without a record; beside it, a pod that runs, and another agent's."""
    status = await attack(bench, "own_session", count=1)
    running = escaped(bench.root)
    strays = list[subprocess.Popen[bytes]]()
    other = bench.root / "other"
    other.mkdir()
    for path in (cgroup_of_pod(bench.root / "run", "0123456789"), cgroup_of_pod(other, "0123456789")):
        strays.append(subprocess.Popen(["sleep", "600"], env={}))  # noqa: ASYNC220
        if path is None or PodCgroup.make(path, strays[-1].pid) is None:
            strays[-1].kill()
            pytest.skip("needs a cgroup v2 that can be written")
    try:
        await bench.host.close()
        bench.host = bench.new_host()
        await bench.host.adopt()
        bench.grant()
        await wait_for(lambda: strays[0].poll() is not None)
        assert (await bench.until(lambda s: s.phase == "running")).shim_pid == status.shim_pid
        await wait_for(lambda: list(cgroups_left(bench.root / "run")) == [folder_name(UID)])
        assert escaped(bench.root) == running
        assert strays[1].poll() is None
    finally:
        for one in strays:
            one.kill()
            one.wait()
        for left in cgroups_left(other).values():
            left.remove()


STOPPER = f"""
import os, signal
os.setresuid({STOPPED_UID}, {STOPPED_UID}, {STOPPED_UID})
print("up", flush=True)
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except ProcessLookupError:
        pass
"""


@pytest.fixture
def stopper() -> Iterator[subprocess.Popen[bytes]]:
    """A user who stops each of his processes at once, whatever it is at."""
    with subprocess.Popen([SYSTEM_PYTHON, "-Sc", STOPPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()
    for process_folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if process_folder.stat().st_uid == STOPPED_UID:
                os.kill(int(process_folder.name), signal.SIGKILL)


async def test_a_shim_that_its_user_stops_before_it_is_executed_holds_up_no_agent(
    root: Path, stopper: subprocess.Popen[bytes]
) -> None:
    """Between its change of the user and its execution it was the user's, and the agent's loop waited for it."""
    dirs = DirsConfig(run=root / "run", state=root / "state", logs=root / "logs")
    host = ShimHost("n1", dirs, JobsConfig(), "127.0.0.1", (29400, 29899), ShimStart(SYSTEM_PYTHON), find_login)
    login = Login("stopped", STOPPED_UID, STOPPED_UID, (STOPPED_UID, OTHER))
    command = [SYSTEM_PYTHON, "-Sc", "import time; time.sleep(600)"]
    with (root / "log").open("ab") as log:
        for _ in range(40):
            started = asyncio.get_running_loop().create_future()

            def start(started: asyncio.Future[object] = started) -> None:
                made = host._fork_shim(command, {}, log, login)
                started.get_loop().call_soon_threadsafe(started.set_result, made)

            threading.Thread(target=start, daemon=True).start()
            process, link = await asyncio.wait_for(started, BOUND)
            with link:
                await wait_for(partial(is_stopped, process.pid))
            process.kill()
            process.wait()
    assert stopper.poll() is None


def is_stopped(pid: int) -> bool:
    """As the user that it was to become, with that user's groups."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    uids, gids, groups = (set(map(int, lines[name].split())) for name in ("Uid", "Gid", "Groups"))
    return lines["State"].startswith("T") and uids == gids == {STOPPED_UID} and groups == {STOPPED_UID, OTHER}


async def test_a_python_that_a_jobs_user_may_not_run_is_named(root: Path) -> None:
    private = root / "private"
    private.mkdir(mode=0o700)
    (private / "python").symlink_to(SYSTEM_PYTHON)
    async with open_bench(root, str(private / "python")) as bench:
        bench.host.prepare(UID, make_spec((SYSTEM_PYTHON, "-c", "pass"), bench.root / "job", user=ATTACKER))
        status = await bench.until(lambda s: s.phase == "unfit")
        assert status.reason == (
            f"the shim could not start: user {ATTACKER} may not run the agent's Python, {private}/python: install "
            "nodeagent where every user can read it"
        )
        assert not status.passing


async def test_limits_are_the_workers_and_never_the_shims(bench: Bench) -> None:
    """With so few descriptors neither a shim nor its watchdog could end anything."""
    for number, fork_server in enumerate((True, False), 1):
        spec = make_spec(
            (SYSTEM_PYTHON, "-c", "import time; time.sleep(600)"), bench.root / "job", user=ATTACKER,
            environ={"PATH": "/usr/bin:/bin"}, limits={"nofile": 8}, fork_server=fork_server,
        )  # fmt: skip
        first = await bench.ready(spec)
        assert first.phase == "ready", first.reason
        status = await bench.running(number, ({}, {}, {}, {}))
        pids = [pid_of(w) for w in status.workers]
        await wait_for(lambda: all(nofile(pid) == "8" for pid in pids))  # noqa: B023 (awaited here)
        own = bench.own() - {*pids}  # a worker is a fork of the shim for a moment
        assert all(nofile(pid) != "8" for pid in own)
        bench.host.stop(UID, None)
        ended = await bench.until(lambda s: s.phase == "exited")
        assert len(ended.exits) == 4
        bench.host.retire(UID)
        await wait_for(lambda: not bench.host.status())


async def test_a_fork_server_that_says_too_much_costs_only_itself(bench: Bench) -> None:
    (bench.root / "job" / "loud.py").write_text("raise ValueError('x' * 300_000)\n")
    (bench.root / "job" / "forged.py").write_text(
        "import json, os, socket, sys\n"
        "link = socket.socket(fileno=os.dup(json.loads(sys.argv[1])['fd']))\n"
        'for text in (\'[\' * 60_000, \'{}\', \'{"event": "forked", "id": 7, "pid": -1}\'): link.send(text.encode())\n'
    )
    for number, module in enumerate(("loud", "forged"), 1):
        spec = make_spec(
            (SYSTEM_PYTHON, "t.py"), bench.root / "job", user=ATTACKER, environ={"PATH": "/usr/bin:/bin"},
            preload=(module,),
        )  # fmt: skip
        first = await bench.ready(spec)
        assert first.phase == "ready", first.reason
        status = await bench.running(number)
        assert status.shim_pid == first.shim_pid
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")
        bench.host.retire(UID)
        await wait_for(lambda: not bench.host.status())


def nofile(pid: int) -> str:
    """The limit of its open files."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line.split()[3] for line in lines if line.startswith("Max open files"))
