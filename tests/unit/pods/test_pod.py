"""What a host makes of a shim's bytes: a status, or a pod that is gone; never one that is not changes of any more."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Set
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from nodeagent.model.world import Token
from nodeagent.osutil import untrusted
from nodeagent.osutil.clock import Allowance
from nodeagent.osutil.linux import MarkedProcesses, kill_marked
from nodeagent.osutil.untrusted import AsideByOwner
from nodeagent.pods import pod, shimlink
from nodeagent.pods.base import StartOrder
from nodeagent.pods.bounds import COUNT_MAX, FEW
from nodeagent.pods.cgroup import PodCgroup
from nodeagent.pods.folder import PodRecord, PodRecords
from nodeagent.pods.pod import (
    CHANGES_AT_ONCE,
    CHANGES_PER_SECOND,
    NO_ROOT,
    NOT_ENDED,
    FoundShim,
    PodHandle,
    SharedByPods,
)
from nodeagent.pods.shimlink import LINES_IN_A_TURN, READ_MAX
from nodeagent.pods.speech import LONG, SpeechByOwner
from nodeagent.pods.sweep import Sweeper
from nodeagent.shim.peers import LINE_MAX

BOUND = 20.0
KILLED = "its shim was killed by SIGKILL (9), not by nodeagent"


class Fake:
    """A handle whose shim is a process that does nothing, and whose socket the test speaks on."""

    def __init__(
        self, folder: Path, sweeper: Sweeper, speech: SpeechByOwner | None = None, asked: int = COUNT_MAX
    ) -> None:
        self.changed = asyncio.Event()
        self.kept = list[PodRecord]()
        self.ended = list[PodHandle]()
        record = PodRecord("u", os.geteuid(), "m", folder / "logs", asked=asked)
        self.handle = PodHandle(
            record, folder, "ready", changed=self.changed.set, swept=lambda: None, ended=self.ended.append,
            keep=self.kept.append, shared=SharedByPods(sweeper, AsideByOwner(), speech or SpeechByOwner()),
        )  # fmt: skip
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
async def fake(
    folder: Path,
    sweeper: Sweeper | None = None,
    speech: SpeechByOwner | None = None,
    asked: int = COUNT_MAX,
) -> AsyncIterator[Fake]:
    made = Fake(folder, sweeper or Sweeper(kill_marked), speech, asked)
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


async def test_a_shim_that_never_stops_speaking_is_read_in_turn(tmp_path: Path) -> None:
    """The whole cluster received each of its words: 50 % of a core on nodes that had nothing to do with it."""
    async with fake(tmp_path) as shim:
        changes = 0

        def tell() -> None:
            nonlocal changes
            changes += 1
            shim.changed.set()

        shim.handle._changed = tell
        shim.handle._link._lines = Allowance(300, 100)  # a busy machine reads no more than the real one grants at once
        statuses = [{"v": 1, "status": {"uid": "u", "phase": "running", "reason": str(n)}} for n in range(20_000)]
        spoken = b"".join(json.dumps(one).encode() + b"\n" for one in statuses)
        loop = asyncio.get_running_loop()
        began, sending = loop.time(), loop.run_in_executor(None, _send, shim, spoken)
        await asyncio.sleep(1.5)
        spent, received = loop.time() - began, int(shim.handle.status.reason)
        shim.theirs.shutdown(socket.SHUT_RDWR)
        await sending
        assert CHANGES_AT_ONCE < received <= 300 + 100 * spent + READ_MAX / 50
        assert CHANGES_AT_ONCE <= changes <= CHANGES_AT_ONCE + CHANGES_PER_SECOND * spent + 1


async def test_the_last_status_of_many_is_not_lost(tmp_path: Path) -> None:
    async with fake(tmp_path) as shim:
        for n in range(int(CHANGES_AT_ONCE) + 5):
            shim.say(reason=f"word {n}")
        last = f"word {int(CHANGES_AT_ONCE) + 4}"
        await shim.until(lambda: shim.handle.status.reason == last)


async def test_pods_of_one_user_are_read_no_more_than_a_few_would_be(tmp_path: Path) -> None:
    """Sixty-four pods, of which each said what one may, had all of the agent's loop."""
    speech, received = SpeechByOwner(), 0
    speech.of(os.geteuid()).lines = Allowance(300, 100)

    def count(line: bytes) -> None:
        nonlocal received
        received += 1

    async with AsyncExitStack() as opened:
        shims = [await opened.enter_async_context(fake(tmp_path, speech=speech)) for _ in range(8)]
        other = await opened.enter_async_context(fake(tmp_path))
        loop, sending = asyncio.get_running_loop(), []
        for shim in shims:
            shim.handle._link.receive = count
            sending.append(loop.run_in_executor(None, _send, shim, b'{"v":1,"echo":0}\n' * 20_000))
        began = loop.time()
        await asyncio.sleep(1.0)
        other.say(phase="exited")
        asked = loop.time()
        await other.until(lambda: other.handle.status.phase == "exited")
        assert loop.time() - asked < 1.0, "another user's pods are none of theirs"
        assert 0 < received <= 300 + 100 * (loop.time() - began) + len(shims) * LINES_IN_A_TURN
        for shim in shims:
            shim.theirs.shutdown(socket.SHUT_RDWR)
        await asyncio.gather(*sending)


