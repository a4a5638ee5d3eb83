"""What pods use, measured on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from nodeagent.agent.machine import SLACK, Meter, cpu_spent, machine_usage
from nodeagent.model.pod import WorkerState
from nodeagent.osutil.linux import family
from nodeagent.pods.base import PodStatus

BUSY = """
import os, sys
held = b"x" * (40 << 20)
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
while True:
    pass
"""


@pytest.fixture
def busy() -> Iterator[tuple[int, int]]:
    """(a process that computes and holds 40 MiB, its idle child)."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


def status(*pids: int, shim: int | None = None) -> PodStatus:
    workers = tuple(WorkerState(rank=i, local_rank=i, pid=pid, state="running") for i, pid in enumerate(pids))
    return PodStatus(uid="u", phase="running", shim_pid=shim, workers=workers)


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def test_a_pods_processes_are_counted_with_what_they_started(busy: tuple[int, int]) -> None:
    meter, at = Meter(), now()
    first = meter.measure({"u": status(busy[0])}, at)["u"]
    assert (first.cpu, first.processes) == (None, 2)
    assert first.memory > 40 << 20
    end, seen = time.monotonic() + 20, first
    while not seen.cpu and time.monotonic() < end:
        time.sleep(0.1)
        before, at = at, now()
        seen = meter.measure({"u": status(busy[0])}, at)["u"]
    spent = (seen.cpu or 0) * (at - before)
    assert 0 < spent < 2 * (now() - before)  # it is read some time after `at`, a long one where all stands still


def test_nothing_is_read_of_pods_without_processes() -> None:
    ended = PodStatus(
        uid="u", phase="exited", workers=(WorkerState(rank=0, local_rank=0, pid=os.getpid(), state="exited", exit=0),)
    )
    assert ended.pids == []
    assert Meter().measure({"u": ended}, now()) == {}


def test_each_process_counts_once_and_no_more_than_the_bound(busy: tuple[int, int]) -> None:
    assert family([busy[0], busy[1], busy[0]], 10) == [busy[0], busy[1]]
    assert family([busy[0]], 1) == [busy[0]]


def test_a_process_that_is_gone_counts_for_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    used = Meter().measure({"u": status(gone.pid)}, now())["u"]
    assert (used.processes, used.memory) == (0, 0)


@pytest.mark.parametrize(
    ("start", "before", "shown"),
    [
        (100, (100, 30), 20),
        (100, (90, 30), 0),  # the number is another process's now, which is older than the last look
        (100_000, (90, 30), 50),
        (100_000, None, 50),
        (100, None, 0),
    ],
)
def test_cpu_since_the_last_look(start: int, before: tuple[int, int] | None, shown: int) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    assert cpu_spent(start, 50, before, (100_000 - SLACK) / ticks) == shown


def test_the_machine() -> None:
    seen = machine_usage()
    assert 0 < seen.memory_used < seen.memory_total
    assert seen.cpus == os.cpu_count()


def test_a_pod_that_names_many_processes_leaves_the_others_theirs(busy: tuple[int, int]) -> None:
    many = status(*range(10_000_000, 10_004_096))
    used = Meter().measure({"evil": many, "good": status(busy[0])}, now())
    assert used["good"].processes == 2
