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

from nodeagent.model.world import Token
from nodeagent.pods import pod
from nodeagent.pods.base import StartOrder
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


def order(number: int) -> StartOrder:
    return StartOrder(token=Token(number=number, id=f"g{number}"), environments=(), ranks=(), not_after=0.0)


async def test_a_pod_that_may_be_about_to_start_is_not_quiet(tmp_path: Path) -> None:
    """Its shim was busy, and the agent promised that nothing runs: then the shim carried out the start."""
    old = {"number": 1, "id": "g1"}
    async with fake(tmp_path) as shim:
        shim.say(phase="exited", generation=old, refused="no time")
        await shim.until(lambda: shim.handle.status.phase == "exited")
        shim.handle.ping(7)
        shim.handle.start(order(2))
        shim.say(phase="exited", generation=old, reason="sent before it read the order")
        await shim.until(lambda: shim.handle.status.reason)
        shim.say_bytes(b'{"v": 1, "echo": 7}\n')
        shim.say(phase="exited", generation=old, reason="still")
        await shim.until(lambda: shim.handle.status.reason == "still")
        now = shim.handle.status
        assert (now.phase, now.generation, now.refused, now.quiet) == ("starting", order(2).token, "", False)
        shim.say(generation={"number": 2, "id": "g2"})
        await shim.until(lambda: shim.handle.status.phase == "running")


async def test_a_start_that_a_shim_refuses_is_over_with_the_next_echo(tmp_path: Path) -> None:
    async with fake(tmp_path) as shim:
        shim.say(phase="exited")
        await shim.until(lambda: shim.handle.status.phase == "exited")
        shim.handle.start(order(2))
        assert not shim.handle.status.quiet
        shim.handle.ping(8)
        shim.say_bytes(b'{"v": 1, "echo": 8}\n')
        await shim.until(lambda: shim.handle.status.quiet)
        shim.handle.start(order(2))
        shim.process.kill()
        await shim.until(lambda: shim.handle.status.phase == "gone")
        assert shim.handle.status.generation is None


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