class LongLines:
    """Each of these pods has said a line that takes long, but for its end. Then ``end`` ends them all at once."""

    def __init__(self, *shims: Fake) -> None:
        self.shims, self.turns = shims, list[tuple[Fake, int]]()
        """Whose line was handled, and in which turn of the loop."""
        self._turn = 0
        for shim in shims:
            shim.handle._link.receive = partial(self._count, shim, shim.handle._link.receive)

    async def end(self) -> None:
        for shim in self.shims:
            shim.say_bytes(b"\n")
        self._tick()

    async def say(self) -> None:
        line = _status(workers=[worker(rank) for rank in range(300)])
        assert len(line) > LONG
        for shim in self.shims:
            await asyncio.get_running_loop().run_in_executor(None, _send, shim, line)
            await _has_read(shim, len(line))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(BOUND):
            while len(self.turns) < count:  # noqa: ASYNC110 - nobody is woken
                await asyncio.sleep(0)

    def _tick(self) -> None:
        self._turn += 1
        if len(self.turns) < len(self.shims):
            asyncio.get_running_loop().call_soon(self._tick)

    def _count(self, shim: Fake, receive: Callable[[bytes], None], line: bytes) -> None:
        self.turns.append((shim, self._turn))
        receive(line)


def _status(**fields: object) -> bytes:
    return json.dumps({"v": 1, "status": {"uid": "u", "phase": "running", **fields}}).encode()


def worker(rank: int) -> dict[str, object]:
    return {"rank": rank, "local_rank": rank, "pid": 5, "state": "running", "exit": None, "step": 1, "doing": ""}


async def test_of_long_lines_one_is_handled_in_a_turn_of_the_loop_and_users_take_turns(tmp_path: Path) -> None:
    """Sixty pods of one user that ended a status of 1 MiB at once held up root's agent for 2 s."""
    speech = SpeechByOwner()
    async with AsyncExitStack() as opened:
        shims = [await opened.enter_async_context(fake(tmp_path, speech=speech)) for _ in range(6)]
        *_, other = shims
        other.handle._speech = other.handle._link._speech = speech.of(12345)
        lines = LongLines(*shims)
        await lines.say()
        await lines.end()
        await lines.until(len(shims))
        assert len({turn for _, turn in lines.turns}) == len(shims)
        assert other in [shim for shim, _ in lines.turns[:2]]
        assert [len(shim.handle._reported.workers) for shim in shims] == [300] * len(shims)
        other.say(phase="exited")
        await other.until(lambda: other.handle.status.phase == "exited")


