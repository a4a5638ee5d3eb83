"""The host: adoption after an agent's restart, nodes that are unfit, users, who may speak to a shim."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.lease.grants import answer_file, grant_keys, grants_folder
from nodeagent.osutil.linux import is_running
from nodeagent.osutil.untrusted import UntrustedFolder
from nodeagent.pods import pod
from nodeagent.pods.folder import folder_name, state_folder
from nodeagent.pods.host import ShimHost
from nodeagent.pods.login import Login, NoAnswerError, UserError, find_login
from tests import readable
from tests.integration.shim_support import (
    ME,
    NOBODY,
    UID,
    make_spec,
    open_bench,
    pid_of,
    run_folders,
    shim_with,
    start_stranger,
    token,
    wait_for,
)
from tests.ports import free_ports

PYTHON = sys.executable
SLEEP = ("sh", "-c", "echo up; sleep 600")
SYSTEM_PYTHON = "/usr/bin/python3"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch users")


def system_python_is_new_enough() -> bool:
    try:
        probe = [SYSTEM_PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        return subprocess.run(probe, timeout=20).returncode == 0
    except OSError:
        return False


async def test_a_second_host_takes_over_the_same_processes(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(SLEEP, tmp_path))
        bench.host.promise(UID, token(1), True)
        await bench.until(lambda s: s.rendezvous)
        first = await bench.running(1, ({}, {}))
        await bench.host.close()
        bench.host = bench.new_host()
        await bench.host.adopt()
        assert bench.state().phase in ("unknown", "running"), "unknown until its shim is heard"
        second = await bench.until(lambda s: s.phase == "running")
        assert second == first
        bench.host.ping()  # a new agent counts anew
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path))  # it is there already
        assert [is_running(pid_of(w)) for w in second.workers] == [True, True]
        os.kill(pid_of(first.workers[0]), signal.SIGKILL)
        status = await bench.until(lambda s: s.exits)
        assert status.exits[0].signal == 9


async def test_an_older_agents_connection_is_closed(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(SLEEP, tmp_path))
        older = bench.host
        newer = bench.new_host()
        await newer.adopt()
        newer.ping()
        await wait_for(lambda: not older.connected(UID))
        await older.close()
        bench.host = newer
        await bench.until(lambda s: s.phase == "ready")
        await bench.run_another(1)


async def test_a_shim_that_died_while_no_agent_was_there(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(SLEEP, tmp_path))
        status = await bench.running()
        await bench.host.close()
        assert status.shim_pid is not None
        os.kill(status.shim_pid, signal.SIGKILL)
        await wait_for(lambda: not is_running(pid_of(status.workers[0])))
        bench.host = bench.new_host()
        await bench.host.adopt()
        await bench.until(lambda s: s.phase == "gone")
        assert bench.left() == []
        bench.grant()
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path))
        await bench.until(lambda s: s.phase == "ready")


async def test_a_pod_has_a_grant_record_from_before_its_shim_starts_to_its_end(tmp_path: Path) -> None:
    folder = grants_folder(tmp_path / "run")
    seen: list[tuple[list[str], bool]] = []
    async with open_bench(tmp_path) as bench:
        bench.host = bench.new_host(granted=lambda: seen.append((grant_keys(folder), bool(bench.host.status()))))
        status = await bench.ready(make_spec(SLEEP, tmp_path))
        key = folder_name(UID)
        assert seen == [([key], False)], "told once, before there is a shim"
        assert answer_file(folder / key).stat().st_uid == os.geteuid()
        assert status.shim_pid is not None
        os.kill(status.shim_pid, signal.SIGKILL)
        await bench.until(lambda s: s.phase == "gone")
        assert grant_keys(folder) == [], "nothing of it runs"
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path))
        await bench.until(lambda s: s.phase == "ready")
        assert seen[1:] == [([key], True)]
        await bench.host.close()
        (folder / "0123456789").touch()
        bench.host = bench.new_host()
        await bench.host.adopt()
        assert grant_keys(folder) == [key], "what is left of pods that are no more is removed"
        bench.host.retire(UID)
        await wait_for(lambda: not bench.host.status())
        assert list(folder.iterdir()) == []


async def test_a_shim_that_cannot_be_started_leaves_no_grant(tmp_path: Path) -> None:
    async with open_bench(tmp_path, str(tmp_path / "no python")) as bench:
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path))
        await bench.until(lambda s: s.phase == "unfit")
        assert grant_keys(grants_folder(tmp_path / "run")) == []


async def test_why_another_shim_cannot_be_started_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod, "LOOK_AGAIN", 0.2)
    python = shim_with(tmp_path, "")
    async with open_bench(tmp_path, python) as bench:
        status = await bench.ready(make_spec(SLEEP, tmp_path))
        assert status.shim_pid is not None
        os.kill(status.shim_pid, signal.SIGKILL)
        await bench.until(lambda s: s.phase == "gone")
        (tmp_path / "python").rename(tmp_path / "away")
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path))
        status = await bench.until(lambda s: s.phase == "unfit")
        assert re.match("the shim could not (be started|start): .*No such file or directory", status.reason)
        (tmp_path / "away").rename(tmp_path / "python")

        def prepared() -> bool:
            bench.host.prepare(UID, make_spec(SLEEP, tmp_path))
            return bench.state().phase == "ready"

        await wait_for(prepared)


async def test_a_shim_without_a_grant_record_makes_room_for_one_that_has_one(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(SLEEP, tmp_path))
        first = await bench.running()
        await bench.host.close()
        shutil.rmtree(grants_folder(tmp_path / "run"))
        bench.host = bench.new_host()
        await bench.host.adopt()
        gone = await bench.until(lambda s: s.phase == "gone")
        assert "no grant record" in gone.reason
        assert not is_running(pid_of(first.workers[0]))
        bench.grant()
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path))
        await bench.until(lambda s: s.phase == "ready")
        await bench.run_another(2)


async def test_rubbish_in_the_run_folder_is_removed(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        for name, content in (("empty", None), ("bad", "{")):
            (tmp_path / "run" / "pods" / name).mkdir(parents=True)
            if content is not None:
                (tmp_path / "run" / "pods" / name / "pod.json").write_text(content)
        await bench.host.adopt()
        await wait_for(lambda: not run_folders(tmp_path))
        assert dict(bench.host.status()) == {}


async def test_long_run_folder(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 40)
    async with open_bench(deep) as bench:
        await bench.ready(make_spec(SLEEP, tmp_path))
        await bench.running()
        await bench.host.close()
        bench.host = bench.new_host()
        await bench.host.adopt()
        await bench.until(lambda s: s.phase == "running")


async def test_unfit_and_fit_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "job"
    async with open_bench(tmp_path) as bench:
        status = await bench.ready(make_spec((PYTHON, "t.py"), folder))
        assert (status.phase, status.reason, status.code) == ("unfit", f"working_dir {folder} is missing", 0)
        folder.mkdir()
        await bench.until(lambda s: s.phase == "ready")


async def test_unfit_command(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        spec = make_spec(("pythn", "t.py"), tmp_path, environ={"PATH": "/usr/bin"})
        status = await bench.ready(spec)
        assert (status.reason, status.code) == ("command 'pythn' was not found in PATH (/usr/bin)", 127)
        bench.host.start(UID, bench.order(1))
        status = await bench.until(lambda s: s.refused)
        assert "pythn" in status.refused


async def test_unknown_user(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path, user="nobody-of-that-name"))
        status = await bench.until(lambda s: s.phase == "unfit")
        assert (status.phase, status.reason) == ("unfit", "user nobody-of-that-name does not exist on n7")
        assert not status.passing
        bench.host.retire(UID)
        assert dict(bench.host.status()) == {}


async def test_a_user_database_that_is_silent_may_answer_later(tmp_path: Path) -> None:
    def look(user: str, node: str, allow_root: bool) -> Login:
        raise NoAnswerError(f"{node} waits for {user}")

    async with open_bench(tmp_path) as bench:
        bench.host = bench.new_host(look=look)
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path))
        status = await bench.until(lambda s: s.phase == "unfit")
        assert (status.reason, status.passing) == (f"n7 waits for {ME}", True)


async def test_a_user_database_that_hangs_holds_up_no_other_pod(tmp_path: Path) -> None:
    """The loop that starts pods renews the lease: 20 s of LDAP fenced every pod of the node."""
    asked, answers = threading.Event(), threading.Event()

    def look(user: str, node: str, allow_root: bool) -> Login:
        if user == "far":
            asked.set()
            answers.wait(30)
            user = ME
        return find_login(user, node, allow_root)

    async with open_bench(tmp_path) as bench:
        bench.host = bench.new_host(look=look)
        try:
            bench.host.prepare("slow", make_spec(SLEEP, tmp_path, user="far"))
            assert await asyncio.to_thread(asked.wait, 10)
            bench.host.prepare("slow", make_spec(SLEEP, tmp_path, user="far"))  # as the next round of the agent
            assert not answers.is_set()
            await bench.ready(make_spec(SLEEP, tmp_path))
            assert "slow" not in bench.host.status()
            bench.host.retire("slow")
        finally:
            answers.set()
        bench.host.prepare("slow", make_spec(SLEEP, tmp_path, user="far"))
        await wait_for(lambda: "slow" in bench.host.status())
        bench.host.retire("slow")
        await wait_for(lambda: "slow" not in bench.host.status())


async def test_a_shim_that_cannot_start(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho no python here >&2; exit 1\n")
    program.chmod(0o755)
    async with open_bench(tmp_path, str(program)) as bench:
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path))
        status = await bench.until(lambda s: s.phase == "unfit")
        assert status.reason == "the shim could not start: no python here"
        assert status.passing, "which is no fault of the job"
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path))  # not at once again
        assert bench.state().phase == "unfit"


async def test_a_shim_whose_promise_is_damaged_says_what_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod, "LOOK_AGAIN", 0.2)
    file = state_folder(tmp_path / "state", UID) / "highest.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xff\xfe\x00")
    async with open_bench(tmp_path) as bench:
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path))
        status = await bench.until(lambda s: s.phase == "unfit")
        assert status.reason.startswith(f"the shim could not start: {file} is damaged")
        assert status.passing, "which is no fault of the job"
        file.unlink()

        def prepared() -> bool:
            bench.host.prepare(UID, make_spec(SLEEP, tmp_path))
            return bench.state().phase == "ready"

        await wait_for(prepared)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@as_root
async def test_a_full_disk_may_pass_and_a_missing_program_does_not(tmp_path: Path, small_disk: Path) -> None:
    async with open_bench(small_disk) as bench:
        status = await bench.ready(make_spec(("no-such-program",), tmp_path))
        assert (status.phase, status.code, status.passing) == ("unfit", 127, False)
        bench.host.retire(UID)
        await wait_for(lambda: not bench.host.status())
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(1 << 12))
        bench.host.prepare(UID, make_spec(SLEEP, tmp_path))
        assert (await bench.until(lambda s: s.phase == "unfit")).passing
        ballast.unlink()
        bench.grant()

        def looks_again() -> bool:
            bench.host.prepare(UID, make_spec(SLEEP, tmp_path))  # as each round of the agent
            return bench.state().phase == "ready"

        await wait_for(looks_again)


@as_root
def test_root_needs_leave() -> None:
    with pytest.raises(UserError, match="n7 runs no jobs of root"):
        find_login("root", "n7", allow_root=False)
    assert find_login("root", "n7", allow_root=True).uid == 0


def test_without_root_only_the_own_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UserError, match="own user only"):
        find_login(ME, "n7", allow_root=True)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can pass through (pytest's own are private)."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@as_root
@pytest.mark.skipif(not system_python_is_new_enough(), reason="needs a Python 3.11 that every user can run")
async def test_another_user(open_folder: Path) -> None:
    other = pwd.getpwnam("nobody")
    work = open_folder / "job"
    work.mkdir()
    os.chown(work, other.pw_uid, other.pw_gid)
    (work / "t.py").write_text(
        "import os, json, resource\n"
        "print(json.dumps([os.getuid(), os.geteuid(), os.getgid(), os.getgroups(), os.environ['USER']]))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('CapEff')])\n"
    )
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        spec = make_spec(
            (SYSTEM_PYTHON, "t.py"), work, user="nobody", limits={"nofile": 300}, checkpoint_dir="ckpt",
            environ={"PATH": "/usr/bin:/bin", "USER": "root"},
        )  # fmt: skip
        status = await bench.ready(spec)
        assert status.phase == "ready" and status.fork_server_pid is not None
        await bench.run()
        await wait_for(lambda: len(bench.output()) == 3)
        facts, limits, capabilities = bench.output()
        groups = os.getgrouplist("nobody", other.pw_gid)
        assert json.loads(facts) == [other.pw_uid, other.pw_uid, other.pw_gid, groups, "nobody"]
        assert limits == "(300, 300)"
        assert capabilities == "['0000000000000000']"
        assert (work / "ckpt").stat().st_uid == other.pw_uid


@as_root
@pytest.mark.skipif(not system_python_is_new_enough(), reason="needs a Python 3.11 that every user can run")
async def test_another_users_folders_are_checked_as_that_user(open_folder: Path) -> None:
    work = open_folder / "private"
    work.mkdir(mode=0o700)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        status = await bench.ready(make_spec(("sh", "t.sh"), work, user="nobody", environ={"PATH": "/bin"}))
        assert status.reason == f"working_dir {work} may not be entered by user nobody"
        work.chmod(0o755)
        (work / "ckpt").mkdir(mode=0o755)
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        spec = make_spec(("sh",), work, user="nobody", checkpoint_dir="ckpt", environ={"PATH": "/bin"})
        assert (await bench.ready(spec)).reason == f"checkpoint_dir {work}/ckpt is not writable for user nobody"
    async with open_bench(open_folder, readable.program(open_folder, SYSTEM_PYTHON)) as bench:
        spec = make_spec(("sh",), work, user="nobody", limits={"nofile": hard + 1}, environ={"PATH": "/bin"})
        assert f"is above what user nobody may have ({hard})" in (await bench.ready(spec)).reason


@as_root
async def test_strangers_are_refused(open_folder: Path) -> None:
    """Neither root nor the job's user: the socket's mode keeps them out, and the kernel's word on who they are."""
    async with open_bench(open_folder) as bench:
        await bench.ready(make_spec(SLEEP, open_folder))
        folder = run_folders(open_folder)[0]
        assert (folder / "s").stat().st_mode & 0o777 == 0o600
        folder.chmod(0o755)
        (folder / "s").chmod(0o666)
        answer = await asyncio.to_thread(answer_to, pwd.getpwnam("nobody").pw_uid, folder / "s")
        assert answer == b""


