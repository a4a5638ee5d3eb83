"""What workers may say to their shim, and who is a worker: real sockets, the kernel's word on who speaks."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nodeagent.pods.base import CommitRequest
from nodeagent.shim import peers
from nodeagent.shim.gang import LocalGang
from nodeagent.shim.link import OPS, Call, WorkerLink
from nodeagent.shim.loop import Loop
from nodeagent.shim.peers import Peer
from nodeagent.shim.worker import Worker
from nodeagent.train import link as train_link
from nodeagent.train.link import Link, LinkError
from tests.integration.shim_support import UID, make_spec, open_bench, pid_of, shim_with, token, wait_for

ROOT = Path(__file__).parents[2]


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


SAY = """
import os, sys
sys.path.insert(0, {root!r})
from nodeagent.train import Link, LinkError
link = Link.of_environment()
try:
    link.ask("nonsense")
except LinkError as error:
    print(error, flush=True)
if sys.argv[1:] == ["child"]:
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
"""


UNKNOWN = "this shim does not know worker.nonsense: the job's nodeagent is newer than the node's"


class Desk:
    """A shim's listening socket with a link behind it, in a thread of its own; this process is worker 5."""

    def __init__(self, path: Path) -> None:
        self.path, self.calls = path, list[Call]()
        self.worker = Worker.__new__(Worker)
        self.worker.rank, self.worker.local_rank, self.worker.pid, self.worker.ended = 5, 1, os.getsid(0), False
        self.gang = gang = LocalGang.__new__(LocalGang)
        gang.token, gang.workers = {"number": 7, "id": "x"}, [self.worker]
        gang.parts = cast("Any", SimpleNamespace(containers=None))
        gang._launcher = cast("Any", SimpleNamespace(forking=False))
        self.link = WorkerLink(lambda: gang)
        self.loop = Loop()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._end, self._ended = os.pipe()
        self.loop.watch(self._listener.fileno(), self._accept)
        self.loop.watch(self._end, self.loop.stop)
        self._thread = threading.Thread(target=self.loop.run)

    def _accept(self) -> None:
        peer = Peer(self.loop, self._listener.accept()[0], self.link.receive, lambda _: None)
        peer.send('{"v": 1, "status": {}}')

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        os.write(self._ended, b"x")
        self._thread.join()
        self._listener.close()
        for fd in (self._end, self._ended):
            os.close(fd)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "s")
    made.link.add(
        "echo", lambda call: call.answer(rank=call.rank, local=call.local_rank, received=call.message["text"])
    )
    made.link.add("note", made.calls.append)
    made.open()
    yield made
    made.close()


def test_both_sides_speak_one_version() -> None:
    assert train_link.VERSION == peers.VERSION
    assert OPS == "worker."