async def test_long_lines_of_one_user_wait_while_anothers_are_handled(tmp_path: Path) -> None:
    speech = SpeechByOwner()
    async with AsyncExitStack() as opened:
        shims = [await opened.enter_async_context(fake(tmp_path, speech=speech)) for _ in range(4)]
        *ours, other = shims
        other.handle._speech = other.handle._link._speech = speech.of(12345)
        lines = LongLines(*shims)
        await lines.say()
        speech.of(os.geteuid()).lines = Allowance(4, 0.5)  # what a line of LONG bytes costs, and it takes seconds
        await lines.end()
        await lines.until(2)
        for _ in range(100):
            await asyncio.sleep(0)
        assert {shim for shim, _ in lines.turns} == {ours[0], other}
        ours[1].handle.give_up("test")
        speech.of(os.geteuid()).lines = Allowance(1000, 1000)
        other.say_bytes(_status(workers=[worker(rank) for rank in range(300)]) + b"\n")
        await lines.until(4)
        for _ in range(100):
            await asyncio.sleep(0)
        assert [shim for shim, _ in lines.turns].count(other) == 2
        assert {shim for shim, _ in lines.turns} == {ours[0], ours[2], other}, "of a shim that is given up no line is"
    assert speech._long_lines._timer is None


async def test_a_shim_tells_of_no_more_workers_than_were_asked_of_its_pod(tmp_path: Path) -> None:
    """What a list of thousands costs, and what it says to the cluster, a pod of one slot has no use for."""
    async with fake(tmp_path, asked=1) as shim:
        shim.say(workers=[worker(rank) for rank in range(1 + FEW)])
        await shim.until(lambda: len(shim.handle.status.workers) == 1 + FEW)
        workers = order(1).model_copy(update={"environments": ({},) * 300})
        shim.handle.start(workers)
        shim.handle.promise(400, token={}, rendezvous=False, above=0)
        shim.handle.start(workers)
        assert [record.asked for record in shim.kept] == [300, 400]
        shim.say(workers=[worker(rank) for rank in range(300)], ports=list(range(2000, 2400)))
        await shim.until(lambda: len(shim.handle.status.ports) == 400)
        shim.say(workers=[worker(rank) for rank in range(401 + FEW)])
        await shim.until(lambda: shim.handle.status.phase == "gone")
        assert shim.handle.status.reason == "its shim sent what is no status"


async def test_changes_of_many_pods_of_one_user_are_seen_together(tmp_path: Path) -> None:
    speech, count = SpeechByOwner(), 0
    speech.of(os.geteuid()).changes = Allowance(4, 0.001)

    def tell() -> None:
        nonlocal count
        count += 1

    async with AsyncExitStack() as opened:
        shims = [await opened.enter_async_context(fake(tmp_path, speech=speech)) for _ in range(4)]
        for n in range(8):
            for shim in shims:
                shim.say(reason=f"word {n}")
        for shim in shims:
            shim.handle._changed = tell
        async with asyncio.timeout(BOUND):
            while any(shim.handle.status.reason != "word 7" for shim in shims):  # noqa: ASYNC110 - nobody is woken
                await asyncio.sleep(0.005)
        assert count <= 4 + 2 * len(shims)


async def test_progress_is_shown_a_little_later_and_the_end_of_a_worker_at_once(tmp_path: Path) -> None:
    """A shim tells at each ping how far its workers are: for ever, and of that a user's allowance is not spent."""
    one: dict[str, object] = {"rank": 0, "local_rank": 0, "pid": 5, "state": "running"}
    speech = SpeechByOwner()
    speech.of(os.geteuid()).changes = Allowance(2, 0.001)
    async with fake(tmp_path, speech=speech) as shim:
        shim.say(workers=[one])
        await shim.until(lambda: shim.handle.status.workers)
        shim.changed.clear()
        for step in range(20):
            shim.say(workers=[one | {"step": step}], snapshot_bytes=step)
        async with asyncio.timeout(BOUND):
            while shim.handle._reported.snapshot_bytes != 19:  # noqa: ASYNC110 - nobody is woken
                await asyncio.sleep(0)
        shim.say(workers=[one | {"step": 20, "state": "exited", "exit": 1}])
        async with asyncio.timeout(BOUND):
            while shim.handle._reported.workers[0].state != "exited":  # noqa: ASYNC110 - nobody is woken
                await asyncio.sleep(0)
        assert shim.handle.status.workers[0].state == "exited"
        shim.say(workers=[one | {"step": 21, "state": "exited", "exit": 1}])
        await shim.until(lambda: shim.handle.status.workers[0].step == 21)


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
        (b'{"v": 1, "status": {"uid": "u", "phase": "ready", "stepped": -1e999}}\n', "no status"),
        (b'{"v": 1, "status": {"uid": "u", "phase": "ready", "snapshot_bytes": %d}}\n' % 10**400, "no status"),
        (b'{"v": 1, "status": {"uid": "u", "phase": "ready", "ready": [%s""]}}\n' % (b'"",' * 5000), "no status"),
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


