"""Root ends what a pod's user may not signal, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from nodeagent.osutil.linux import is_running, may_signal, start_time
from nodeagent.pods import others
from nodeagent.pods.others import ShimTree, end_others, end_tree

OWNER, OTHER = 65534, 100000
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run as several users")


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """One of the pod's user, one of another."""
    found = [subprocess.Popen(["sleep", "600"], user=uid) for uid in (OWNER, OTHER)]
    yield found
    for one in found:
        one.kill()
        one.wait()


def test_only_those_of_others_are_ended(processes: list[subprocess.Popen[bytes]]) -> None:
    own, other = processes
    assert [may_signal(one.pid, OWNER) for one in processes] == [True, False]
    assert end_others(lambda: [own.pid, other.pid, 1 << 30], OWNER) == []
    assert (own.poll(), other.wait()) == (None, -signal.SIGKILL)


def test_who_has_left_the_pod_meanwhile_is_not_signalled(processes: list[subprocess.Popen[bytes]]) -> None:
    """Its number was another's by then."""
    looks = iter(([processes[1].pid], []))
    assert end_others(lambda: next(looks, []), OWNER) == []
    assert processes[1].poll() is None


def test_what_does_not_end_is_named(processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "LIMIT", 0.1)
    with monkeypatch.context() as held:
        held.setattr(signal, "pidfd_send_signal", lambda *_: None)
        assert end_others(lambda: [one.pid for one in processes], OWNER) == [processes[1].pid]


def test_a_tree_ends_below_its_shim_which_stays_stopped() -> None:
    """So it starts no watchdog anew; one of which something is left goes on."""
    script = "sleep 600 & while sleep 0.01; do :; done"
    with subprocess.Popen(["sh", "-c", script]) as shim:
        try:
            tree = ShimTree(shim.pid, start_time(shim.pid))
            while not (before := tree.pids()):
                pass
            assert end_tree(tree) == []
            assert not any(is_running(pid) for pid in before)
            assert tree.lives
            assert ShimTree(shim.pid, 0).pids() == ShimTree(1 << 30, None).pids() == [], "another process' number"
        finally:
            shim.kill()


def test_a_shim_of_whose_tree_something_is_left_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "LIMIT", 0.1)
    monkeypatch.setattr(others, "_kill", lambda *_: True)
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"]) as shim:
        try:
            tree = ShimTree(shim.pid, start_time(shim.pid))
            while not (below := tree.pids()):
                pass
            assert end_tree(tree) == below
            os.kill(below[0], signal.SIGKILL)
            assert shim.wait(30.0) == 0
        finally:
            shim.kill()
