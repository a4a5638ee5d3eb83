"""Who starts the lease process again after its end: systemd what it keeps, the agent what it ended itself. And what the
agent does first with a child that has not begun in time."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from nodeagent import __version__
from nodeagent.agent import leaseprocess
from nodeagent.agent.leaseprocess import LocalLeaseProcess
from nodeagent.lease.main import LONGEST_WORD
from nodeagent.lease.order import LeasePort
from nodeagent.lease.statefiles import Pulse, PulseWriter, lease_folder, wake_socket
from nodeagent.osutil import units
from nodeagent.osutil.linux import bind_private, boottime
from nodeagent.plan.pods.running import MOST_STANDING
from nodeagent.spec.agentconfig import AgentConfig, DirsConfig
from nodeagent.spec.storeconfig import RedisConfig
from nodeagent.store.wire import Reached
from tests.descriptors import few_files

BOUND = 20.0


class Unit:
    """The lease process's, as systemd shows it: a process that holds the lock, of this version."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.process = subprocess.Popen(["sleep", "600"])
        self.started = asyncio.Event()
        self.waits: list[float] = []

    def holder(self, _folder: Path) -> tuple[int, str] | None:
        return (self.process.pid, self.version) if self.process.poll() is None else None

    async def start(self, command: list[str]) -> None:
        if "stop" in command:
            self.process.kill()
            self.process.wait()
        else:
            self.started.set()
            await asyncio.Event().wait()


@asynccontextmanager
async def kept(tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Unit]:
    """An agent keeps it."""
    unit = Unit(version)
    monkeypatch.setattr(leaseprocess, "find_holder", unit.holder)
    monkeypatch.setattr(units, "start", unit.start)
    config = AgentConfig(dirs=DirsConfig(run=tmp_path, state=tmp_path, logs=tmp_path))
    process = LocalLeaseProcess(config, "n1", cast(Any, SimpleNamespace(reached=None)), "na.service", cast(Any, None))
    process._order = cast(Any, object())

    async def is_there(seconds: float) -> bool:
        unit.waits.append(seconds)
        return False

    monkeypatch.setattr(process, "_is_there", is_there)
    keeping = asyncio.create_task(process.run())
    try:
        yield unit
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        if unit.process.poll() is None:
            unit.process.kill()
        unit.process.wait()


