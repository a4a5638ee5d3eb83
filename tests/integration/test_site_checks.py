"""A site's own check under a real monitor: what each way to end means, and that none holds up the agent."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nodeagent.hardware.judging.judge import JudgePolicy
from nodeagent.hardware.monitor import Machine, Monitor, OwnWork
from nodeagent.model.health import Verdict
from nodeagent.osutil.clock import SystemClock
from nodeagent.osutil.commands import SHOWN, Checks, SiteCheck
from nodeagent.osutil.linux import is_running

WAIT = 30.0


@asynccontextmanager
async def checking(folder: Path, script: str, bound: float = 20.0, every: float = 0.2) -> AsyncIterator[Monitor]:
    """A monitor with one check, which runs this as a shell's script."""
    check = SiteCheck("mine", ("/bin/sh", "-c", script), every, bound)
    machine = Machine(boot="b1", gpus=False, kmsg=str(folder / "none"), checks=(check,))
    environ = {"PATH": os.environ["PATH"], "NODEAGENT__REDIS__URL": "secret"}
    monitor = Monitor(
        machine, folder, environ, SystemClock(), policy=JudgePolicy(), changed=lambda: None, own=OwnWork()
    )  # fmt: skip
    async with asyncio.TaskGroup() as group:
        task = group.create_task(monitor.run())
        try:
            yield monitor
        finally:
            task.cancel()


def found(monitor: Monitor) -> Verdict | None:
    return next((v for v in monitor.verdicts if v.rule == "check.mine"), None)


async def until(wanted: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT):
        while not wanted():  # noqa: ASYNC110 (what is waited for is the judge's, which wakes nobody)
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("script", "severity", "raw"), [
    ("echo 'lnet is down'; echo more; exit 3", "fatal", "exit code 3: lnet is down"),
    ("echo 'one path of two' >&2; exit 4", "degraded", "exit code 4: one path of two"),
    ("exit 1", "unknown", "exit code 1"),
    ("exit 2", "unknown", "exit code 2"),
    ("kill -9 $$", "unknown", "killed by signal 9"),
    (f"printf %{2 * SHOWN}d 7; exit 3", "fatal", "exit code 3: 7"),
    ("head -c 3000000 /dev/zero | tr '\\0' x; exit 4", "degraded", f"exit code 4: {'x' * SHOWN}"[:SHOWN]),
    ("sleep 60 & exit 3", "fatal", "exit code 3"),
    ("exit ${NODEAGENT__REDIS__URL:+4}", "", ""),
    ("exit 0", "", ""),
])  # fmt: skip
async def test_each_way_to_end(tmp_path: Path, script: str, severity: str, raw: str) -> None:
    if severity:
        async with checking(tmp_path, script) as monitor:
            await until(lambda: found(monitor))
            verdict = found(monitor)
            assert verdict is not None
            assert (verdict.severity, verdict.device) == (severity, "")
            assert verdict.raw.startswith(raw)
        return
    async with checking(tmp_path, f"echo >> {tmp_path}/runs; {script}") as monitor:
        await until(lambda: (tmp_path / "runs").exists() and (tmp_path / "runs").read_text().count("\n") > 1)
        assert found(monitor) is None


async def test_one_that_hangs_is_killed_and_nobody_knows(tmp_path: Path) -> None:
    async with checking(tmp_path, f"echo $$ > {tmp_path}/pid; echo waiting; sleep 600", bound=2.5, every=60) as monitor:
        await until(lambda: found(monitor))
        verdict = found(monitor)
        assert verdict is not None
        assert (verdict.severity, verdict.raw) == ("unknown", "did not end within 2.5 s: waiting")
        pid = int((tmp_path / "pid").read_text())
        await until(lambda: not is_running(pid))


async def test_what_it_leaves_behind_is_killed(tmp_path: Path) -> None:
    async with checking(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; exit 4", every=60) as monitor:
        await until(lambda: found(monitor))
        pid = int((tmp_path / "pid").read_text())
        await until(lambda: not is_running(pid))


async def test_what_it_leaves_behind_is_killed_when_the_agent_ends_meanwhile(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $$ $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; exit 4"
    async with checking(tmp_path, script, every=60) as monitor:
        await until((tmp_path / "pids").exists)
        itself, left = map(int, (tmp_path / "pids").read_text().split())
        await until(lambda: not is_running(itself))
        assert found(monitor) is None, "it waits for what holds the check's output"
    await until(lambda: not is_running(left))


async def test_one_that_is_cancelled_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    """The check runs as soon as its process is there, and its start may take several turns of the loop."""
    started = 0
    for turns in range(1, 12):
        pids = tmp_path / f"pid-{turns}"
        script = f"sleep 600 & echo $! > {tmp_path}/new; mv {tmp_path}/new {pids}; exit 4"
        check = SiteCheck("mine", ("/bin/sh", "-c", script), 60.0, 20.0)
        task = asyncio.create_task(Checks([check], {"PATH": os.environ["PATH"]}, lambda: None).run(check))
        for _ in range(turns):
            await asyncio.sleep(0)
        if _blocks_until(pids.exists):
            started += 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if pids.exists():
            left = int(pids.read_text())
            await until(lambda pid=left: not is_running(pid))  # type: ignore[misc]
    assert started > 5


def _blocks_until(wanted: Callable[[], bool], most: float = 0.5) -> bool:
    """The loop does not turn meanwhile. Not for long: it may never come, if nothing was started."""
    end = time.monotonic() + most
    while not (there := wanted()) and time.monotonic() < end:
        time.sleep(0.01)
    return there


async def test_it_heals_when_it_passes_and_what_is_fatal_is_watched_first(tmp_path: Path) -> None:
    async with checking(tmp_path, f"exit $(cat {tmp_path}/code || echo 4)") as monitor:
        await until(lambda: found(monitor))
        (tmp_path / "code").write_text("0")
        await until(lambda: found(monitor) is None)
        (tmp_path / "code").write_text("3")
        await until(lambda: found(monitor))
        (tmp_path / "code").write_text("0")
        await until(lambda: (v := found(monitor)) is not None and v.stage == "repaired")


async def test_a_command_that_is_not_there_is_no_pass(tmp_path: Path) -> None:
    check = SiteCheck("mine", ("/no/such/check",), 60.0, 5.0)
    machine = Machine(boot="b1", gpus=False, kmsg=str(tmp_path / "none"), checks=(check,))
    monitor = Monitor(
        machine, tmp_path, {}, SystemClock(), policy=JudgePolicy(), changed=lambda: None, own=OwnWork()
    )  # fmt: skip
    async with asyncio.TaskGroup() as group:
        task = group.create_task(monitor.run())
        await until(lambda: found(monitor))
        task.cancel()
    verdict = found(monitor)
    assert verdict is not None
    assert (verdict.severity, verdict.raw) == (
        "unknown", "/no/such/check cannot be started: No such file or directory",
    )  # fmt: skip
    gone = Monitor(
        Machine(boot="b1", gpus=False), tmp_path, {}, SystemClock(), policy=JudgePolicy(), changed=lambda: None,
        own=OwnWork(),
    )  # fmt: skip
    assert found(gone) is None, "a check that is taken out of the config leaves nothing behind"
