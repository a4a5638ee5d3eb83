"""What a host makes of a shim's bytes: a status, or a pod that is gone; never one that is not heard of any more."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from nodeagent.pods import pod
from nodeagent.pods.folder import PodRecord
from nodeagent.pods.pod import LINE_MAX, PodHandle

BOUND = 20.0


class Fake:
    """A handle whose shim is a process that does nothing, and whose socket the test speaks on."""

    def __init__(self, folder: Path) -> None:
        self.changed = asyncio.Event()
        record = PodRecord("u", os.geteuid(), "m", folder)
        self.handle = PodHandle(
            record, folder, "ready", changed=self.changed.set, swept=lambda: None, ended=lambda _pod: None
        )
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        ours, self.theirs = socket.socketpair()
        self.handle.started(self.process)
        self.handle.attach(ours)

    def say(self, **status: object) -> None:
        """As a shim would."""
        self.say_bytes(json.dumps({"v": 1, "status": {"uid": "u", "phase": "running", **status}}).encode() + b"\n")

    def say_bytes(self, data: bytes) -> None:
        self.theirs.sendall(data)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(BOUND):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def fake(folder: Path) -> AsyncIterator[Fake]:
    made = Fake(folder)
    try:
        yield made
    finally:
        made.process.kill()
        made.handle.let_go()
        made.theirs.close()
        with suppress(ChildProcessError):  # the handle has reaped it
            await asyncio.to_thread(os.waitpid, made.process.pid, 0)


async def test_half_of_a_surrogate_pair_costs_one_letter(tmp_path: Path) -> None:
    async with fake(tmp_path) as shim:
        shim.say(reason="\ud800 and \U0001f600 and \\ud800 \udfff")
        await shim.until(lambda: shim.handle.status.phase == "running")
        assert shim.handle.status.reason == "\ufffd and \U0001f600 and \\ud800 \ufffd"
        shim.say(phase="exited")
        await shim.until(lambda: shim.handle.status.phase == "exited")


DEEP = b'{"v": 1, "error": ' + b"[" * 100_000 + b"\n"


@pytest.mark.parametrize(
    ("received", "why"),
    [
        (b"x" * (LINE_MAX + 2), "a line of more than"),
        (b"[]\n", "no status"),
        (b'{"v": 1, "status": {"uid": "u", "phase": "dancing"}}\n', "no status"),
        (b'{"v": 1, "status": {"uid": "other", "phase": "ready"}}\n', "another pod"),
        (DEEP, "no status"),
        (b"\xff\n", "no status"),
    ],
)
async def test_a_shim_that_cannot_be_understood_is_gone(tmp_path: Path, received: bytes, why: str) -> None:
    async with fake(tmp_path) as shim:
        shim.say()
        await shim.until(lambda: shim.handle.status.phase == "running")
        sending = asyncio.get_running_loop().run_in_executor(None, _send, shim, received)
        await shim.until(lambda: shim.handle.status.phase == "gone")
        await sending
        assert why in shim.handle.status.reason
        assert shim.handle.may_restart


def _send(shim: Fake, received: bytes) -> None:
    try:
        shim.say_bytes(received)
    except OSError:  # nobody reads the rest
        return


async def test_a_shim_that_does_not_read_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod, "OUT_MAX", 1 << 16)
    async with fake(tmp_path) as shim:
        shim.say()
        await shim.until(lambda: shim.handle.status.phase == "running")
        for number in range(100_000):
            shim.handle.command("ping", number=number)
            if not shim.handle.connected:
                break
        await shim.until(lambda: shim.handle.status.phase == "gone")
        assert "does not read" in shim.handle.status.reason
