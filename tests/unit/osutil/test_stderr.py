"""Standard error holds up no program and ends none: what is lost is counted, and all else comes out in order."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from select import PIPE_BUF
from typing import BinaryIO

import pytest

from nodeagent.osutil.stderr import QUEUED_BYTES, QUEUED_LINES, QueuedLines

NOTE = r"nodeagent: (\d+) lines of this log are lost: it was not read, or its disk was full\n"

LOSSY = """
import atexit, os, sys
from nodeagent.osutil.stderr import lossy_stderr
atexit.register(lambda: print("after all others", file=sys.stderr))
if sys.argv[1:] == ["lossy"]:
    sys.stderr = lossy_stderr()
"""
NOTES = LOSSY + 'print("a note", file=sys.stderr, flush=True)\nprint("goes on")'
FAILS = (
    LOSSY
    + """
for number in range(500):
    print(number, "\\u00e9\\udc80", file=sys.stderr)
def fail(depth):
    if depth:
        fail(depth - 1) or depth
    raise ValueError("the last words")
print("begun", end="", file=sys.stderr)
fail(100)
"""
)
FLOOD = LOSSY + 'for number in range(20000): print(number, "x" * 100, file=sys.stderr)\n'
FLOODED_FORK = (
    FLOOD
    + """
pid = os.fork()
if not pid:
    for number in range(2000): print(number, "x" * 100, file=sys.stderr)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
)
FORKS = (
    LOSSY
    + """
print("before", file=sys.stderr)
pid = os.fork()
if not pid:
    print("child", file=sys.stderr)
    os._exit(0)
os.waitpid(pid, 0)
print("parent", file=sys.stderr)
"""
)


def run(
    script: str, stderr: int | BinaryIO = subprocess.PIPE, how: str = "lossy"
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", script, how], stdout=subprocess.PIPE, stderr=stderr, timeout=60)


@pytest.fixture
def pipe() -> Iterator[tuple[BinaryIO, int]]:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as file:
        yield file, writer
    os.close(writer)


def write(lines: QueuedLines, texts: list[bytes]) -> None:
    """They are logged without a wait."""
    thread = threading.Thread(target=lambda: [lines.write(text) for text in texts], daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "who logs waits for the reader"


def lost(file: BinaryIO, texts: list[bytes], last: bytes) -> int:
    """How many of these are not read; there is a note of how many in the place of each gap, and nothing else."""
    place = missing = 0
    while (line := file.readline()) != last or place < len(texts):
        if note := re.fullmatch(NOTE.encode(), line):
            missing += int(note[1])
            place += int(note[1])
        else:
            assert line == texts[place]
            place += 1
    return missing


def test_where_nobody_reads_lines_are_lost_and_counted_and_all_others_come_in_order(pipe: tuple[BinaryIO, int]) -> None:
    file, writer = pipe
    lines = QueuedLines(writer)
    texts = [b"%d %s\n" % (number, b"x" * 100) for number in range(2 * QUEUED_LINES)]
    write(lines, texts)
    for text in texts[:1000]:
        assert file.readline() == text
    lines.write(b"in two ")
    lines.write(b"parts\n")
    assert 1000 < lost(file, texts[1000:], b"in two parts\n") <= QUEUED_LINES


def test_what_waits_has_so_many_bytes_at_most(pipe: tuple[BinaryIO, int]) -> None:
    file, writer = pipe
    lines = QueuedLines(writer)
    texts = [b"%d%s\n" % (number, b"x" * (QUEUED_BYTES // 8)) for number in range(20)]
    write(lines, texts)
    assert file.readline() + file.readline() == texts[0] + texts[1]
    lines.write(b"end\n")
    assert lost(file, texts[2:], b"end\n") >= 11, "eight wait at most, and one is being written"


def test_a_line_without_an_end_is_bounded_too(pipe: tuple[BinaryIO, int]) -> None:
    file, writer = pipe
    lines = QueuedLines(writer)
    write(lines, [b"x" * QUEUED_BYTES, b"x", b"y\n"])
    assert lost(file, [b"of more bytes than may wait"], b"y\n") == 1


def test_lines_that_the_file_refuses_are_counted() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        lines = QueuedLines(ours.fileno())
        write(lines, [b"x" * 100_000 + b"\n", b"x" * 100_000 + b"\n", b"short\n"])
        assert theirs.recv(1000) == b"short\n"
        lines.write(b"another\n")
        assert re.fullmatch(NOTE + "another\n", theirs.recv(1000).decode()), "at once, before that line"


def test_all_words_of_a_program_that_fails_come_out_whole() -> None:
    plain, lossy = run(FAILS, how="plain"), run(FAILS)
    assert (lossy.returncode, lossy.stderr.decode()) == (plain.returncode, plain.stderr.decode())
    assert b"ValueError: the last words\n" in lossy.stderr


@pytest.mark.parametrize("script", [FLOOD, FLOOD + "1 / 0"], ids=["in order", "with a traceback"])
def test_a_program_ends_though_nobody_reads(pipe: tuple[BinaryIO, int], script: str) -> None:
    _, writer = pipe
    assert run(script, writer).returncode == int(script.endswith("1 / 0"))


def test_a_fork_writes_for_itself(pipe: tuple[BinaryIO, int]) -> None:
    assert sorted(run(FORKS).stderr.splitlines()) == [b"after all others", b"before", b"child", b"parent"]
    _, writer = pipe
    assert run(FLOODED_FORK, writer).stdout == b"7\n", "and waits for nobody"


def test_after_its_end_a_line_that_does_not_fit_is_cut() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as out, open(writer, "wb", buffering=0):  # noqa: PTH123 - descriptors
        lines = QueuedLines(writer)
        lines.end()
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"." * PIPE_BUF)
        os.set_blocking(writer, True)
        out.read(PIPE_BUF)
        lines.write(b"x" * (PIPE_BUF + 1000) + b"\n")
        os.set_blocking(reader, False)
        assert (out.read(1 << 20) or b"").count(b"x") == PIPE_BUF


def test_a_full_disk_costs_notes_and_nothing_else() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        done = run(NOTES, full)
    assert (done.returncode, done.stdout) == (0, b"goes on\n")


def test_notes_are_kept_where_there_is_room(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        run(NOTES, log)
    assert (tmp_path / "log").read_text() == "a note\nafter all others\n"
