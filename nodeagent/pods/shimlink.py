"""The connection to one shim: its lines, read and handled so that one that never stops speaking holds up nobody; what
it is sent; and that it answers.

Knows nothing of what a line means (``pod.py``), nor how much all shims of a user may say together (``speech.py``).
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nodeagent.osutil.clock import Allowance
from nodeagent.osutil.linux import read_proc
from nodeagent.osutil.untrusted import NotSeenError, UntrustedError, UntrustedFolder
from nodeagent.pods.speech import LONG, PART, OwnersSpeech
from nodeagent.shim.peers import LINE_MAX, VERSION

READ_MAX = 1 << 13
"""Bytes of a shim that are read in one go: many that do nothing but speak cost the loop little in each turn."""
LINES_AT_ONCE, LINES_PER_SECOND = 8192.0, 400.0
"""Lines of a shim that are read as they come, and in the long run, a KiB counted as another line: beyond them it waits.
One that never stops speaking costs the loop some hundredths of a core; one of a thousand workers says 130 KiB at a
time, a few dozen times while its gang is formed again."""
LINES_IN_A_TURN = 4
"""Lines of a shim that are handled in one turn of the loop: each of a hundred pods may have as many, and a turn is to
take some hundredths of a second."""
OUT_MAX = 1 << 25
"""Bytes that wait for a shim to read them, start orders with their environments among them; a shim for which more wait
is killed."""
SILENT = 2.0
"""Seconds that a shim may take to answer a ping: machines are busy."""
SILENT_AT_FIRST = 10.0
"""The same for one that has not spoken yet: it starts."""
LATE = 0.5
"""A look at a silent shim that comes later than this is put off once: it was this process that did not run."""


class ShimLink:
    """``receive`` is called with each line, ``lost`` when the shim has closed the connection, ``give_up``, with the
    reason, when it is of no use any more: then whoever made this closes it."""

    def __init__(
        self,
        speech: OwnersSpeech,
        *,
        receive: Callable[[bytes], None],
        lost: Callable[[], None],
        give_up: Callable[[str], None],
    ) -> None:
        self.receive, self._lost, self._give_up, self._speech = receive, lost, give_up, speech
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._in, self._out = bytearray(), bytearray()
        """Grown and cut at their ends only: a shim says, and hears, as little at a time as it likes."""
        self._unhandled = deque[bytes]()
        """Lines that were read."""
        self._lines = Allowance(LINES_AT_ONCE, LINES_PER_SECOND)
        self._resuming: asyncio.TimerHandle | None = None
        """Until it is read again."""
        self._reads = False
        self._pinged = 0
        """The newest ping that was sent."""
        self._unanswered: asyncio.TimerHandle | None = None
        """Until it is given up, unless it answers a ping."""

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def attach(self, connected: socket.socket) -> None:
        """Use this socket."""
        connected.setblocking(False)
        self._socket, self._in, self._out = connected, bytearray(), bytearray()
        self._pinged = 0
        self._read_on(True)

    def close(self) -> None:
        """Nothing that was read is handled any more."""
        self._stop_waiting()
        self._unhandled.clear()
        self._speech.no_turn(self)
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        if self._socket is not None:
            self._read_on(False)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None

    # -- lines of the shim

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(READ_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._lost()
            return
        first, *later = data.split(b"\n")  # later ones are shorter than what is read at a time
        self._in += first
        if len(self._in) > LINE_MAX:
            self._give_up(f"its shim sent a line of more than {LINE_MAX} bytes")
            return
        for part in later:
            self._unhandled.append(bytes(self._in))
            self._in = bytearray(part)
        self._handle(len(data) / 1024)

    def _handle(self, spent: float = 0.0) -> None:
        """Some of the lines that were read. ``spent``: what reading them counts. Until the rest may be handled, no more
        is read."""
        size = 0
        for _ in range(LINES_IN_A_TURN):
            if not self._unhandled or len(self._unhandled[0]) > LONG:
                break
            spent, size = spent + 1, size + len(self._unhandled[0])
            self.receive(self._unhandled.popleft())
        self._spend(spent, size)

    def _handle_long(self) -> None:
        size = len(self._unhandled[0])
        self.receive(self._unhandled.popleft())
        self._spend(1, size)

    def _spend(self, lines: float, size: int) -> None:
        """Wait for more from the shim, or until what was read may be handled. ``size``: bytes that were handled."""
        now = self._loop.time()
        wait = max(self._lines.spend(lines, now), self._speech.lines.spend(lines + size / PART, now))
        if self._socket is None:
            return
        self._read_on(not (wait or self._unhandled))
        if not wait and self._unhandled and len(self._unhandled[0]) > LONG:
            self._speech.in_turn(self, self._handle_long)
        elif not self._reads:
            self._resuming = self._loop.call_later(wait, self._go_on)

    def _go_on(self) -> None:
        self._resuming = None
        self._handle()

    def _read_on(self, reads: bool) -> None:
        assert self._socket is not None
        if reads and not self._reads:
            self._loop.add_reader(self._socket, self._readable)
        elif self._reads and not reads:
            self._loop.remove_reader(self._socket)
        self._reads = reads

    # -- what it is sent

    def send(self, command: Mapping[str, Any]) -> None:
        """Nothing where it is not connected."""
        self._out += json.dumps({"v": VERSION, **command}).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # the read side sees the end
        if len(self._out) > OUT_MAX:
            self._give_up("its shim does not read what it is sent")
        elif self._out:
            self._loop.add_writer(self._socket, self._flush)
        else:
            self._loop.remove_writer(self._socket)

    # -- whether it answers

    def expect_echo(self, number: int, wait: float) -> None:
        """A ping has been sent, if this is connected: one that does not answer within so many seconds has hung."""
        if self._socket is not None:
            self._pinged = number
            if self._unanswered is None:
                self._wait_for_echo(wait)

    def echoed(self, number: int) -> None:
        """One that is behind, but goes on, has all of its time anew."""
        self._stop_waiting()
        if number < self._pinged:
            self._wait_for_echo(SILENT)

    def _wait_for_echo(self, wait: float) -> None:
        at = self._loop.time() + wait
        self._unanswered = self._loop.call_at(at, self._is_silent, wait, at)

    def _stop_waiting(self) -> None:
        if self._unanswered is not None:
            self._unanswered.cancel()
            self._unanswered = None

    def _is_silent(self, waited: float, due: float) -> None:
        self._unanswered = None
        if self._loop.time() > due + LATE:
            self._wait_for_echo(SILENT)
        else:
            self._give_up(f"the shim stopped answering for {waited:.0f} s and was killed")


def socket_of(folder: Path, owner: int, shim: int) -> socket.socket:
    """A connection, which does not block, to the shim behind this pidfd, which listens in this folder of its user.
    Raises UntrustedError."""
    with UntrustedFolder(folder.parent, folder.name, owner=owner) as run:
        link, pid = run.connect("s")
    facts = read_proc(f"/proc/self/fdinfo/{shim}")
    if f"Pid:\t{pid}\n".encode() not in facts:
        link.close()
        if not facts:  # our own descriptor's are never empty
            raise NotSeenError(f"who listens in {folder} cannot be looked at")
        raise UntrustedError(f"process {pid} listens in {folder}, not the shim")
    return link