def test_one_that_could_not_be_looked_at_is_not_called_a_stranger(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(pid: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(desk.gang, "speaker", full)
    link = Link(str(desk.path))
    with pytest.raises(LinkError, match="who asks was not to be seen: Too many open files"):
        link.ask("echo", text="hello")
    monkeypatch.undo()
    assert link.ask("echo", text="hello")["rank"] == 5


def test_a_question_is_answered_with_who_asked(desk: Desk) -> None:
    link = Link(str(desk.path))
    assert link.ask("echo", text="hello") == {"rank": 5, "local": 1, "received": "hello"}
    assert link.ask("echo", text="x" * 3_000_000)["received"] == "x" * 3_000_000


NOTES = 200
"""So many fit into the kernel's buffer (212,992 bytes, of which a note takes 768): nobody has to read meanwhile."""


def test_what_is_reported_arrives_in_order_and_needs_no_reader(desk: Desk) -> None:
    link = Link(str(desk.path))
    assert all(link.send("note", n=n) for n in range(NOTES))
    link.ask("echo", text="")
    assert [call.message["n"] for call in desk.calls] == list(range(NOTES))
    link.close()


def test_descriptors_go_both_ways(desk: Desk) -> None:
    def turn_over(call: Call) -> None:
        assert not os.get_inheritable(call.fds[0])
        content = os.pread(call.fds[0], 100, 0)
        mine = os.memfd_create("mine")
        os.write(mine, content.upper())
        call.answer(fds=(mine,))
        os.close(mine)

    desk.link.add("turn", turn_over)
    before = open_descriptors()
    fd = os.memfd_create("theirs")
    os.write(fd, b"hello")
    answer = Link(str(desk.path)).ask("turn", fds=(fd,))
    assert os.pread(answer.fds[0], 100, 0) == b"HELLO"
    for one in (fd, *answer.fds):
        os.close(one)
    Link(str(desk.path)).ask("echo", text="", fds=(0, 1))  # nobody takes them
    end = time.monotonic() + 10
    while open_descriptors() > before:  # the shim closes its side when it sees that we have
        assert time.monotonic() < end, "descriptors are left open"
        time.sleep(0.01)


def test_refusals_say_why(desk: Desk) -> None:
    link = Link(str(desk.path))
    with pytest.raises(LinkError, match=r"does not know worker\.nonsense"):
        link.ask("nonsense")
    with pytest.raises(LinkError, match="not as it must be: KeyError"):
        link.ask("echo")
    desk.link.add("number", lambda call: call.answer(number=int(call.message["n"])))
    with pytest.raises(LinkError, match="not as it must be: OverflowError"):
        link.ask("number", n=float("inf"))
    desk.worker.ended = True
    with pytest.raises(LinkError, match="only workers of the present generation"):
        link.ask("echo", text="")
    desk.worker.ended, desk.worker.pid = False, os.getsid(0) + 1
    with pytest.raises(LinkError, match="only workers of the present generation"):
        link.ask("echo", text="")


def test_a_value_too_deep_for_its_own_refusal_is_refused(desk: Desk) -> None:
    def must_be_zero(call: Call) -> None:
        raise ValueError(f"step is {call.message['step']!r}")

    desk.link.add("done", must_be_zero)
    for deep in range(100, 950, 50):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(desk.path))
            line.settimeout(10)
            line.sendall(b'{"v": 1, "id": 1, "op": "worker.done", "step": ' + b"[" * deep + b"]" * deep + b"}\n")
            received = b""
            while b'"id": 1' not in received:
                more = line.recv(1000)
                assert more, f"{deep} deep: not answered"
                received += more
        assert b"the message is not as it must be" in received


def test_nobody_waits_for_a_shim_that_does_not_answer(desk: Desk, tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"did not answer worker.note within 0.1 s"):
        Link(str(desk.path)).ask("note", timeout=0.1)
    with pytest.raises(LinkError, match="No such file"):
        Link(str(tmp_path / "none")).ask("note")
    assert not Link(str(tmp_path / "none")).send("note")
    full = tmp_path / "full"
    with socket.socket(socket.AF_UNIX) as deaf:  # a shim that is stopped: it takes nothing off its socket
        deaf.bind(str(full))
        deaf.listen(1)
        link = Link(str(full))
        assert link.send("note", text="x" * 1000)
        assert not link.send("note", text="x" * 10_000_000)
        assert not link.send("note")
        link.close()


def test_descriptors_that_do_not_arrive_are_missed(desk: Desk) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(desk.path))
        line.settimeout(10)
        line.sendall(b'{"v": 1, "id": 1, "op": "worker.echo", "text": "", "fds": 2}\n')
        received = b""
        while b'"id": 1' not in received:
            received += line.recv(1000)
    assert b"too many files open" in received


@pytest.mark.parametrize(
    "rubbish",
    [
        b"[" * 100_000 + b"\n", b"[]\n", b"7\n", b"\xff\n", b"{\n",
        *(b'{"v": 1, "op": "worker.none", "id": ' + b"[" * deep + b"]" * deep + b"}\n" for deep in range(1, 1000, 9)),
    ],
    ids=lambda rubbish: rubbish[:40].decode(errors="replace") + str(len(rubbish)),
)  # fmt: skip
def test_rubbish_ends_the_connection_and_nothing_else(desk: Desk, rubbish: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(desk.path))
        line.settimeout(10)
        line.sendall(rubbish)
        while line.recv(1000):
            pass
    assert Link(str(desk.path)).ask("echo", text="still there")