FIELDS = b",".join(b'"x%d": 0' % number for number in range(2000))


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        (b'"exits": [%s{}]' % (b"{}," * 100_000), "values"),
        (b'"x": {%s"y": 0}' % b"".join(b'"%x": 0,' % number for number in range(70_000)), "values"),
        (b'"exits": [%s{}]' % (b"{}," * 1000), "status.exits.0.rank: Field required (and 2 more)"),
        (b'"stall": {"limit": 1, "suspects": true, "ranks": [%s{}]}' % (b"{}," * 1000), "ranks.0.rank"),
        (FIELDS, "2000 mistakes"),
        (b'"%s": 0' % (b"x" * 100_000), "Extra inputs are not permitted"),
    ],
)
async def test_of_a_line_full_of_mistakes_few_are_looked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inside: bytes, why: str
) -> None:
    """The texts of a million mistakes took the agent 80 s and 3 GB: every pod of the node was fenced."""
    async with fake(tmp_path) as shim:
        line = b'{"v": 1, "status": {"uid": "u", "phase": "running", ' + inside + b"}}\n"
        assert len(line) < LINE_MAX
        shim.say()
        await shim.until(lambda: shim.handle.status.phase == "running")
        sending = asyncio.get_running_loop().run_in_executor(None, _send, shim, line)
        await shim.until(lambda: shim.handle.status.phase == "gone")
        await sending
    logged = next(text for text in caplog.messages if "sent what is no status" in text)
    assert why in logged
    assert len(logged) < 500


async def test_a_shim_that_does_nothing_but_speak_leaves_the_loop_to_others(tmp_path: Path) -> None:
    """Of eight such pods of one user each turn of the agent's loop took 5 s."""
    async with fake(tmp_path) as shim:
        line = json.dumps({"v": 1, "status": {"uid": "u", "phase": "running"}}).encode() + b"\n"
        received, most, receive = 0, 0, shim.handle._link.receive

        def count(line: bytes) -> None:
            nonlocal received
            received += 1
            receive(line)

        shim.handle._link.receive = count
        sending = asyncio.get_running_loop().run_in_executor(None, _send, shim, line * 2000)
        async with asyncio.timeout(BOUND):
            while received < 2000:
                before = received
                await asyncio.sleep(0)
                most = max(most, received - before)
        await sending
        assert most <= LINES_IN_A_TURN < READ_MAX // len(line)


async def test_a_line_that_comes_in_small_pieces_is_not_copied_for_each(tmp_path: Path) -> None:
    """Single bytes behind 4 MiB without an end took 2 ms each."""
    async with fake(tmp_path) as shim:
        reason = b"x" * (LINE_MAX // 2)
        line = b'{"v": 1, "status": {"uid": "u", "phase": "running", "reason": "' + reason
        await asyncio.get_running_loop().run_in_executor(None, _send, shim, line)
        await _has_read(shim, len(line))
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for size in range(len(line) + 1, len(line) + 51):
                shim.say_bytes(b"y")
                await _has_read(shim, size)
            grown = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        assert grown < len(line) // 2
        shim.say_bytes(b'"}}\n{"v": 1, "status": {"uid": "u", "phase": "exited"}}\n')
        await shim.until(lambda: shim.handle.status.phase == "exited")


async def _has_read(shim: Fake, size: int) -> None:
    async with asyncio.timeout(BOUND):
        while True:
            if len(shim.handle._link._in) == size:
                return
            await asyncio.sleep(0)


def _send(shim: Fake, received: bytes) -> None:
    try:
        shim.say_bytes(received)
    except OSError:  # nobody reads the rest
        return


async def test_a_shim_that_does_not_read_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shimlink, "OUT_MAX", 1 << 16)
    async with fake(tmp_path) as shim:
        shim.say()
        await shim.until(lambda: shim.handle.status.phase == "running")
        for number in range(100_000):
            shim.handle.command("ping", number=number)
            if not shim.handle.connected:
                break
        await shim.until(lambda: shim.handle.status.phase == "gone")
        assert "does not read" in shim.handle.status.reason


