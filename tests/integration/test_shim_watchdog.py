"""The second guard with real shims: what runs past the granted time while the shim cannot see to it itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from nodeagent.model.jobspec import Hooks
from nodeagent.osutil.linux import is_running
from nodeagent.shim.fence import SLACK
from tests.integration.shim_support import UID, Bench, make_spec, open_bench, pid_of, shim_with, wait_for

PYTHON = sys.executable
MORE = 300
"""Workers for whose orders a link has no room."""
COMES_LATE = "real = fence.watch\ndef late(*given):\n    time.sleep(0.5)\n    real(*given)\nfence.watch = late"
"""A change to a shim, of whose watchdogs each reads nothing for a while, as on a loaded machine."""
SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def watchdog(bench: Bench) -> int | None:
    """Its pid; None while there is none. A worker that has only just been forked looks like it."""
    status = bench.state()
    others = {status.shim_pid, status.fork_server_pid, *(worker.pid for worker in status.workers)}
    (found,) = [*(bench.own() - others), None][:1]
    return found


@pytest.mark.parametrize("fork_server", [True, False], ids=["fork_server", "plain"])
async def test_a_stopped_shim_leaves_nothing_running_past_the_granted_time(tmp_path: Path, fork_server: bool) -> None:
    (tmp_path / "t.py").write_text(SLEEPER)
    async with open_bench(tmp_path) as bench:
        async with bench.renewing(3.0):
            first = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path, fork_server=fork_server))
            status = await bench.running(1, ({}, {}))
            assert first.shim_pid is not None
            os.kill(first.shim_pid, signal.SIGSTOP)
            await asyncio.sleep(3.5)
            assert all(is_running(pid_of(w)) for w in status.workers), "the watchdog reads what is granted since"
        try:
            await wait_for(lambda: not any(is_running(pid_of(w)) for w in status.workers))
            bench.grant()  # at the thaw there is granted time again
        finally:
            os.kill(first.shim_pid, signal.SIGCONT)
        ended = await bench.until(lambda s: s.phase == "exited")
        assert ended.fenced, "told as stopped by ourselves, whatever was granted since"
        assert [(end.signal, end.stopped) for end in ended.exits] == [(9, True)] * 2
        assert ended.fork_server_pid == first.fork_server_pid, "the fork server lives on"
        await bench.run_another(2)


async def test_a_hook_is_watched_too(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SLEEPER)
    hooks = Hooks(pre_start=("sh", "-c", "echo $$ > hook; exec sleep 600"))
    async with open_bench(tmp_path) as bench:
        first = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path, hooks=hooks))
        assert first.shim_pid is not None
        async with bench.renewing(3.0):
            bench.host.start(UID, bench.order(1))
            await wait_for(lambda: (tmp_path / "hook").exists() and (tmp_path / "hook").read_text().endswith("\n"))
            hook = int((tmp_path / "hook").read_text())
            os.kill(first.shim_pid, signal.SIGSTOP)
        try:
            await wait_for(lambda: not is_running(hook))
        finally:
            os.kill(first.shim_pid, signal.SIGCONT)
        await bench.until(lambda s: s.refused)


@pytest.mark.parametrize("workers", [2, pytest.param(MORE, marks=pytest.mark.slow)])
async def test_one_that_is_killed_is_started_anew_and_knows_all(tmp_path: Path, workers: int) -> None:
    """From its fork on: the shim is stopped before the new one has come to read anything."""
    (tmp_path / "t.py").write_text(SLEEPER)
    async with open_bench(tmp_path, shim_with(tmp_path, COMES_LATE)) as bench:
        async with bench.renewing(4.0):
            first = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
            status = await bench.running(1, ({},) * workers)
            assert first.shim_pid is not None
            old = watchdog(bench)
            assert old is not None
            os.kill(old, signal.SIGKILL)
            await wait_for(lambda: watchdog(bench) not in (old, None))
            assert bench.state().phase == "running", "its end disturbs nobody"
            os.kill(first.shim_pid, signal.SIGSTOP)
        try:
            await wait_for(lambda: not any(is_running(pid_of(w)) for w in status.workers))
        finally:
            os.kill(first.shim_pid, signal.SIGCONT)
        ended = await bench.until(lambda s: s.phase == "exited")
        assert ended.fenced
        assert all(end.stopped for end in ended.exits), "no death is taken for a worker's own"


@pytest.mark.slow
async def test_one_that_is_stopped_is_replaced_once_its_link_is_full(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        async with bench.renewing(4.0):
            first = await bench.ready(make_spec(("sleep", "600"), tmp_path, fork_server=False))
            assert first.shim_pid is not None
            old = watchdog(bench)
            assert old is not None
            os.kill(old, signal.SIGSTOP)
            status = await bench.running(1, ({},) * MORE)
            await wait_for(lambda: watchdog(bench) not in (old, None))
            os.kill(first.shim_pid, signal.SIGSTOP)
        try:
            await wait_for(lambda: not any(is_running(pid_of(w)) for w in status.workers))
        finally:
            os.kill(first.shim_pid, signal.SIGCONT)
        assert (await bench.until(lambda s: s.phase == "exited")).fenced


async def test_it_does_not_act_within_the_granted_time_or_while_nothing_runs(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SLEEPER)
    async with open_bench(tmp_path) as bench:
        first = await bench.ready(make_spec((PYTHON, "t.py"), tmp_path))
        bench.grant(0.1)
        await asyncio.sleep(0.1 + 2 * SLACK)
        bench.grant()
        status = await bench.running(1, ({},))
        assert first.shim_pid is not None
        os.kill(first.shim_pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(3 * SLACK)
            assert all(is_running(pid_of(w)) for w in status.workers)
        finally:
            os.kill(first.shim_pid, signal.SIGCONT)
        assert bench.state().phase == "running"
