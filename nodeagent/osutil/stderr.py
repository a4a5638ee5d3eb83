"""Standard error that holds up no program and ends none: where nobody reads it (a pager that was stopped, a log
collector that hangs), or its disk is full, lines are lost, and counted.

Owns the queue between those that log and the one thread that writes. Standard library only, because the shim and the
lease process import it. Must never wait for the reader where a line is logged.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import threading
from collections import deque

QUEUED_LINES = 4096
"""The most lines that wait to be written."""
QUEUED_BYTES = 1 << 20
"""The most bytes that wait to be written; a longer line is lost."""
WITHOUT_WAIT = select.PIPE_BUF
"""Bytes for which a pipe that poll(2) calls writable has room; POSIX says no more of it."""
FLUSH_BOUND = 1.0
"""Seconds for which the end of the process waits until all is written."""


class QueuedLines(io.FileIO):
    """An open file that a daemon thread writes, in order. Lines for which the queue, or the file, has no room are lost;
    the next one that is written comes after a line that says how many were."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._begun = b""
        """A line of which the end has not come yet."""
        self._queue = deque[tuple[int, bytes]]()
        """Each line, and how many were lost before it."""
        self._bytes = self._lost = 0
        self._busy = self._ended = False
        threading.Thread(target=self._run, name="stderr", daemon=True).start()

    def write(self, data: object, /) -> int:
        """Never raises, never waits."""
        text = bytes(memoryview(data))  # type: ignore[arg-type]
        if self._ended or os.getpid() != self._pid:  # the thread is not there any more, or not in this fork
            for line in self._whole_lines(text):
                self._write_what_fits(line)
            return len(text)
        with self._changed:
            for line in self._whole_lines(text):
                self._put(line)
            self._changed.notify_all()
        return len(text)

    def end(self) -> None:
        """Wait until all is written, at most ``FLUSH_BOUND``. What comes later is written at once, or lost where that
        would have to wait."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._begun or self._lost:
                self._queue.append((self._lost, self._begun))
                self._bytes += len(self._begun)
                self._begun, self._lost = b"", 0
                self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue and not self._busy, FLUSH_BOUND)
            self._ended = True

    def _whole_lines(self, text: bytes) -> list[bytes]:
        """Those that end with this text: a line and its end may come one after the other."""
        *lines, self._begun = (self._begun + text).split(b"\n")
        found = [line + b"\n" for line in lines]
        if len(self._begun) > QUEUED_BYTES:
            found.append(self._begun)
            self._begun = b""
        return found

    def _put(self, line: bytes) -> None:
        if len(self._queue) >= QUEUED_LINES or self._bytes + len(line) > QUEUED_BYTES:
            self._lost += 1
            return
        self._queue.append((self._lost, line))
        self._bytes += len(line)
        self._lost = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue)
                lost, line = self._queue.popleft()
                self._bytes -= len(line)
                self._busy = True
            if not self._write_out(_note(lost) + line):
                with self._changed:
                    self._lost += lost + 1

    def _write_what_fits(self, text: bytes) -> None:
        while text and _has_room(self.fileno()) and self._write_out(text[:WITHOUT_WAIT]):
            text = text[WITHOUT_WAIT:]

    def _write_out(self, text: bytes) -> bool:
        """Whether the file took it all."""
        try:
            while text:
                text = text[os.write(self.fileno(), text) :]
        except OSError:
            return False
        return True


def _note(lost: int) -> bytes:
    """Nothing, if none is."""
    if not lost:
        return b""
    return f"nodeagent: {lost} lines of this log are lost: it was not read, or its disk was full\n".encode()


def _has_room(fd: int) -> bool:
    """``WITHOUT_WAIT`` bytes can be written without a wait."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def lossy_stderr() -> io.TextIOWrapper:
    """A stream for ``sys.stderr``: see ``QueuedLines``. What is queued when Python ends, such as a traceback, is
    written first; a signal's default action, and ``os._exit``, do not wait. Raises RuntimeError if there is no thread
    to be had."""
    lines = QueuedLines(2)
    atexit.register(lines.end)
    return io.TextIOWrapper(lines, errors="backslashreplace", write_through=True)