COMMIT = """
import sys
sys.path.insert(0, {root!r})
from nodeagent.train import Link, LinkError
link = Link.of_environment()
for order in (1, 2):
    try:
        print(link.ask("commit", 30, name=f"c{{order}}", step=10, order=order), flush=True)
    except LinkError as error:
        print(error, flush=True)
print(link.ask("commit.last")["name"], flush=True)
for wrong in ({{"name": "../x"}}, {{"step": -1}}, {{"order": 1 << 60}}, {{"name": 7}}):
    try:
        link.ask("commit", 30, **({{"name": "c", "step": 1, "order": 1}} | wrong))
    except LinkError as error:
        print(error, flush=True)
try:
    link.ask("commit", 0.2, name="c3", step=10, order=3)
except LinkError as error:
    print(error, flush=True)
"""


async def test_a_commit_goes_to_the_agent_with_the_generations_token_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "w.py").write_text(COMMIT.format(root=str(ROOT)))
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec((sys.executable, str(tmp_path / "w.py")), tmp_path))
        bench.host.start(UID, bench.order(7))
        first = (await bench.until(lambda s: s.commit)).commit
        assert first == CommitRequest(token=token(7), name="c1", step=10, order=1)
        bench.host.committed(UID, first.model_copy(update={"order": 9}), "")  # an answer to something else
        bench.host.committed(UID, first, "")
        second = (await bench.until(lambda s: s.commit and s.commit.name == "c2")).commit
        assert second is not None
        bench.host.committed(UID, second, "it is not the newest")
        status = await bench.until(lambda s: s.phase == "exited")
        assert status.commit is None, "what an ended worker wished is forgotten"
        await wait_for(lambda: len(bench.output(7)) >= 8)
        received = bench.output(7)
        assert received[:3] == ["{'name': 'c1'}", "it is not the newest", "c1"]
        assert ["not as it must be" in line for line in received[3:7]] == [True] * 4
        assert received[7:] == ["the shim did not answer worker.commit within 0.2 s"]


async def test_a_worker_that_speaks_before_the_shim_knows_its_pid_is_answered_then(tmp_path: Path) -> None:
    """It runs as soon as it is forked, and the fork server's word of it may come later than its own."""
    (tmp_path / "w.py").write_text(SAY.format(root=str(ROOT)))
    change = (
        "fork = client.ForkServer.fork\n"
        "def late(self, argv, env, cwd, limits, fds, forked):\n"
        "    later = lambda pid, error: self._loop.after(0.5, lambda: forked(pid, error))\n"
        "    fork(self, argv, env, cwd, limits, fds, later)\n"
        "client.ForkServer.fork = late"
    )
    async with open_bench(tmp_path, shim_with(tmp_path, change)) as bench:
        await bench.ready(make_spec((sys.executable, str(tmp_path / "w.py"), "child"), tmp_path))
        await bench.running(1, ({}, {}))
        for rank in range(2):
            await bench.output_line(UNKNOWN, rank=rank)


@pytest.mark.parametrize("fork_server", [True, False])
async def test_a_worker_and_its_children_may_speak_and_nobody_else(tmp_path: Path, fork_server: bool) -> None:
    (tmp_path / "w.py").write_text(SAY.format(root=str(ROOT)))
    again = f"{sys.executable} {tmp_path}/w.py; exec {sys.executable} {tmp_path}/w.py child"
    command = (sys.executable, str(tmp_path / "w.py"), "child") if fork_server else ("sh", "-c", again)
    async with open_bench(tmp_path) as bench:
        await bench.ready(make_spec(command, tmp_path, fork_server=fork_server))
        status = await bench.running(1)
        await wait_for(lambda: bench.output().count(UNKNOWN) == (1 if fork_server else 2))
        socket_file = next((tmp_path / "run" / "pods").glob("*/s"))
        environ = os.environ | {"NODEAGENT_SOCKET": str(socket_file)}
        stranger = [sys.executable, str(tmp_path / "w.py")]
        done = await asyncio.to_thread(
            subprocess.run, stranger, env=environ, capture_output=True, text=True, timeout=30, start_new_session=True
        )
        assert done.stdout == "only workers of the present generation are accepted here\n"
        os.kill(pid_of(status.workers[0]), signal.SIGKILL)
        await bench.until(lambda s: s.phase == "exited")
