"""A shim and the pod's grant record: what it does when that says less, says nothing, or wants the workers stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent.lease.grants import NOTHING, Grant, grant_keys, write_grant
from nodeagent.model.jobspec import Hooks
from nodeagent.osutil.linux import boottime, is_running
from nodeagent.pods.folder import folder_name
from nodeagent.shim.main import TICK
from tests.integration.shim_support import UID, Bench, make_spec, open_bench, pid_of, shim_with, token, wait_for

PYTHON = sys.executable
SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
SAVES = (
    "import os, signal, sys, time\n"
    "def save(*_):\n"
    "    print('saving', flush=True)\n"
    "    while not os.path.exists('save'): time.sleep(0.01)\n"
    "    print('saved', flush=True)\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "print('up', flush=True)\n"
    "time.sleep(600)\n"
)


async def running(bench: Bench, text: str = SLEEPER) -> list[int]:
    """Two workers that run; their pids."""
    (bench.root / "t.py").write_text(text)
    await bench.ready(make_spec((PYTHON, "t.py"), bench.root, fork_server=False))
    status = await bench.running(1, ({}, {}))
    for rank in range(2):
        await bench.output_line("up", rank=rank)
    return [pid_of(worker) for worker in status.workers]


async def test_time_that_is_taken_back_ends_the_workers(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        pids = await running(bench)
        for key in grant_keys(bench.grants):
            write_grant(bench.grants, key, NOTHING)
        ended = await bench.until(lambda s: s.phase == "exited")
        assert (ended.fenced, any(map(is_running, pids))) == (True, False)
        bench.host.start(UID, bench.order(2))
        refused = await bench.until(lambda s: s.generation == token(2) and s.refused)
        assert "nobody has granted this pod time" in refused.refused
        bench.grant()
        await bench.run_another(3)


async def test_of_what_is_barred_nothing_starts_and_what_is_newer_does(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        (tmp_path / "t.py").write_text(SLEEPER)
        await bench.ready(make_spec((PYTHON, "t.py"), bench.root, fork_server=False))
        (key,) = grant_keys(bench.grants)
        write_grant(bench.grants, key, Grant(boottime() + 600.0, 0.0, 2.0))
        bench.host.start(UID, bench.order(2))
        refused = await bench.until(lambda s: s.generation == token(2) and s.refused)
        assert (refused.refused, refused.fenced) == ("the node has let go of this generation", True)
        await bench.run_another(3)


async def test_time_that_is_not_renewed_ends_and_time_that_is_goes_on(tmp_path: Path) -> None:
    """The loop looks far too seldom: the fence itself reads the record again."""
    async with open_bench(tmp_path, shim_with(tmp_path, "main.TICK = 600")) as bench:
        async with bench.renewing(3.0):
            pids = await running(bench)
            await asyncio.sleep(3.5)
            assert all(map(is_running, pids))
        ended = await bench.until(lambda s: s.phase == "exited")
        assert boottime() >= bench.granted_until
        assert (ended.fenced, any(map(is_running, pids))) == (True, False)


def remove(record: Path) -> None:
    record.unlink()


def empty(record: Path) -> None:
    os.truncate(record, 0)


def overwrite(record: Path) -> None:
    record.write_bytes(os.urandom(32))


@pytest.mark.parametrize("damage", [remove, empty, overwrite])
async def test_a_record_that_is_gone_or_damaged_gives_no_time(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """What was granted before it holds to its end."""
    async with open_bench(tmp_path) as bench:
        async with bench.renewing(4.0):
            pids = await running(bench)
        damage(bench.grants / folder_name(UID))
        assert (await bench.until(lambda s: s.phase == "exited")).fenced
        assert not any(map(is_running, pids))
        # The watchdog, which reads less often, may have ended them before the time that the shim itself read last.
        await wait_for(lambda: boottime() >= bench.granted_until)
        bench.host.start(UID, bench.order(2))
        refused = await bench.until(lambda s: s.generation == token(2) and s.refused)
        assert "nobody has granted this pod time" in refused.refused


async def test_a_shim_that_finds_no_record_starts_nothing(tmp_path: Path) -> None:
    change = "import os, pathlib\nfor file in pathlib.Path(sys.argv[1]).parents[1].glob('grants/*'): file.unlink()"
    async with open_bench(tmp_path, shim_with(tmp_path, change)) as bench:
        await bench.ready(make_spec(("sleep", "600"), tmp_path, fork_server=False))
        bench.host.start(UID, bench.order(1))
        refused = await bench.until(lambda s: s.refused)
        assert "nobody has granted this pod time" in refused.refused


async def test_workers_that_are_to_stop_save_first_and_then_it_is_reported(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        await running(bench, SAVES)
        asked = bench.stop_in_order()
        await bench.output_line("saving")
        assert bench.obeyed() == 0.0, "they still run"
        (tmp_path / "save").touch()
        ended = await bench.until(lambda s: s.phase == "exited")
        assert [(end.code, end.stopped) for end in ended.exits] == [(0, True)] * 2
        assert not ended.fenced
        await bench.printed("up", "saving", "saved")
        await wait_for(lambda: bench.obeyed() == asked)
        await bench.running(2)
        await asyncio.sleep(4 * TICK)
        assert bench.state().phase == "running", "it was started since"
        again = bench.stop_in_order()
        await wait_for(lambda: bench.obeyed() == again)
        await bench.until(lambda s: s.phase == "exited")


async def test_workers_that_are_to_stop_have_no_more_than_their_grace(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER)
    spec = make_spec((PYTHON, "t.py"), tmp_path, fork_server=False).model_copy(update={"grace": 0.5})
    async with open_bench(tmp_path) as bench:
        await bench.ready(spec)
        await bench.running()
        await bench.output_line("up")
        asked = bench.stop_in_order()
        ended = await bench.until(lambda s: s.phase == "exited")
        assert [(end.signal, end.stopped, end.overdue) for end in ended.exits] == [(signal.SIGKILL, True, 0.5)]
        await wait_for(lambda: bench.obeyed() == asked)


async def test_where_nothing_runs_that_is_reported_at_once_and_also_after_a_start_that_was_stopped(
    tmp_path: Path,
) -> None:
    hooks = Hooks(pre_start=("sleep", "600"))
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(("sleep", "600"), tmp_path, fork_server=False, hooks=hooks))
        idle = bench.stop_in_order()
        await wait_for(lambda: bench.obeyed() == idle)
        bench.host.start(UID, bench.order(1))
        await bench.until(lambda s: s.phase == "starting" and s.highest == token(1))  # it is carried out
        asked = bench.stop_in_order()
        await wait_for(lambda: bench.obeyed() == asked)
        await bench.until(lambda s: "was stopped" in s.refused)
