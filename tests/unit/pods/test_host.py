"""What an agent that starts makes of the shims that are there: only what is found to be dead is swept."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nodeagent.lease.grants import grants_folder, make_grant
from nodeagent.osutil.linux import MARK, boot_id, start_time
from nodeagent.osutil.untrusted import ASIDE_MAX, NotSeenError, UntrustedError
from nodeagent.pods import host, pod
from nodeagent.pods.folder import PodRecord, PodRecords, folder_name, run_folder
from nodeagent.pods.host import ShimHost, ShimStart
from nodeagent.spec.agentconfig import DirsConfig, JobsConfig

BOUND = 20.0


class Node:
    """A node with shims that do nothing; who connects to one of them speaks to nobody."""

    def __init__(self, folder: Path, count: int) -> None:
        dirs = DirsConfig(run=folder / "run", state=folder / "state", logs=folder / "logs")
        self.host = ShimHost("n1", dirs, JobsConfig(), "127.0.0.1", (29400, 29899), ShimStart())
        self.shims: dict[str, subprocess.Popen[bytes]] = {}
        self._ends: list[socket.socket] = []
        for number in range(count):
            uid = f"{number:032x}"
            mark = f"{uid}-mark"
            self.shims[uid] = shim = subprocess.Popen(["sleep", "600"], env={MARK: mark}, start_new_session=True)
            run = run_folder(dirs.run, uid)
            run.mkdir(parents=True)
            plain = {"pid": shim.pid, "start": start_time(shim.pid), "boot": boot_id()}
            (run / "shim.json").write_text(json.dumps(plain))
            PodRecords(dirs.run).write(PodRecord(uid, os.getuid(), mark, folder / "logs" / uid))
            make_grant(grants_folder(dirs.run), folder_name(uid), os.getuid(), os.getgid())

    def connect(self, *_: object) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._ends.append(theirs)
        return ours

    def alive(self) -> int:
        return sum(shim.poll() is None for shim in self.shims.values())

    def close(self) -> None:
        for shim in self.shims.values():
            shim.kill()
            shim.wait()
        for end in self._ends:
            end.close()


@asynccontextmanager
async def node(folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    made = Node(folder, count)
    monkeypatch.setattr(pod, "connect", made.connect)
    try:
        yield made
    finally:
        await made.host.close()
        made.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - not all of it wakes somebody
            await asyncio.sleep(0.01)


async def test_more_pods_than_can_be_looked_at_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(tmp_path, ASIDE_MAX + 4, monkeypatch) as here:
        await here.host.adopt()
        await until(lambda: all(map(here.host.connected, here.shims)))
        assert here.alive() == len(here.shims)


async def test_a_pod_that_could_not_be_looked_at_in_time_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "ADOPT_LIMIT", 0.02)
    gate, looks, find = threading.Event(), list[Path](), host._find_shim

    def slow(folder: Path, record: PodRecord) -> tuple[int, int]:
        looks.append(folder)
        gate.wait(BOUND)
        return find(folder, record)

    monkeypatch.setattr(host, "_find_shim", slow)
    async with node(tmp_path, 1, monkeypatch) as here:
        await here.host.adopt()
        await until(lambda: len(looks) > 1)
        assert [status.phase for status in here.host.status().values()] == ["unknown"]
        gate.set()
        await until(lambda: all(map(here.host.connected, here.shims)))
        assert here.alive() == 1


async def test_a_shim_that_many_others_connect_to_is_connected_to_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = list[str]()

    async with node(tmp_path, 1, monkeypatch) as here:

        def full(*asked: object) -> socket.socket:
            if not refused:
                refused.append("once")
                raise NotSeenError("too many wait at s")
            return here.connect(*asked)

        monkeypatch.setattr(pod, "connect", full)
        await here.host.adopt()
        await until(lambda: all(map(here.host.connected, here.shims)))
        assert here.alive() == 1


async def test_a_shim_in_whose_place_something_else_listens_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(tmp_path, 1, monkeypatch) as here:

        def taken(*_: object) -> socket.socket:
            raise UntrustedError("process 7 listens there, not the shim")

        monkeypatch.setattr(pod, "connect", taken)
        await here.host.adopt()
        await until(lambda: not here.alive())
        why = "its shim is not reached: process 7 listens there, not the shim"
        await until(lambda: [status.reason for status in here.host.status().values()] == [why])


@pytest.mark.parametrize("dead", ["process", "start", "mark"])
async def test_what_is_found_to_be_dead_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: str) -> None:
    async with node(tmp_path, 2, monkeypatch) as here:
        uid, shim = next(iter(here.shims.items()))
        named = run_folder(tmp_path / "run", uid) / "shim.json"
        if dead == "process":
            shim.kill()
            shim.wait()
        elif dead == "start":
            named.write_text(json.dumps(json.loads(named.read_text()) | {"start": 1}))
        else:
            named.write_text(json.dumps({"pid": os.getpid(), "start": start_time(os.getpid()), "boot": boot_id()}))
        await here.host.adopt()
        await until(lambda: here.host.status()[uid].phase == "gone")
        await until(lambda: shim.poll() is not None)
        assert here.alive() == 1