async def test_one_that_the_agent_has_ended_is_started_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody renewed for a second at each upgrade: systemd does not start again what was to stop."""
    async with kept(tmp_path, "0.0.1", monkeypatch) as unit, asyncio.timeout(BOUND):
        await unit.started.wait()
        assert unit.waits == []


async def test_one_that_ended_by_itself_is_left_to_systemd_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kept(tmp_path, __version__, monkeypatch) as unit, asyncio.timeout(BOUND):
        asyncio.get_running_loop().call_later(0.1, unit.process.kill)
        await unit.started.wait()
        assert unit.waits == [leaseprocess.COMES_BACK]


async def test_a_child_that_has_not_taken_its_lock_in_time_is_killed_before_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AgentConfig(dirs=DirsConfig(run=tmp_path, state=tmp_path, logs=tmp_path))
    process = LocalLeaseProcess(config, "n1", cast(Any, SimpleNamespace(reached=None)), "", cast(Any, None))
    process._order = cast(Any, object())
    children = list[subprocess.Popen[bytes]]()
    codes = asyncio.Queue[list[int | None]]()

    def fork(_command: list[str], _env: dict[str, str]) -> None:
        codes.put_nowait([child.returncode for child in children])
        children.append(subprocess.Popen(["sleep", "600"]))
        process._child = children[-1]

    monkeypatch.setattr(process, "_fork", fork)
    monkeypatch.setattr(leaseprocess, "START_LIMIT", 0.01)
    keeping = asyncio.create_task(process.run())
    try:
        assert [await codes.get() for _ in range(3)] == [[], [-9], [-9, -9]]
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        children[-1].returncode = None  # the agent leaves it behind
        children[-1].kill()
        children[-1].wait()


async def test_without_a_descriptor_it_is_not_idle_and_what_does_not_reach_it_is_logged_once(tmp_path: Path) -> None:
    """An agent that was to end would have gone before it had read who needs it."""
    config = AgentConfig(dirs=DirsConfig(run=tmp_path, state=tmp_path, logs=tmp_path))
    process = LocalLeaseProcess(config, "n1", cast(Any, SimpleNamespace(reached=None)), "", cast(Any, None))
    with few_files(0), capture_logs() as logs:
        states = [process.status()[0] for _ in range(2)]
        pulses = [process.pulse() for _ in range(2)]
        for _ in range(2):
            process.alive(cut_off=False)
    assert (states, pulses) == (["holding", "holding"], [None, None])
    assert [line["event"].partition(": ")[0] for line in logs] == [
        "what the lease process grants cannot be read",
        "the lease process cannot be spoken to",
    ]
    with capture_logs() as logs:
        assert (process.status(), process.pulse()) == (("idle", ""), None)
        process.alive(cut_off=False)  # nobody listens
    assert logs == []


async def test_with_that_it_is_there_the_agent_says_whether_it_is_cut_off(tmp_path: Path) -> None:
    config = AgentConfig(dirs=DirsConfig(run=tmp_path, state=tmp_path, logs=tmp_path))
    process = LocalLeaseProcess(config, "n1", cast(Any, SimpleNamespace(reached=None)), "", cast(Any, None))
    lease_folder(tmp_path).mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as ear:
        bind_private(ear, wake_socket(lease_folder(tmp_path)))
        process.alive(cut_off=False)
        process.alive(cut_off=True)
        process.alive(cut_off=True, standing={"u-1": 4, "u-2": 7})
        words = [json.loads(ear.recv(100)) for _ in range(3)]
        cut_off = {"alive": True, "cut_off": True, "standing": ""}
        assert words == [{"alive": True}, cut_off, cut_off | {"standing": "u-1 4 u-2 7"}]
        process.alive(cut_off=True, standing={f"{number:0>64}": 10**15 - 1 for number in range(MOST_STANDING)})
        assert len(ear.recv(LONGEST_WORD + 1)) <= LONGEST_WORD, "the longest that it says is read whole"


async def test_one_that_cannot_be_looked_for_is_left_alone(tmp_path: Path) -> None:
    """Without a descriptor to see its lock with, it was taken for dead, and killed to start the next."""
    config = AgentConfig(dirs=DirsConfig(run=tmp_path, state=tmp_path, logs=tmp_path))
    process = LocalLeaseProcess(config, "n1", cast(Any, SimpleNamespace(reached=None)), "", cast(Any, None))
    process._order = cast(Any, object())
    lease_folder(tmp_path).mkdir()
    (lease_folder(tmp_path) / "lock").symlink_to("elsewhere")
    with subprocess.Popen(["sleep", "600"]) as child:  # noqa: ASYNC220 (it returns when the program has begun)
        process._child = child
        keeping = asyncio.create_task(process.run())
        try:
            async with asyncio.timeout(BOUND):
                while not process._troubles:  # noqa: ASYNC110 - a log line has no event
                    await asyncio.sleep(0.01)
            (trouble,) = process._troubles
            assert "whether the lease process runs is not to be seen: [Errno 40]" in trouble
            assert child.poll() is None
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
            child.returncode = None  # the agent leaves it behind
            child.kill()


async def test_an_order_is_worked_out_once_a_beat(tmp_path: Path) -> None:
    """And once more only where there is another password."""
    asked = list[int]()

    class There:
        @property
        def reached(self) -> Reached:
            asked.append(1)
            return Reached("/s", "", "", 0)

    (tmp_path / "password").write_text("pw")
    (tmp_path / "password").chmod(0o600)
    config = AgentConfig(dirs=DirsConfig(run=tmp_path, state=tmp_path, logs=tmp_path))
    with_password = config.model_copy(update={"redis": RedisConfig(password_file=tmp_path / "password")})
    for one in (config, with_password):
        asked.clear()
        process = LocalLeaseProcess(one, "n1", There(), "", LeasePort("127.0.0.1", (0, 0), ""))
        renewing = asyncio.create_task(process._renew_password())
        for _ in range(3):
            process.tend("l1", 1, "e1", "c1")
            await asyncio.sleep(0.05)
        renewing.cancel()
        with suppress(asyncio.CancelledError):
            await renewing
        assert len(asked) == 3


HERE, THERE = Reached("", "redis1", "10.0.0.1", 6379), Reached("", "redis2", "10.0.0.2", 6379)


@pytest.mark.parametrize(
    ("reached", "era", "cluster", "ago", "place"),
    [
        (HERE, "e1", "default", 0.0, ""),
        (HERE, "e2", "default", 0.0, ""),
        (THERE, "e1", "default", 0.0, ""),
        (THERE, "e2", "default", 0.0, "10.0.0.1:6379"),
        (THERE, "", "default", 0.0, "10.0.0.1:6379"),
        (THERE, None, "default", 0.0, "10.0.0.1:6379"),
        (THERE, "e2", "default", 10.0, ""),
        (HERE, "e1", "another", 0.0, "10.0.0.1:6379"),
        (None, None, "default", 0.0, "10.0.0.1:6379"),
        (None, "e1", "default", 0.0, ""),
    ],
    ids=str,
)
def test_a_lease_is_renewed_elsewhere_in_another_cluster_or_at_another_server_in_another_era(
    tmp_path: Path, reached: Reached | None, era: str | None, cluster: str, ago: float, place: str
) -> None:
    """``ago``: seconds since it was renewed, of a lease of 3 s."""

    def agent(name: str, at: Reached | None) -> LocalLeaseProcess:
        config = AgentConfig(cluster=name, dirs=DirsConfig(run=tmp_path, state=tmp_path, logs=tmp_path))
        return LocalLeaseProcess(config, "n1", SimpleNamespace(reached=at), "", LeasePort("127.0.0.1", (0, 0), ""))

    assert agent(cluster, reached).elsewhere(era) == "", "there is no order"
    agent("default", HERE).tend("l1", 1, "e1", "c1")
    assert agent(cluster, reached).elsewhere(era) == "", "nobody has renewed by it"
    now = boottime()
    PulseWriter(lease_folder(tmp_path)).beat(Pulse(now, now - ago, now, now - ago))
    assert agent(cluster, reached).elsewhere(era) == place
