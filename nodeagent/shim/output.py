"""What workers print: taken from their pipes, stamped, capped, rotated; the last lines of errors kept for blame.

One record a line: ``<RFC 3339 UTC, microseconds> <stdout|stderr> <F|P> <text>``; F is a whole line, P a piece of one
that goes on. Standard library only. A disk that fails loses output, never a worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path

from nodeagent.shim.loop import Delay, Loop, LoopHandler

CHUNK = 65536
PIECE = 16384
"""Longer lines are split."""
FLUSH_AFTER = 0.08
"""Seconds until a line without an end is shown as a piece; what comes meanwhile does not put it off."""
WAITING_MOST = 8 << 20
"""Bytes of output that wait to be written; what comes then is dropped, and counted."""
FLUSH_BOUND = 0.25
"""Seconds that a status waits for the output before it to be written."""
TAIL_LINES, TAIL_CHARS = 20, 4000


class RotatingFile:
    """Appends; at ``max_bytes`` NAME becomes NAME.1 and so on, ``keep`` of them."""

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        self._path, self._max, self._keep = path, max_bytes, keep
        self._fd = -1
        self._size = 0
        self._reported = False

    def write(self, data: bytes) -> None:
        """Never raises for a bad disk: the failure is reported once on standard error."""
        self._append(data)

    def _append(self, data: bytes) -> str:
        """What kept it from being written; empty if it was."""
        try:
            if self._fd >= 0 and self._size + len(data) > self._max:
                self._rotate()
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(self._path, flags, 0o640)
                self._size = os.fstat(self._fd).st_size
            self._size += os.write(self._fd, data)
        except OSError as error:
            return self._report(error)
        return ""

    def close(self) -> None:
        self._close()

    def _report(self, error: OSError) -> str:
        trouble = f"output is lost: {self._path}: {error.strerror}"
        if not self._reported:
            self._reported = True
            print(trouble, file=sys.stderr, flush=True)
        return trouble

    def _close(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1  # given up whatever close says: its number may be another file's next
        try:
            os.close(fd)
        except OSError as error:  # a file server that had no room for what it took
            self._report(error)

    def _rotate(self) -> None:
        self._close()
        for number in range(self._keep, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        if self._keep == 0:
            self._path.unlink(missing_ok=True)


class LogWriter:
    """The thread that writes logs, so that a folder that hangs delays nothing else. What it cannot take is dropped."""

    def __init__(self) -> None:
        self.trouble = ""
        """What keeps a file from being written, of the first by path; empty if nothing does."""
        self._troubles: dict[Path, str] = {}
        self._changed = threading.Condition()
        self._queue: deque[tuple[LoopHandler, int]] = deque()
        self._bytes = 0
        self._busy = self._hung = False
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    def put(self, work: LoopHandler, size: int) -> bool:
        """Have the thread do this, which keeps so many bytes waiting. False: too much waits already."""
        with self._changed:
            if size and self._bytes + size > WAITING_MOST:
                return False
            self._queue.append((work, size))
            self._bytes += size
            self._changed.notify_all()
            return True

    def flush(self) -> None:
        """Wait until all is written, at most ``FLUSH_BOUND``; not at all while nothing has moved since that passed."""
        with self._changed:
            if not self._hung:
                self._hung = not self._changed.wait_for(lambda: not self._queue and not self._busy, FLUSH_BOUND)

    def report(self, file: Path, trouble: str) -> None:
        """In the thread: what keeps this file from being written; empty if nothing does, or nobody writes it."""
        self._troubles.pop(file, None)
        if trouble:
            self._troubles[file] = trouble
        self.trouble = self._troubles[min(self._troubles)] if self._troubles else ""

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                work, size = self._queue.popleft()
                self._busy = True
            try:
                work()
            except (OSError, RecursionError) as error:  # what a worker puts there may be deep
                print(f"the log folder: {error}", file=sys.stderr, flush=True)
            with self._changed:
                self._bytes -= size
                self._busy = self._hung = False
                self._changed.notify_all()


class QueuedFile(RotatingFile):
    """One that a ``LogWriter`` writes; its folder is made with it."""

    def __init__(self, writer: LogWriter, path: Path, max_bytes: int, keep: int) -> None:
        super().__init__(path, max_bytes, keep)
        self._writer, self._folder = writer, path.parent
        self._dropped = self._lost = 0
        """Lines that there was no room for, and lines that could not be written; reported with the next that is."""

    def write(self, data: bytes) -> None:
        """Returns at once; never raises for a bad disk."""
        if not self._writer.put(lambda: self._write_now(data), len(data)):
            self._dropped += data.count(b"\n")

    def close(self) -> None:
        self._writer.put(self._close_now, 0)

    def _close_now(self) -> None:
        self._close()
        self._writer.report(self._path, "")

    def _write_now(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the open below says what is wrong
            self._folder.mkdir(exist_ok=True)
        dropped, self._dropped = self._dropped, 0
        notes = [f"{dropped} lines were dropped: the log folder did not take them in time"] if dropped else []
        if self._lost:
            notes.append(f"{self._lost} lines were lost: the log folder could not be written")
        before = "".join(f"{stamp(time.time())} stderr F nodeagent: {text}\n" for text in notes)
        trouble = self._append(before.encode() + data)
        self._writer.report(self._path, trouble)
        self._lost = self._lost + dropped + data.count(b"\n") if trouble else 0


class Capture:
    """One pipe of one worker, read in the shim's loop."""

    def __init__(self, loop: Loop, file: RotatingFile, stream: str) -> None:
        self._loop, self._file = loop, file
        self._stream = stream.encode()
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_end, False)
        self.taken = 0
        """Bytes of output so far."""
        self._partial = b""
        self._flush: Delay | None = None
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._unended = False
        """The tail's last line goes on."""
        loop.watch(self.read_end, self._readable)

    def started(self) -> None:
        """The worker has its own copy of the write end."""
        os.close(self.write_end)

    def drain(self) -> None:
        """Take what is in the pipe now, at most 1 MiB."""
        for _ in range(16):
            if not self._readable():
                return

    def tail(self) -> str:
        """The last lines, for blame."""
        lines = list(self._tail)
        if self._partial:
            before = lines.pop() if self._unended else b""
            lines.append(_seen(before + self._partial))
        return b"\n".join(lines[-TAIL_LINES:]).decode("utf-8", "backslashreplace")[-TAIL_CHARS:].strip("\n")

    def close(self) -> None:
        """Write out what is left and give up the pipe."""
        if self.read_end < 0:
            return
        self._loop.forget(self.read_end)
        os.close(self.read_end)
        self.read_end = -1
        self._put_piece(len(self._partial))

    def _readable(self) -> bool:
        """Read one chunk; False when there is nothing (more) to read now."""
        if self.read_end < 0:
            return False
        try:
            data = os.read(self.read_end, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        self.taken += len(data)
        *lines, rest = (self._partial + data).split(b"\n")
        stamp = self._stamp()
        out: list[bytes] = []
        for line in lines:
            piece = line
            while len(piece) > PIECE:
                cut = _boundary(piece)
                out.append(stamp + b" P " + _text(piece[:cut]))
                piece = piece[cut:]
            out.append(stamp + b" F " + _text(piece))
        while len(rest) > PIECE:
            cut = _boundary(rest)
            out.append(stamp + b" P " + _text(rest[:cut]))
            rest = rest[cut:]
        for line in lines[:1] + lines[1:][-TAIL_LINES:]:
            self._remember(line, ended=True)
        self._partial = rest
        if out:
            self._file.write(b"\n".join(out) + b"\n")
        if lines and self._flush is not None:  # the line that it was for has ended
            self._flush.cancel()
            self._flush = None
        if rest and self._flush is None:
            self._flush = self._loop.after(FLUSH_AFTER, self._put_partial)

    def _put_partial(self) -> None:
        """Show what has no end yet, but no part of a character."""
        self._flush = None
        self._put_piece(_whole(self._partial))

    def _put_piece(self, size: int) -> None:
        if size:
            piece, self._partial = self._partial[:size], self._partial[size:]
            self._file.write(self._stamp() + b" P " + _text(piece) + b"\n")
            self._remember(piece, ended=False)

    def _remember(self, text: bytes, *, ended: bool) -> None:
        before = self._tail.pop() if self._unended else b""
        self._tail.append(_seen(before + text))
        self._unended = not ended

    def _stamp(self) -> bytes:
        return f"{stamp(time.time())} ".encode() + self._stream


def two_captures(loop: Loop, file: RotatingFile) -> tuple[Capture, Capture]:
    """Of a process's standard output and error. Raises OSError, and then there is neither."""
    out = Capture(loop, file, "stdout")
    try:
        return out, Capture(loop, file, "stderr")
    except OSError:
        out.started()
        out.close()
        raise


def stamp(at: float) -> str:
    """RFC 3339 UTC with microseconds."""
    whole, fraction = divmod(int(at * 1e6), 10**6)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{fraction:06d}Z"


def note(log: RotatingFile, text: str) -> None:
    """One line of the shim's own in the pod's log."""
    log.write(f"{stamp(time.time())} stderr F nodeagent: {text}\n".encode())
    log.close()


def _boundary(data: bytes) -> int:
    """Where to cut a long line: not inside a UTF-8 character."""
    cut = PIECE
    while cut > PIECE - 4 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _whole(data: bytes) -> int:
    """Bytes up to the end of the last whole UTF-8 character."""
    for back in range(1, min(4, len(data)) + 1):
        first = data[-back]
        if first & 0xC0 != 0x80:
            size = 1 + (first >= 0xC0) + (first >= 0xE0) + (first >= 0xF0)
            return len(data) - back if size > back else len(data)
    return len(data)


def _seen(line: bytes) -> bytes:
    """What a terminal shows of a line in the end: what stands after its last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2][-TAIL_CHARS:]


def _text(data: bytes) -> bytes:
    """Valid UTF-8; other bytes are backslash-escaped."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return data.decode("utf-8", "backslashreplace").encode()
    return data


def log_to(path: Path) -> None:
    """This process's own output from now on: what an agent gives a shim that it forks. The journal has what was
    printed before."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