class Look:
    """In the place of the look at this machine's processes: finds ``left``, once it may come back."""

    def __init__(self, *left: int) -> None:
        self.left = list(left)
        self.error: OSError | None = None
        self.count = 0
        self.begun, self.gate = threading.Event(), threading.Event()

    def __call__(self, wanted: Set[MarkedProcesses]) -> dict[MarkedProcesses, list[int]]:
        self.count += 1
        self.begun.set()
        self.gate.wait(BOUND)
        if self.error is not None:
            raise self.error
        return dict.fromkeys(wanted, self.left)


async def begun(look: Look) -> None:
    """The loop goes on meanwhile."""
    async with asyncio.timeout(BOUND):
        while not look.begun.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.005)


async def dies_and_is_stuck(shim: Fake) -> None:
    shim.say()
    await shim.until(lambda: shim.handle.status.phase == "running")
    shim.process.kill()
    await shim.until(lambda: shim.handle.status.phase == "stuck")


async def test_a_look_that_does_not_come_back_is_reported_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Look()
    async with fake(tmp_path, Sweeper(look)) as shim:
        shim.say()
        await shim.until(lambda: shim.handle.status.phase == "running")
        monkeypatch.setattr(pod, "SWEEP_LIMIT", 0.02)
        shim.process.kill()
        await shim.until(lambda: shim.handle.status.phase == "stuck")
        why = "the look at this machine's processes takes more than 0.02 s"
        assert shim.handle.status.reason == f"{KILLED}, and what it left behind cannot be looked at: {why}"
        assert not shim.handle.may_restart
        look.gate.set()
        await shim.until(lambda: shim.handle.status.phase == "gone")
        assert (look.count, shim.handle.may_restart, shim.handle.status.reason) == (1, True, KILLED)


async def test_a_look_that_fails_is_reported_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = Look()
    look.error = OSError("too many open files")
    look.gate.set()
    monkeypatch.setattr(pod, "STUCK_AFTER", 0.05)
    monkeypatch.setattr(pod, "STUCK_EVERY", 0.01)
    async with fake(tmp_path, Sweeper(look)) as shim:
        await dies_and_is_stuck(shim)
        why = f"{KILLED}, and what it left behind cannot be looked at: too many open files"
        assert shim.handle.status.reason == why
        look.error = None
        await shim.until(lambda: shim.handle.status.phase == "gone")


