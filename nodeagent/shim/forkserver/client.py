"""The shim's side of the fork server: starting it, asking it for forks or taking one that is pre-forked, having it
reap.

Standard library only. A fork server that dies takes its workers with it; the shim then reaps them itself. Must never
wait for the fork server: answers come through the loop.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nodeagent.shim.checks import program_words
from nodeagent.shim.forkserver.pool import NO_MESSAGE, Pool
from nodeagent.shim.loop import Loop
from nodeagent.shim.processes import start_program

WARM_BOUND = 120.0
"""Seconds until a fork server that does not come up is given up."""
MOST_REPORTED = 128 << 10
"""The most bytes of command and environment that a fork server gets; with more a worker starts cold. A message that
does not fit into a socket's buffer (200 KiB) is not sent at all."""
NOTES, NOTE_CHARS = 20, 500
"""Of what a fork server says went wrong: so many notes, each so long."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
AT_START = ("PYTHON", "LD_", "GLIBC_TUNABLES", "MALLOC_", "LANG", "LC_", "TZ")
"""How the names of variables begin that count when a program starts, and not in a fork; but for ``UNBUFFERED``, which
server.py obeys."""
UNBUFFERED = "PYTHONUNBUFFERED"

_PID_MAX = 1 << 22
"""Linux has no larger one."""

Forked = Callable[[int, str], None]
"""pid and "", or 0 and what failed."""


class ForkServer:
    """One fork server process. ``changed`` is called when it became warm, unusable or died, and when a worker was
    pre-forked or lost."""

    def __init__(self, loop: Loop, changed: Callable[[], None]) -> None:
        self._loop, self._changed = loop, changed
        self._link: socket.socket | None = None
        self._forks: dict[int, Forked] = {}
        self._reaps: dict[int, Callable[[int], None]] = {}
        self._next = 0
        self._unsent: deque[tuple[dict[str, Any], list[int]]] = deque()
        """Commands that the link's buffer does not hold yet, each with copies of its descriptors. At most two for each
        worker of the pod: one to start it, one to reap it."""
        self.pool = Pool(loop, self._prefork, lambda pid: self.reap(pid, lambda _status: None), changed)
        self.pid: int | None = None
        self.warm = False
        self.has_torch = False
        self.unusable = False
        """Another one would be no better: workers start cold."""
        self._notes: list[str] = []
        self._programs: Sequence[Sequence[str]] = ()
        self._path = ""
        self._at_start: Mapping[str, str] = {}

    @property
    def notes(self) -> list[str]:
        """What went wrong, for the person."""
        return self._notes + self.pool.notes

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        path0: str,
        preload: Sequence[str],
        guessed: Sequence[str],
        programs: Sequence[Sequence[str]],
    ) -> None:
        """Run the interpreter of the job's command on server.py; ``warm`` follows. ``programs``: the commands that it
        could start, by what is in their folders (``checks.check``). Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {
            "shim": os.getpid(), "fd": theirs.fileno(), "preload": list(preload),
            "guessed": list(guessed), "path0": path0, "program": program_words(command)[0],
        }  # fmt: skip
        source = str(Path(__file__).with_name("server.py"))
        argv = [command[0], source, json.dumps(config)]
        self._programs, self._path = [list(program) for program in programs], env.get("PATH", "")
        self._at_start = _of_start(env)
        env = {"RES_OPTIONS": "timeout:1 attempts:1", **env, **ONE_THREAD}
        with contextlib.closing(theirs):
            try:
                self.pid = start_program(argv, env, cwd, 2, 2, keep=(theirs.fileno(),))
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._link = ours
        self._loop.watch(ours.fileno(), self._readable)
        self._loop.after(WARM_BOUND, lambda: self._overdue(ours))

    def give_up(self, why: str) -> None:
        """It is of no use, and another one would not be."""
        self.unusable = True
        self._notes.append(f"{why}; workers start without a fork server")
        self.kill()
        self._changed()

    def takes(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether it could start this: it is warm, this is a program for the very interpreter that it is (another role
        may have another one, or none, or start it with another environment), and the message is one that a socket takes
        whole."""
        found = "/" in argv[0] or env.get("PATH", "") == self._path
        if not (self.warm and found and list(argv) in self._programs and _of_start(env) == self._at_start):
            return False
        return len(json.dumps([list(argv), dict(env)])) < MOST_REPORTED

    def fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        limits: Sequence[tuple[int, int]],
        fds: Sequence[int],
        forked: Forked,
    ) -> None:
        """A worker, a pre-forked one if there is one; ``forked`` gets its pid, which stays valid until ``reap``. A
        pre-forked one runs when ``forked`` has returned."""
        command = {"op": "fork", "argv": list(argv), "env": dict(env), "cwd": cwd, "limits": list(limits)}
        preforked = self.pool.take()
        if preforked is None:
            self._ask(command, fds, forked)
        else:
            forked(preforked.pid, "")
            preforked.give(command, fds)

    def _prefork(self, link: int, deep: bool, forked: Forked) -> None:
        self._ask({"op": "prefork", "deep": deep}, (link,), forked)

    def host_store(self, host: str, port: int, listening: int, answer: int, forked: Forked) -> None:
        """A store process on this listening socket; it writes "ok" or what failed to ``answer``."""
        self._ask({"op": "store", "host": host, "port": port}, (listening, answer), forked)

    def reap(self, pid: int, reaped: Callable[[int], None]) -> None:
        """Have an ended fork reaped; ``reaped`` gets its wait status, or -1 if it has no answer."""
        if self._link is None:
            reaped(-1)
            return
        self._reaps[pid] = reaped
        self._send({"op": "reap", "pid": pid}, ())

    def kill(self) -> None:
        """End it at once; ``gone`` must be called when it has been reaped."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def gone(self) -> None:
        """It has died: everything still asked of it has failed."""
        self._readable()  # what it answered before; while the pid stands no other one is started for that
        self.pid = None
        self._unlink()
        self._changed()

    def _unlink(self) -> None:
        self.warm = False
        if self._link is None:
            return
        self._loop.forget(self._link.fileno())
        self._link.close()
        self._link = None
        while self._unsent:
            _close(self._unsent.popleft()[1])
        self.pool.clear()
        forks, self._forks = self._forks, {}
        reaps, self._reaps = self._reaps, {}
        for forked in forks.values():
            forked(0, "the fork server died")
        for reaped in reaps.values():
            reaped(-1)

    def _ask(self, command: dict[str, Any], fds: Sequence[int], forked: Forked) -> None:
        if self._link is None:
            forked(0, "the fork server died")
            return
        self._next += 1
        self._forks[self._next] = forked
        try:
            self._send({**command, "id": self._next}, fds)
        except OSError as error:  # no descriptor is free
            self._forks.pop(self._next)(0, f"it cannot wait for the fork server: {error.strerror}")

    def _send(self, command: dict[str, Any], fds: Sequence[int]) -> None:
        """Commands arrive in order. What the link's buffer does not hold waits until the fork server has read some:
        many workers are started at once, and each command has a whole environment. Raises OSError if there is no
        descriptor for it to wait with."""
        if self._unsent or not self._sent(command, fds):
            copies: list[int] = []
            try:
                copies.extend(map(os.dup, fds))
            except OSError:
                _close(copies)
                raise
            self._unsent.append((command, copies))
            self._await_room(True)

    def _sent(self, command: dict[str, Any], fds: Sequence[int]) -> bool:
        """False if there is no room for it now. A fork server that takes no command is killed: its workers'
        statuses then come to the shim."""
        assert self._link is not None
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._link.sendmsg([json.dumps(command).encode()], rights)
        except BlockingIOError:
            return False
        except OSError as error:
            note = f"the fork server took no command ({error.strerror}): it was ended"
            if note not in self._notes:  # nor does it take those that wait
                self._notes.append(note)
            self.kill()
        return True

    def _send_more(self) -> None:
        while self._unsent and self._sent(*self._unsent[0]):
            _close(self._unsent.popleft()[1])
        if not self._unsent:
            self._await_room(False)

    def _await_room(self, wanted: bool) -> None:
        assert self._link is not None
        self._loop.writable(self._link.fileno(), self._readable, wanted, self._send_more)

    def _readable(self) -> None:
        while self._link is not None:
            try:
                data = self._link.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._unlink()
                self.kill()
                return
            try:
                follow = self._receive(json.loads(data))
            except NO_MESSAGE as error:
                self._notes.append(f"the fork server sent what is no message ({type(error).__name__}): it was ended")
                self._unlink()
                self.kill()
            else:
                follow()

    def _receive(self, message: dict[str, Any]) -> Callable[[], object]:
        """What is to follow; an error of that is no error of the message."""
        match message["event"]:
            case "warm":
                self.has_torch = message["torch"]
                self._notes = [str(note)[:NOTE_CHARS] for note in message["notes"][:NOTES]]
                unusable = str(message["unusable"])
                return partial(self.give_up, unusable) if unusable else self._warmed
            case "forked":
                pid = message["pid"]
                if type(pid) is not int or not 1 < pid < _PID_MAX:
                    raise ValueError(f"pid is {pid!r}")
                return partial(self._forks.pop(message["id"]), pid, "")
            case "failed":
                return partial(self._forks.pop(message["id"]), 0, str(message["error"])[:NOTE_CHARS])
            case "reaped":
                status = message["status"]
                if status != -1:
                    os.waitstatus_to_exitcode(status)  # the caller that waits is to get no other: ValueError
                return partial(self._reaps.pop(message["pid"]), status)
            case _:
                return bool  # of a newer fork server: nothing

    def _warmed(self) -> None:
        self.warm = True
        self._changed()
        self.pool.fill()

    def _overdue(self, link: socket.socket) -> None:
        if self._link is link and not self.warm:
            self.give_up(f"it was not warm after {WARM_BOUND:.0f} s")


def _of_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(AT_START) and name != UNBUFFERED}


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
