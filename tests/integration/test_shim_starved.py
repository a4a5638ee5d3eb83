"""What a shim does when there is no process, no descriptor or no room on a disk to have: what runs goes on, what was to
start is refused with the reason or tried again.

The shim under test is the real one, run by a small program in which one call fails at first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from nodeagent.model.jobspec import Hang, Hooks
from nodeagent.osutil.linux import is_running
from nodeagent.pods.base import StartOrder
from nodeagent.shim.exits import LOST
from tests.integration.roles_support import spec as roles_spec
from tests.integration.shim_support import UID, make_spec, open_bench, pid_of, shim_with, token, wait_for
from tests.integration.test_shim_exits import ANSWER_LOST
from tests.integration.test_shim_watchdog import watchdog

FAILING = """
import errno, os
def failing(module, name, calls):
    "These calls (the first one is 1) find the process table full."
    real, count = getattr(module, name), iter(range(1, 1000))
    def call(*given, **more):
        if next(count) in calls:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real(*given, **more)
    setattr(module, name, call)
from nodeagent.shim import hook, processes, rendezvous
from nodeagent.shim.forkserver import pool
from nodeagent.shim.hang import watch
"""
FULL = "Resource temporarily unavailable"


def starved(folder: Path, *changes: str) -> str:
    return shim_with(folder, FAILING + "\n".join(changes))


@pytest.mark.parametrize("call", ["hook, 'start_program'", "hook, 'watched'", "hook, 'two_captures'"])
async def test_without_a_process_for_pre_start_the_start_is_refused(tmp_path: Path, call: str) -> None:
    python = starved(tmp_path, f"failing({call}, [1])")
    async with open_bench(tmp_path, python) as bench:
        job = make_spec(("sleep", "600"), tmp_path, hooks=Hooks(pre_start=("true",)))
        await bench.ready(job)
        status = await bench.run()
        assert (status.refused, status.exits) == (f"hook pre_start could not be started ({FULL})", ())
        await bench.run_another(2)


async def test_without_a_process_for_post_stop_the_pod_ends_all_the_same(tmp_path: Path) -> None:
    python = starved(tmp_path, "failing(hook, 'start_program', [1])")
    async with open_bench(tmp_path, python) as bench:
        before = await bench.ready(make_spec(("true",), tmp_path, hooks=Hooks(post_stop=("true",))))
        status = await bench.run()
        assert [(end.code, end.signal) for end in status.exits] == [(0, None)]
        assert status.shim_pid == before.shim_pid
        await bench.logged(f"hook post_stop could not be started ({FULL})")


async def test_a_watchdog_that_cannot_be_started_again_is_tried_until_it_can(tmp_path: Path) -> None:
    python = starved(tmp_path, "fence.START_AGAIN = 0.05", "failing(fence, 'start_function', [2, 3])")
    async with open_bench(tmp_path, python) as bench:
        before = await bench.ready(make_spec(("sleep", "600"), tmp_path, fork_server=False))
        status = await bench.running()
        old = watchdog(bench)
        assert old is not None
        os.kill(old, signal.SIGKILL)
        await wait_for(lambda: watchdog(bench) not in (None, old))
        await bench.logged(f"no watchdog for now: {FULL}", "shim.log")
        assert is_running(pid_of(status.workers[0]))
        assert bench.state().shim_pid == before.shim_pid


async def test_checks_that_cannot_be_started_are_tried_until_they_can(tmp_path: Path) -> None:
    python = starved(tmp_path, "prepare.CHECK_AGAIN = 1.0", "failing(prepare, 'start_function', [1, 2])")
    async with open_bench(tmp_path, python) as bench:
        status = await bench.ready(make_spec(("sleep", "600"), tmp_path))
        assert (status.phase, status.reason) == ("unfit", f"no process for the checks: {FULL}")
        shim = status.shim_pid
        status = await bench.until(lambda s: s.phase == "ready")
        assert status.shim_pid == shim


@pytest.mark.parametrize("call", ["client, 'start_program'", "client.socket, 'socketpair'"])
async def test_without_a_process_for_the_fork_server_workers_start_cold(tmp_path: Path, call: str) -> None:
    (tmp_path / "t.py").write_text("print('up', flush=True)")
    first = 1 if "program" in call else 2  # the watchdog's is the first
    async with open_bench(tmp_path, starved(tmp_path, f"failing({call}, [{first}])")) as bench:
        await bench.ready(make_spec((sys.executable, "t.py"), tmp_path))
        status = await bench.run()
        assert [end.code for end in status.exits] == [0]
        assert f"no process for it: {FULL}; workers start without a fork server" in status.reason


@pytest.mark.parametrize("call", ["pool, 'watched'", "pool.socket, 'socketpair'"])
async def test_workers_that_cannot_be_preforked_are_forked(tmp_path: Path, call: str) -> None:
    (tmp_path / "t.py").write_text("print('up', flush=True)")
    calls = "[1]" if "watched" in call else "[3]"  # those of the watchdog and the fork server come first
    async with open_bench(tmp_path, starved(tmp_path, f"failing({call}, {calls})")) as bench:
        before = await bench.ready(make_spec((sys.executable, "t.py"), tmp_path))
        await bench.run()
        await wait_for(lambda: FULL in bench.state().reason)
        status = await bench.run(2)
        assert [end.code for end in status.exits] == [0]
        assert status.shim_pid == before.shim_pid


async def test_a_start_that_a_disk_refused_is_made_when_it_is_asked_for_again(tmp_path: Path) -> None:
    change = (
        "real, full = main.write_atomic, [1]\n"
        "def write_atomic(path, *more, **named):\n"
        "    if path.name == 'roles.json' and full:\n"
        "        full.pop()\n"
        "        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "    real(path, *more, **named)\n"
        "main.write_atomic = write_atomic"
    )
    async with open_bench(tmp_path, starved(tmp_path, change)) as bench:
        await bench.ready(roles_spec(tmp_path, None))
        bench.host.promise(UID, token(1), False, 2)
        await bench.until(lambda s: s.highest == token(1) and len(s.ports) == 2)
        order = bench.order(1, ({}, {})).model_dump()
        order |= {"places": ("server.0", "trainer.0"), "roles_file": json.dumps({"server": []})}
        bench.host.start(UID, StartOrder.model_validate(order))
        bench.host.start(UID, StartOrder.model_validate(order))
        await bench.until(lambda s: s.generation == token(1) and s.workers)
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


async def test_a_stop_reaches_workers_whose_stacks_are_only_just_being_read(tmp_path: Path) -> None:
    """The helper that reads them has no group of its own yet."""
    change = (
        "def helper(*_, **__):\n"
        "    if pid := os.fork():\n"
        "        return pid\n"
        f"    open({str(tmp_path / 'reading')!r}, 'w').close()\n"
        "    time.sleep(600)\n"
        "watch.start_program = helper"
    )
    async with open_bench(tmp_path, starved(tmp_path, change)) as bench:
        await bench.ready(make_spec(("sleep", "600"), tmp_path, fork_server=False, hang=Hang(progress=1.0)))
        await bench.running()
        await wait_for((tmp_path / "reading").exists)
        bench.host.stop(UID, None)
        await bench.until(lambda s: s.phase == "exited")


SAVES = """
import signal, sys, threading
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
threading.Event().wait()
"""


async def test_a_worker_that_could_not_be_looked_at_is_asked_to_stop_until_it_can(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SAVES)
    async with open_bench(tmp_path, starved(tmp_path, "failing(grace, 'saves_itself', [1, 2])")) as bench:
        await bench.ready(make_spec((sys.executable, "t.py"), tmp_path))
        await bench.running()
        await bench.printed("up")
        bench.host.stop(UID, 600.0)
        status = await bench.until(lambda s: s.phase == "exited")
        assert [(end.code, end.stopped) for end in status.exits] == [(0, True)]
        await bench.logged("rank 0 is asked to stop a little later", "shim.log", 2)


async def test_a_worker_whose_status_is_lost_is_looked_for_until_it_can_be(tmp_path: Path) -> None:
    change = f"{ANSWER_LOST.format(forged=0)}\nfailing(exits, 'is_reaped_elsewhere', [1, 2])"
    (tmp_path / "t.py").write_text("print('up', flush=True)")
    async with open_bench(tmp_path, starved(tmp_path, change)) as bench:
        await bench.ready(make_spec((sys.executable, "t.py"), tmp_path))
        status = await bench.run()
        assert [(end.signal, end.error) for end in status.exits] == [(signal.SIGKILL, LOST)]


async def test_a_stop_that_failed_is_asked_for_again(tmp_path: Path) -> None:
    async with open_bench(tmp_path, starved(tmp_path, "failing(gang.LocalGang, 'stop', [1])")) as bench:
        await bench.ready(make_spec(("sleep", "600"), tmp_path))
        await bench.running()

        def asked_again() -> bool:
            bench.host.stop(UID, None)  # agents do, with each of their rounds
            return bench.state().phase == "exited"

        await wait_for(asked_again)


FIRST_LOOKS_FAIL = """
looks = 0
def again(self, real=gang.LocalGang._report_stuck):
    global looks
    looks, gang.STUCK_AFTER = looks or 1, 1.0
    real(self)
def look(self, real=processes.ShimChildren.kill_orphans):
    global looks
    if looks == 0:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    looks += 1
    return real(self) or [0] * (looks == 2)  # a process takes a while to end
gang.STUCK_AFTER, gang.LocalGang._report_stuck, processes.ShimChildren.kill_orphans = 0.1, again, look
processes.ShimChildren.orphans = lambda _: os._exit(1)
"""
"""Looks fail until the one that comes when what is left may count as stuck: that has just been killed, and does not."""


async def test_what_a_worker_left_is_looked_for_until_it_can_be(tmp_path: Path) -> None:
    """Nobody else has to end it, and its shim with it: how the workers ended is not lost."""
    async with open_bench(tmp_path, starved(tmp_path, FIRST_LOOKS_FAIL)) as bench:
        leaves = "setsid sleep 600 & echo $! > left"
        before = await bench.ready(make_spec(("sh", "-c", leaves), tmp_path, fork_server=False))
        status = await bench.run()
        assert not is_running(int((tmp_path / "left").read_text()))
        assert [end.code for end in status.exits] == [0]
        assert status.shim_pid == before.shim_pid