def answer_to(uid: int, path: Path) -> bytes:
    """What a process of this user hears from the socket."""
    code = (
        "import os, socket, sys\nos.setuid(int(sys.argv[1]))\nlink = socket.socket(socket.AF_UNIX)\n"
        "link.connect(sys.argv[2])\nlink.settimeout(20)\nos.write(1, link.recv(100))\n"
    )
    return subprocess.run([PYTHON, "-c", code, str(uid), str(path)], stdout=subprocess.PIPE, timeout=30).stdout


async def test_others_may_look_but_not_command(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(SLEEP, tmp_path))
        folder = run_folders(tmp_path)[0]
        with UntrustedFolder(folder.parent, folder.name) as opened:
            link, _ = opened.connect("s")
        link.setblocking(True)
        with link, link.makefile("rw") as lines:
            link.settimeout(20)
            assert json.loads(await asyncio.to_thread(lines.readline))["status"]["phase"] == "ready"
            for command, answer in (({"v": 1, "op": "retire"}, "only the agent"), ({"v": 2, "op": "x"}, "version 1")):
                lines.write(json.dumps(command) + "\n")
                lines.flush()
                assert answer in json.loads(await asyncio.to_thread(lines.readline))["error"]
        assert bench.state().phase == "ready"


async def test_promise_survives_the_shim_and_picks_new_ports(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        spec = make_spec(SLEEP, tmp_path)
        await bench.ready(spec)
        ports = []
        for number in (3, 4):
            bench.host.promise(UID, token(number), True)
            status = await bench.until(lambda s, n=number: s.rendezvous and s.rendezvous.token == token(n))  # type: ignore[misc]
            assert status.rendezvous is not None
            assert not status.rendezvous.store_hosted
            port = int(status.rendezvous.address.rpartition(":")[2])
            assert 23100 <= port <= 23999
            with pytest.raises(OSError, match="in use"), socket.socket() as other:
                other.bind(("127.0.0.1", port))
            ports.append(port)
        assert ports[0] != ports[1]
        bench.host.promise(UID, token(5), False)
        await bench.until(lambda s: s.highest == token(5) and s.rendezvous is None)
        shim = bench.state().shim_pid
        assert shim is not None
        os.kill(shim, signal.SIGKILL)
        await bench.until(lambda s: s.phase == "gone")
        bench.host.prepare(UID, spec)
        assert (await bench.until(lambda s: s.phase == "ready")).highest == token(5)


async def test_a_pod_holds_what_comes_next_where_its_node_is_reached_now(tmp_path: Path) -> None:
    """Without ports at the old address it was kept from leading for good. One whose agent was restarted since, too."""
    async with open_bench(tmp_path) as bench:
        bench.host = bench.new_host(address="192.0.2.1")  # no address of this machine
        await bench.ready(make_spec(SLEEP, tmp_path))
        bench.host.promise(UID, token(1), True)
        await bench.until(lambda s: "192.0.2.1 is no address of this machine" in s.portless)
        bench.host.relocate("127.0.0.1")
        await bench.until(lambda s: not s.portless)
        bench.host.promise(UID, token(1), True)
        status = await bench.until(lambda s: s.rendezvous is not None)
        assert status.rendezvous is not None and status.rendezvous.address.startswith("127.0.0.1:")
        await bench.host.close()
        bench.host = bench.new_host(address="127.0.0.2")
        await bench.host.adopt()
        bench.host.promise(UID, token(2), True)
        status = await bench.until(lambda s: s.rendezvous is not None and s.rendezvous.token == token(2))
        assert status.rendezvous is not None and status.rendezvous.address.startswith("127.0.0.2:")


BINDS = """
import os, socket, time
while not os.path.exists(os.environ["FLAG"]):
    time.sleep(0.01)
socket.create_server(("127.0.0.1", int(os.environ["PORT"])))
"""
"""A rank 0 that takes its time until it serves the rendezvous."""


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process is started by root")
@pytest.mark.parametrize("fails", [True, False], ids=["its-worker-fails", "all-are-killed"])
async def test_a_port_that_another_user_took_before_rank_0_is_seen(tmp_path: Path, fails: bool) -> None:
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((sys.executable, "-c", BINDS), tmp_path))
        bench.host.promise(UID, token(1), True)
        held = (await bench.until(lambda s: s.rendezvous)).rendezvous
        assert held is not None and not held.store_hosted
        port, flag = held.address.rpartition(":")[2], tmp_path / "go"
        stranger = start_stranger(port)
        try:
            await bench.running(1, ({"PORT": port, "FLAG": str(flag)},))
            assert stranger.stdout is not None and await asyncio.to_thread(stranger.stdout.readline) == "has it\n"
            if fails:
                flag.touch()
            else:
                bench.host.stop(UID, None)
            ended = await bench.until(lambda s: s.phase == "exited")
            assert ended.taken == f"uid {NOBODY} listens on port {port}"
            assert [e.stopped for e in ended.exits] == [not fails]
        finally:
            stranger.kill()
            stranger.communicate()
        flag.touch()
        await bench.run(2, ({"PORT": port, "FLAG": str(flag)},))
        assert not bench.state().taken, "nobody has it, and it was not kept for this generation"


async def test_two_hosts_share_a_port_range(tmp_path: Path) -> None:
    async with open_bench(tmp_path / "a") as one, open_bench(tmp_path / "b") as two:
        first, last = free_ports(2)
        one.host, two.host = one.new_host(ports=(first, last)), two.new_host(ports=(first, last))
        ports = set()
        for bench in (one, two):
            await bench.ready(make_spec(SLEEP, tmp_path))
            bench.host.promise(UID, token(1), True)
            status = await bench.until(lambda s: s.rendezvous)
            assert status.rendezvous is not None
            ports.add(status.rendezvous.address)
        assert ports == {f"127.0.0.1:{first}", f"127.0.0.1:{last}"}
        one.host.promise(UID, token(2), True)
        status = await one.until(lambda s: "no free port" in s.reason)
        assert status.rendezvous is None


def test_the_host_is_a_pod_host() -> None:
    from nodeagent.pods.base import PodHost

    kind: type[PodHost] = ShimHost
    assert kind is ShimHost
