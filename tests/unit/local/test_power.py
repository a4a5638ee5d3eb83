"""The power cut: everything with a node's mark goes at once, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from nodeagent.local import power
from nodeagent.local.layout import LocalError
from nodeagent.osutil.linux import read_environ, stat_fields
from tests.unit.local.helpers import running

TREE = """
import os, subprocess, sys, time
# a shim in its own session, whose fork server forks workers that change their environment and session
shim = '''
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid(); os.environ.clear(); os.environ["ELSE"] = "1"
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        os._exit(0)
for _ in range(3):
    os.wait()  # those in between have ended: from now on the count stands still
print("whole", flush=True)
time.sleep(600)
'''
subprocess.Popen([sys.executable, "-c", shim], start_new_session=True)
# a worker whose environment was made anew, without the mark, but whose parent is marked
subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
time.sleep(600)
"""


def start(environ: dict[str, str], code: str = TREE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def cluster() -> Iterator[str]:
    uid = uuid.uuid4().hex[:12]
    yield uid
    power.cut(uid)


def wait_count(cluster: str, node: str | None, count: int) -> set[int]:
    deadline = time.monotonic() + 10
    while len(found := power.processes(cluster, node)) != count:
        assert time.monotonic() < deadline, f"{len(found)} processes of {node}, not {count}"
        time.sleep(0.01)
    return found


def test_a_cut_ends_all_of_one_node_and_nothing_else(cluster: str) -> None:
    with (
        start({power.MARK: power.mark(cluster, "n1")}) as first,
        start({power.MARK: power.mark(cluster, "n10")}) as other,
        start({power.MARK: power.mark("another", "n1")}, "import time; time.sleep(600)") as stranger,
    ):
        try:
            for tree in (first, other):
                assert tree.stdout is not None
                assert tree.stdout.readline() == "whole\n"
            ours = wait_count(cluster, "n1", 6)  # parent, shim, three forked workers, the one without a mark
            theirs = wait_count(cluster, "n10", 6)
            assert power.cut(cluster, "n1") == 6
            assert not any(map(running, ours))
            assert all(map(running, theirs | {stranger.pid}))
            assert first.wait(5) == -signal.SIGKILL

            assert power.cut(cluster) == 6  # the rest of the cluster
            assert not any(map(running, theirs))
            assert other.wait(5) == -signal.SIGKILL
            assert running(stranger.pid)
            assert power.cut(cluster) == 0
        finally:
            stranger.kill()
            power.cut(cluster)


def test_a_cut_reaches_frozen_processes_and_those_that_ignore_sigterm(cluster: str) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    with start({power.MARK: power.mark(cluster, "n1")}, code) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        os.kill(deaf.pid, signal.SIGSTOP)
        assert power.cut(cluster, "n1") == 1
        assert deaf.wait(5) == -signal.SIGKILL


def test_a_cut_wins_against_a_process_that_keeps_forking(cluster: str) -> None:
    code = (
        "import os, time; print('up', flush=True)\n"
        "while True:\n"
        "    if os.fork() == 0: time.sleep(0.2); os._exit(0)\n"
        "    try:\n"
        "        while os.waitpid(-1, os.WNOHANG)[0]: pass\n"
        "    except ChildProcessError: pass\n"
        "    time.sleep(0.002)"
    )
    with start({power.MARK: power.mark(cluster, "n1")}, code) as forker:
        assert forker.stdout is not None
        forker.stdout.readline()
        assert power.cut(cluster, "n1") >= 1
        assert power.processes(cluster) == set()


def test_what_does_not_end_is_named(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "_signal", lambda pids, number: None)  # as a process stuck in the kernel
    with start({power.MARK: power.mark(cluster, "n1")}, "import time; time.sleep(600)") as stuck:
        try:
            wait_count(cluster, "n1", 1)  # while it becomes its program it has no environment to be read
            with pytest.raises(LocalError, match=str(stuck.pid)):
                power.cut(cluster, "n1", bound=0.2)
        finally:
            stuck.kill()


@dataclass
class Environments:
    """Of processes, as they are read."""

    held: set[int] = field(default_factory=set)
    """Those whose environment is not to be had until the test is over."""
    asked: list[int] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def read(self, pid: int) -> bytes:
        self.asked.append(pid)
        if pid in self.held:
            self.over.wait()
        return read_environ(pid)


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> Iterator[Environments]:
    environments = Environments()
    monkeypatch.setattr(power, "read_environ", environments.read)
    monkeypatch.setattr(power, "HELD", 0.2)
    yield environments
    environments.over.set()


def parent(pid: int) -> int:
    fields = stat_fields(pid)
    assert fields is not None
    return int(fields[1])


SLEEP = "import time; time.sleep(600)"


def test_an_environment_that_is_held_keeps_no_other_from_being_found(cluster: str, environments: Environments) -> None:
    marked = {power.MARK: power.mark(cluster, "n1")}
    with start({}, SLEEP) as one, start({}, SLEEP) as two, start(marked, SLEEP) as victim:
        try:
            wait_count(cluster, "n1", 1)
            environments.held = {one.pid, two.pid}
            assert power.cut(cluster, "n1") == 1
            assert victim.wait(5) == -signal.SIGKILL
        finally:
            for process in (one, two, victim):
                process.kill()


def test_what_hangs_is_waited_for_once(cluster: str, environments: Environments) -> None:
    with start({}, SLEEP) as holder:
        environments.held = {holder.pid}
        try:
            search = power.Search(cluster, None)
            for _ in range(3):
                assert search.processes() == set()
            assert environments.asked.count(holder.pid) == 1
        finally:
            holder.kill()


def test_no_environment_is_read_of_what_is_below_a_marked_process(cluster: str, environments: Environments) -> None:
    with start({power.MARK: power.mark(cluster, "n1")}) as tree:
        try:
            assert tree.stdout is not None
            assert tree.stdout.readline() == "whole\n"
            found = wait_count(cluster, "n1", 6)
            environments.asked.clear()
            assert power.processes(cluster, "n1") == found
            assert found & set(environments.asked) <= {tree.pid} | {pid for pid in found if parent(pid) not in found}
        finally:
            power.cut(cluster)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
def test_without_root_no_other_users_environment_is_read(
    cluster: str, environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"], user=65534, group=65534, extra_groups=[]) as other:
        try:
            power.processes(cluster)
            assert other.pid in environments.asked, "root looks, since its jobs may be another user's"
            environments.asked.clear()
            monkeypatch.setattr(os, "geteuid", lambda: 4711)
            power.processes(cluster)
            assert environments.asked == []
        finally:
            other.kill()


def test_an_environment_is_stripped_of_the_mark() -> None:
    assert power.unmarked({power.MARK: "x/n1", "A": "b"}) == {"A": "b"}