async def test_a_cgroup_that_cannot_be_looked_at_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had left its mark behind was taken for dead."""
    look, full = Look(), [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]
    look.gate.set()

    def kill(_: PodCgroup) -> list[int]:
        for error in full:
            raise error
        return []

    monkeypatch.setattr(PodCgroup, "kill", kill)
    monkeypatch.setattr(pod, "STUCK_AFTER", 0.05)
    monkeypatch.setattr(pod, "STUCK_EVERY", 0.01)
    async with fake(tmp_path, Sweeper(look)) as shim:
        shim.handle._cgroup = PodCgroup(tmp_path / "none")
        await dies_and_is_stuck(shim)
        why = "what it left behind cannot be looked at: [Errno 24] Too many open files"
        assert shim.handle.status.reason == f"{KILLED}, and {why}"
        full.clear()
        await shim.until(lambda: shim.handle.status.phase == "gone")


async def test_what_does_not_end_is_looked_for_less_often_once_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Look(7, 8)
    look.gate.set()
    monkeypatch.setattr(pod, "STUCK_AFTER", 0.05)
    monkeypatch.setattr(pod, "STUCK_EVERY", 0.5)
    async with fake(tmp_path, Sweeper(look)) as shim:
        await dies_and_is_stuck(shim)
        assert shim.handle.status.reason == f"{KILLED}, and processes 7, 8 do not end, even with SIGKILL"
        often = look.count
        await asyncio.sleep(0.25)
        assert look.count == often > 1
        look.left = []
        await shim.until(lambda: shim.handle.status.phase == "gone")
        assert look.count == often + 1


async def test_a_shim_that_does_not_end_is_reported_and_its_workers_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Look(7)
    look.gate.set()
    monkeypatch.setattr(pod, "STUCK_AFTER", 0.05)
    monkeypatch.setattr(pod, "STUCK_EVERY", 0.01)
    monkeypatch.setattr(PodCgroup, "kill", lambda _: [])
    async with fake(tmp_path, Sweeper(look)) as shim:
        shim.say()
        await shim.until(lambda: shim.handle.status.phase == "running")
        with monkeypatch.context() as held:
            held.setattr(signal, "pidfd_send_signal", lambda *_: None)  # a disk that hangs holds it
            shim.handle.give_up("its shim stopped answering")
        await shim.until(lambda: shim.handle.status.phase == "stuck")
        assert shim.handle.status.reason == (
            "its shim stopped answering, and processes 7 do not end, even with SIGKILL"
        )
        assert not shim.handle.gone
        shim.process.kill()
        look.left = []
        await shim.until(lambda: shim.handle.status.phase == "gone")


async def test_what_a_shim_cannot_end_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says of it is no proof: its pod is never stuck by that."""
    monkeypatch.setattr(PodCgroup, "exists", True)
    monkeypatch.setattr(PodCgroup, "kill", lambda _: [])
    async with fake(tmp_path) as shim:
        shim.handle._cgroup = PodCgroup(tmp_path / "none")
        seen = list[str]()

        def see() -> None:
            seen.append(shim.handle.status.phase)
            shim.changed.set()

        shim.handle._changed = see
        shim.say()
        shim.say(phase="stuck", reason="processes 1 do not end")
        await shim.until(lambda: shim.handle.status.phase == "gone")
        assert seen == ["running", "stopping", "gone"]
        assert shim.handle.status.reason == NOT_ENDED


async def test_what_survives_root_holds_its_devices_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [7]
    monkeypatch.setattr(PodCgroup, "exists", True)
    monkeypatch.setattr(PodCgroup, "kill", lambda _: left)
    monkeypatch.setattr(PodCgroup, "remove", lambda _: None)
    monkeypatch.setattr(pod, "STUCK_AFTER", 0.05)
    monkeypatch.setattr(pod, "STUCK_EVERY", 0.01)
    async with fake(tmp_path) as shim:
        shim.handle._cgroup = PodCgroup(tmp_path / "none")
        shim.handle.start(order(1).model_copy(update={"devices": ("cpu3", "cpu4")}))
        shim.say(phase="stuck", generation={"number": 1, "id": "g1"})
        await shim.until(lambda: shim.handle.status.phase == "stuck")
        assert shim.handle.status.reason == f"{NOT_ENDED}, and processes 7 do not end, even with SIGKILL"
        assert [*shim.handle.status.held] == ["cpu3", "cpu4"]
        assert [(record.devices, record.stuck) for record in shim.kept] == [
            (("cpu3", "cpu4"), False), (("cpu3", "cpu4"), True),
        ]  # fmt: skip
        left.clear()
        await shim.until(lambda: shim.handle.status.phase == "gone")
        assert not shim.handle.status.held
        assert not shim.kept[-1].stuck


async def test_the_next_agent_holds_them_from_the_beginning(tmp_path: Path) -> None:
    record = PodRecord("u", os.geteuid(), "m", tmp_path / "logs", None, ("cpu3",), stuck=True, asked=8)
    records = PodRecords(tmp_path)
    records.write(record)
    (again,) = records.all().values()
    assert again == record
    handle = PodHandle(
        again, tmp_path, "unknown", changed=lambda: None, swept=lambda: None, ended=lambda _: None,
        keep=lambda _: None, shared=SharedByPods(Sweeper(kill_marked), AsideByOwner(), SpeechByOwner()),
    )  # fmt: skip
    assert (handle.status.phase, handle.status.held) == ("stuck", ("cpu3",))


async def test_without_root_a_shims_word_stands_and_says_that_nobody_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake(tmp_path) as shim:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        shim.say(phase="stuck", reason="processes 1 do not end", held=["cpu9"])
        await shim.until(lambda: shim.handle.status.phase == "stuck")
        assert shim.handle.status.reason == f"processes 1 do not end; {NO_ROOT}"
        assert shim.handle.status.held == (), "that is not the shim's to say"
        shim.say(phase="exited")
        await shim.until(lambda: shim.handle.status.phase == "exited")


async def test_a_pod_that_is_retired_while_it_is_swept_ends_and_is_not_started_meanwhile(tmp_path: Path) -> None:
    look = Look()
    async with fake(tmp_path, Sweeper(look)) as shim:
        shim.say()
        await shim.until(lambda: shim.handle.status.phase == "running")
        look.gate.set()
        shim.process.kill()
        await shim.until(lambda: shim.handle.may_restart)
        look.gate.clear()
        shim.handle.retire()
        assert not shim.handle.may_restart, "what the sweep removes in the end would be the next shim's"
        look.gate.set()
        async with asyncio.timeout(BOUND):
            while not shim.ended:  # noqa: ASYNC110 - nobody is woken
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("phase", ["exited", "running"])
async def test_a_shim_that_does_not_end_when_it_is_asked_to_is_killed(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that answers each ping: it is the user's, and he may have it do what he likes."""
    monkeypatch.setattr(pod, "RETIRE_LIMIT", 0.05)
    monkeypatch.setattr(pod, "LONGEST_END", 0.2)
    async with fake(tmp_path) as shim:
        shim.say(phase=phase)
        await shim.until(lambda: shim.handle.status.phase == phase)
        shim.handle.retire()
        async with asyncio.timeout(BOUND):
            while not shim.ended:  # noqa: ASYNC110 - nobody is woken
                await asyncio.sleep(0.005)
        assert shim.process.returncode == -signal.SIGKILL
        assert "shim of u is killed: its shim did not end when it was asked to" in caplog.text


async def test_what_of_a_retired_pod_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [7]
    monkeypatch.setattr(PodCgroup, "exists", True)
    monkeypatch.setattr(PodCgroup, "kill", lambda _: left)
    monkeypatch.setattr(PodCgroup, "remove", lambda _: None)
    monkeypatch.setattr(pod, "RETIRE_LIMIT", 0.05)
    monkeypatch.setattr(pod, "STUCK_AFTER", 0.05)
    monkeypatch.setattr(pod, "STUCK_EVERY", 0.01)
    async with fake(tmp_path) as shim:
        shim.handle._cgroup = PodCgroup(tmp_path / "none")
        shim.handle.retire()
        await shim.until(lambda: shim.handle.status.phase == "stuck")
        assert shim.handle.status.reason == (
            "its shim did not end when it was asked to, and was killed, and processes 7 do not end, even with SIGKILL"
        )
        left.clear()
        async with asyncio.timeout(BOUND):
            while not shim.ended:  # noqa: ASYNC110 - nobody is woken
                await asyncio.sleep(0.005)


async def test_a_retired_pod_has_the_time_of_what_runs_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of post_stop, for one: its shim bounds that, and is killed once it says that nothing runs any more."""
    monkeypatch.setattr(pod, "RETIRE_LIMIT", 0.05)
    looks = 0

    def wait(latest: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            shim.say(phase="exited")
        waits(latest)

    async with fake(tmp_path) as shim:
        shim.say(phase="stopping")
        await shim.until(lambda: shim.handle.status.phase == "stopping")
        waits = shim.handle._wait_for_end
        monkeypatch.setattr(shim.handle, "_wait_for_end", wait)
        shim.handle.retire()
        async with asyncio.timeout(BOUND):
            while not shim.ended:  # noqa: ASYNC110 - nobody is woken
                await asyncio.sleep(0.005)
        assert looks >= 3


async def test_a_retired_pod_whose_shim_is_never_found_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod, "RETIRE_LIMIT", 0.05)

    async def never() -> FoundShim:
        await asyncio.Event().wait()
        raise AssertionError

    ended = list[PodHandle]()
    handle = PodHandle(
        PodRecord("u", os.geteuid(), "m", tmp_path / "logs"), tmp_path, "unknown", changed=lambda: None,
        swept=lambda: None, ended=ended.append, keep=lambda _: None,
        shared=SharedByPods(Sweeper(kill_marked), AsideByOwner(), SpeechByOwner()),
    )  # fmt: skip
    handle.finds(never())
    handle.retire()
    async with asyncio.timeout(BOUND):
        while not ended:  # noqa: ASYNC110 - nobody is woken
            await asyncio.sleep(0.005)
    handle.let_go()


async def test_a_pod_that_is_let_go_while_it_is_swept_leaves_nothing_behind(tmp_path: Path) -> None:
    look = Look()
    async with fake(tmp_path, Sweeper(look)) as shim:
        shim.process.kill()
        await begun(look)
        shim.handle.let_go()
        async with asyncio.timeout(BOUND):
            while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 - nobody is woken
                await asyncio.sleep(0)
        look.gate.set()
        assert (shim.handle.status.phase, shim.ended) == ("ready", [])


async def test_what_is_in_the_place_of_a_dead_shims_folder_is_never_looked_at_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a file system of the user's, which does not answer."""
    answers = threading.Event()

    def hangs(trusted: Path, name: str) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        assert trusted / name == tmp_path
        return answers.wait(BOUND)

    monkeypatch.setattr(pod, "is_there", hangs)
    monkeypatch.setattr(pod, "LEFT_LIMIT", 0.02)
    async with fake(tmp_path) as shim:
        shim.say()
        await shim.until(lambda: shim.handle.status.phase == "running")
        shim.process.kill()
        await shim.until(lambda: shim.handle.status.phase == "gone")
        assert shim.ended == []
        answers.set()


async def test_why_a_shim_could_not_start_is_not_waited_for_on_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrusted, "OWNER_MAX", 0)
    monkeypatch.setattr(pod, "LEFT_LIMIT", 0.02)
    async with fake(tmp_path) as shim:
        shim.process.kill()
        await shim.until(lambda: shim.handle.status.phase == "unfit")
        log, hang = tmp_path / "logs" / "shim.log", f"0 earlier looks for uid {os.geteuid()} have not come back"
        why = f"the shim could not start: its own words in {log} cannot be read: {hang}"
        assert (shim.handle.status.reason, shim.handle.status.passing) == (why, True)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGTERM, "its shim was killed by SIGTERM (15), not by nodeagent"),
        (signal.SIGRTMIN + 1, "its shim was killed by signal 35, not by nodeagent"),
    ],
)
async def test_a_signal_of_somebody_elses_that_ends_a_shim_is_named(tmp_path: Path, number: int, reason: str) -> None:
    """A job whose own code ran ``pkill python`` was restarted again and again, since "the shim died"."""
    async with fake(tmp_path) as shim:
        shim.say()
        await shim.until(lambda: shim.handle.status.phase == "running")
        shim.process.send_signal(number)
        await shim.until(lambda: shim.handle.status.phase == "gone")
        assert shim.handle.status.reason == reason


async def test_a_shim_that_nodeagent_kills_died_of_that(tmp_path: Path) -> None:
    async with fake(tmp_path) as shim:
        shim.say()
        await shim.until(lambda: shim.handle.status.phase == "running")
        shim.handle.give_up("its shim is not reached")
        await shim.until(lambda: shim.handle.status.phase == "gone")
        assert shim.handle.status.reason == "its shim is not reached"
