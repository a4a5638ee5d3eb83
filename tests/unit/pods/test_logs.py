"""Output written by the shim's side and read back: exact, capped, merged, followed; no link is followed."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent.osutil.untrusted import NotSeenError, UntrustedError, UntrustedFolder
from nodeagent.pods import logs
from nodeagent.pods.logs import (
    READ_ALL,
    RECORD,
    TAIL_LINES,
    TAIL_MAX,
    LogLine,
    LogsHangError,
    LogTurns,
    beside,
    follow,
    generations,
    newest,
    read_logs,
)
from nodeagent.shim import output
from nodeagent.shim.loop import Delay, Loop
from nodeagent.shim.output import PIECE, Capture, RotatingFile, stamp
from tests.descriptors import seen_with


def capture_of(data: bytes, file: RotatingFile, stream: str = "stdout") -> Capture:
    """Write through a real pipe, from a thread as a worker would."""
    capture = Capture(Loop(), file, stream)
    writer = threading.Thread(target=_write, args=(capture.write_end, data))
    writer.start()
    while capture.read_end >= 0:
        capture.drain()
    writer.join()
    file.close()
    return capture


def _write(fd: int, data: bytes) -> None:
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(data)


def a_file(folder: Path, rank: int = 0, generation: int = 1, max_bytes: int = 1 << 20, keep: int = 2) -> RotatingFile:
    (folder / f"g{generation}").mkdir(exist_ok=True, parents=True)
    return RotatingFile(folder / f"g{generation}" / f"rank{rank}.log", max_bytes, keep)


def put(folder: Path, at: float, text: str, rank: int = 0, generation: int = 1) -> None:
    file = a_file(folder, rank, generation)
    file.write(f"{stamp(at)} stdout F {text}\n".encode())
    file.close()


def test_lines_bytes_and_pieces(tmp_path: Path) -> None:
    long = "é" * PIECE
    data = b"one\n\n  spaces \n" + b"bad \xff byte\n" + long.encode() + b"\nno end"
    capture = capture_of(data, a_file(tmp_path), "stderr")
    found = list(read_logs(tmp_path, 1))
    assert [line.text for line in found[:4]] == ["one", "", "  spaces ", "bad \\xff byte"]
    assert "".join(line.text for line in found[4:-1]) == long
    assert [line.partial for line in found[4:]] == [True, False, True]
    assert found[-1].text == "no end"
    assert {line.stream for line in found} == {"stderr"}
    assert capture.tail().endswith("no end")


@pytest.mark.parametrize("byte", [b"\xff", b"\0"])
def test_of_a_long_line_that_is_no_text_nothing_is_missing(tmp_path: Path, byte: bytes) -> None:
    """Whole pieces of it were longer than any record, and left out without a word."""
    capture_of(byte * (3 * PIECE) + b"\nend\n", a_file(tmp_path))
    *long, last = read_logs(tmp_path, 1)
    assert "".join(line.text for line in long) == byte.decode("utf-8", "backslashreplace") * (3 * PIECE)
    assert last.text == "end"
    assert [line.text for line in read_logs(tmp_path, 1, tail=2)] == [long[-1].text, "end"]


def test_a_flood_is_capped_and_keeps_the_newest(tmp_path: Path) -> None:
    data = b"".join(b"%07d\n" % number for number in range(200_000))
    capture_of(data, a_file(tmp_path, max_bytes=1_000_000, keep=2))
    files = sorted(file.name for file in (tmp_path / "g1").iterdir())
    assert files == ["rank0.log", "rank0.log.1", "rank0.log.2"]
    assert sum(file.stat().st_size for file in (tmp_path / "g1").iterdir()) <= 3_300_000
    texts = [line.text for line in read_logs(tmp_path, 1)]
    assert texts == [f"{number:07d}" for number in range(200_000 - len(texts), 200_000)]
    assert [line.text for line in read_logs(tmp_path, 1, tail=30_000)] == texts[-30_000:]


def test_a_full_disk_loses_output_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = RotatingFile(Path("/dev/full"), 1000, 1)
    file.write(b"x\n")
    file.write(b"y\n")
    file.close()
    assert capsys.readouterr().err.count("No space left") == 1


def test_merge_ranks_generations_tail(tmp_path: Path) -> None:
    put(tmp_path, 1.0, "old", generation=3)
    for at, rank in ((10.0, 0), (11.0, 1), (12.0, 0), (13.5, 1)):
        put(tmp_path, at, f"{rank} at {at}", rank, generation=12)
    assert generations(tmp_path) == [3, 12]
    assert [line.text for line in read_logs(tmp_path, 12)] == ["0 at 10.0", "1 at 11.0", "0 at 12.0", "1 at 13.5"]
    assert [line.text for line in read_logs(tmp_path, 12, ranks=[1], tail=1)] == ["1 at 13.5"]
    assert [line.text for line in read_logs(tmp_path, 12, tail=2)] == ["0 at 12.0", "1 at 13.5"]
    assert list(read_logs(tmp_path, 3)) == [LogLine("1970-01-01T00:00:01.000000Z", 3, 0, "stdout", "old")]
    assert list(read_logs(tmp_path, 4)) == []
    assert list(read_logs(tmp_path / "nothing", 12)) == []


def test_no_link_and_no_foreign_file(tmp_path: Path) -> None:
    put(tmp_path, 1.0, "mine")
    (tmp_path / "g1" / "rank1.log").symlink_to(tmp_path / "g1" / "rank0.log")
    os.mkfifo(tmp_path / "g1" / "rank2.log")
    (tmp_path / "g2").symlink_to("g1")
    assert [line.rank for line in read_logs(tmp_path, 1)] == [0]
    assert list(read_logs(tmp_path, 2)) == []


def test_without_a_descriptor_no_output_is_passed_over(tmp_path: Path) -> None:
    """Of an older file neither, though a newer one could be opened the moment after."""
    file = a_file(tmp_path, max_bytes=200, keep=3)
    for number in range(10):
        file.write(f"{stamp(number)} stdout F {number}\n".encode())
    file.close()
    whole = [*map(str, range(10))]

    def looks(look: Callable[[], object], wanted: object) -> list[bool]:
        def once() -> None:
            try:
                assert look() == wanted
            except NotSeenError as error:
                raise OSError from error

        return seen_with(once, 10)

    for look, wanted in (
        (lambda: generations(tmp_path), [1]),
        (lambda: [line.text for line in read_logs(tmp_path, 1)], whole),
        (lambda: [line.text for line in read_logs(tmp_path, 1, tail=8)], whole[-8:]),
    ):
        seen = looks(look, wanted)
        assert seen[0] is False and seen[-1] is True


async def test_a_disk_that_fails_ends_no_follower_as_if_all_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1.0, "one")

    def away(*_: object) -> object:
        raise UntrustedError("Input/output error") from OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(UntrustedFolder, "names", away)
    with pytest.raises(NotSeenError, match="Input/output error"):
        _ = [line async for line in follow(tmp_path, ended=lambda: True)]


async def test_follow_across_rotation_and_generations(tmp_path: Path) -> None:
    file = a_file(tmp_path, max_bytes=2_000, keep=3)
    for number in range(10):
        file.write(f"{stamp(number)} stdout F {number}\n".encode())
    done = threading.Event()
    seen: list[str] = []
    async for line in follow(tmp_path, tail=2, ended=done.is_set):
        seen.append(line.text)
        if line.text == "9":
            for number in range(10, 70):  # rotates once
                file.write(f"{stamp(number)} stdout F {number}\n".encode())
        if line.text == "69":
            file.close()
            put(tmp_path, 100.0, "next", generation=2)
            done.set()
    assert seen == [str(number) for number in range(8, 70)] + ["next"]


async def test_follow_without_tail_gives_everything(tmp_path: Path) -> None:
    for number in range(5):
        put(tmp_path, float(number), str(number), rank=number % 2)
    assert [line.text async for line in follow(tmp_path, ended=lambda: True)] == ["0", "1", "2", "3", "4"]
    assert [line.rank async for line in follow(tmp_path, ranks=[1], ended=lambda: True)] == [1, 1]
    assert [line async for line in follow(tmp_path, tail=0, ended=lambda: True)] == []


def test_a_line_without_end_is_shown_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "FLUSH_AFTER", 0.01)
    loop = Loop()
    file = a_file(tmp_path)
    capture = Capture(loop, file, "stdout")
    os.write(capture.write_end, "50 %, then ä".encode()[:-1])
    loop.after(0.2, loop.stop)
    loop.run()
    assert [(line.text, line.partial) for line in read_logs(tmp_path, 1)] == [("50 %, then ", True)]
    capture.started()
    capture.close()
    assert [line.text for line in read_logs(tmp_path, 1)] == ["50 %, then ", "\\xc3"]
    file.close()


def test_output_that_keeps_coming_puts_nothing_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar is written more often than a line without an end is shown."""
    monkeypatch.setattr(output, "FLUSH_AFTER", 0.1)
    loop = Loop()
    file = a_file(tmp_path)
    capture = Capture(loop, file, "stdout")

    def gathered() -> bool:
        return any(line.text.count("\r") > 1 for line in read_logs(tmp_path, 1))

    def bar(step: int) -> None:
        os.write(capture.write_end, f"\r{step}".encode())
        if gathered() or step > 1000:
            loop.stop()
        else:
            loop.after(0.01, lambda: bar(step + 1))

    bar(0)
    loop.run()
    assert gathered()
    assert "".join(line.text for line in read_logs(tmp_path, 1)).startswith("\r0\r1")
    capture.started()
    capture.close()
    file.close()


def test_lines_that_end_soon_are_never_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a flood there is always a line without an end, but never the same."""
    waits: list[float] = []
    loop = Loop()

    def after(seconds: float, call: Callable[[], object]) -> Delay:
        waits.append(seconds)
        return Delay(call)

    monkeypatch.setattr(loop, "after", after)
    file = a_file(tmp_path)
    capture = Capture(loop, file, "stdout")
    capture.started()
    for text in ("a", "b", "c\nd", "e\n", "f"):
        capture._take(text.encode())
    assert len(waits) == 3, "for abc, for de and for f"
    capture.close()
    file.close()


def test_the_last_lines_of_a_progress_bar_are_where_it_stands(tmp_path: Path) -> None:
    loop = Loop()
    file = a_file(tmp_path)
    capture = Capture(loop, file, "stderr")
    capture.started()
    for text in ("before\n", "\r 10%", "\r 20%", "\r 30%\nbad", " luck"):
        capture._take(text.encode())
        capture._put_partial()
    assert capture.tail() == "before\n 30%\nbad luck"
    capture.close()
    assert capture.tail() == "before\n 30%\nbad luck"
    file.close()


def fill(folder: Path, megabytes: int) -> int:
    """A log of one rank, so large; how many records it has."""
    line = f"{stamp(1.0)} stdout F {'x' * 970}".encode()
    count = megabytes * 1024
    (folder / "g1").mkdir(parents=True)
    with (folder / "g1" / "rank0.log").open("wb") as file:
        for number in range(count):
            file.write(b"%s %d\n" % (line, number))
    return count


def read_by(thread: int | str) -> int:
    """Bytes that a thread, or this whole process, has read until now."""
    where = "/proc/self/io" if thread == "all" else f"/proc/self/task/{thread}/io"
    return int(next(line for line in Path(where).read_text().splitlines() if line.startswith("rchar")).split()[1])


async def test_the_last_lines_of_a_large_log_are_read_from_its_end_and_beside_the_loop(tmp_path: Path) -> None:
    count = fill(tmp_path, 40)
    loop, before_loop, before = threading.get_native_id(), read_by(threading.get_native_id()), read_by("all")
    found = [line.text.split()[1] async for line in follow(tmp_path, tail=10, ended=lambda: True)]
    assert found == [str(number) for number in range(count - 10, count)]
    assert read_by("all") - before < 1 << 20
    assert read_by(loop) - before_loop < 1 << 14


async def test_a_log_is_followed_beside_the_loop(tmp_path: Path) -> None:
    count = fill(tmp_path, 3)
    loop = threading.get_native_id()
    before = read_by(loop)
    assert len([line async for line in follow(tmp_path, ended=lambda: True)]) == count
    assert read_by(loop) - before < 1 << 14


@pytest.mark.parametrize("content", ["zeros", "one line", "zeros at the end"])
def test_what_has_no_lines_costs_little(tmp_path: Path, content: str) -> None:
    (tmp_path / "g1").mkdir()
    with (tmp_path / "g1" / "rank0.log").open("wb") as file:
        if content == "zeros at the end":
            file.write(f"{stamp(1)} stdout F hello\n".encode())
        if content == "one line":
            file.write(b"x" * (8 << 20))
        else:
            file.truncate(600 << 20)
    before = read_by("all")
    tracemalloc.start()
    try:
        tail = list(read_logs(tmp_path, 1, tail=1))
        whole = list(read_logs(tmp_path, 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tail == []
    assert [line.text for line in whole] == (["hello"] if content == "zeros at the end" else [])
    assert peak < 8 << 20
    assert read_by("all") - before < 8 << 20


def test_the_last_lines_are_those_of_older_files_too(tmp_path: Path) -> None:
    file = a_file(tmp_path, max_bytes=2_000, keep=4)
    for number in range(100):
        file.write(f"{stamp(number)} stdout F {number}\n".encode())
    file.close()
    for count in (0, 1, 7, 60, 1000):
        texts = [line.text for line in read_logs(tmp_path, 1, tail=count)]
        assert texts == [line.text for line in read_logs(tmp_path, 1)][-count or 1000 :]


EMPTY = b" stdout F \n"
"""The shortest record: its text is empty."""
WIDE = b" stdout F \xf0\x9f\x98\x80" + b"\xff" * 16_000 + b"\n"
"""One whose text takes four times as many bytes as it has in the file."""


def copies(folder: Path, record: bytes, size: int, numbers: int = 1, ranks: int = 1) -> None:
    """One file of such records, under the names of so many generations and ranks: on the disk it is there once."""
    first = folder / "g1" / "rank0.log"
    first.parent.mkdir(parents=True)
    first.write_bytes(record * (size // len(record)))
    for number in range(1, numbers + 1):
        (folder / f"g{number}").mkdir(exist_ok=True)
        for rank in range(ranks):
            if (number, rank) != (1, 0):
                os.link(first, folder / f"g{number}" / f"rank{rank}.log")


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that it takes at the most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("record", [EMPTY, WIDE, b"\n"], ids=["empty", "wide", "none"])
@pytest.mark.parametrize(("numbers", "ranks"), [(1, 1), (20, 1), (2, 50)])
def test_the_last_lines_take_so_much_memory_whatever_they_are(
    tmp_path: Path, record: bytes, numbers: int, ranks: int
) -> None:
    copies(tmp_path, record, 1 << 20, numbers, ranks)
    found: list[LogLine] = []
    assert peak_of(lambda: found.extend(newest(tmp_path, generations(tmp_path), None, 10**15))) < 3 * TAIL_MAX
    assert sum(line.size for line in found) < TAIL_MAX + (1 << 20)
    assert len(found) <= min(TAIL_LINES, TAIL_MAX // RECORD)


@pytest.mark.parametrize("record", [EMPTY, WIDE], ids=["empty", "wide"])
def test_all_lines_are_read_in_steps_that_take_so_much_memory_whatever_they_are(tmp_path: Path, record: bytes) -> None:
    copies(tmp_path, record, 64 << 10, ranks=20)
    count = 20 * ((64 << 10) // len(record))
    seen = 0

    def read() -> None:
        nonlocal seen
        for _ in read_logs(tmp_path, 1):
            seen += 1

    assert peak_of(read) < 2 * READ_ALL
    assert seen == count


async def test_a_look_at_many_files_takes_them_in_turn(tmp_path: Path) -> None:
    copies(tmp_path, WIDE, len(WIDE) * 2, ranks=200)
    found = [line.rank async for line in follow(tmp_path, ended=lambda: True)]
    assert sorted(found) == sorted([*range(200)] * 2)
    assert len({*found[:200]}) == 200


def test_of_ranks_that_ask_for_more_than_there_is_each_has_a_share(tmp_path: Path) -> None:
    copies(tmp_path, EMPTY, 1 << 20, ranks=8)
    counts = Counter(line.rank for line in newest(tmp_path, [1], None, TAIL_LINES))
    assert len(counts) == 8
    assert max(counts.values()) < 2 * min(counts.values())


async def test_a_users_steps_have_so_many_threads_and_one_that_hangs_counts_until_it_comes_back() -> None:
    turns, gate, at_once, most, lock = LogTurns(2), threading.Event(), 0, 0, threading.Lock()

    def step() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        gate.wait(30)
        with lock:
            at_once -= 1

    steps = [asyncio.create_task(turns.take(step)) for _ in range(6)]
    while at_once < 2:  # noqa: ASYNC110 - threads
        await asyncio.sleep(0.01)
    for given_up in steps[:2]:
        given_up.cancel()
    await asyncio.wait(steps[:2])
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert (at_once, most) == (2, 2)
    assert await LogTurns(2).take(lambda: "another's") == "another's"
    gate.set()
    await asyncio.gather(*steps[2:])
    assert most == 2


async def test_a_step_that_does_not_come_back_in_time_is_reported_as_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "READ_LIMIT", 0.01)
    answered = threading.Event()
    with pytest.raises(LogsHangError, match=r"did not come back within 0\.01 s"):
        await beside(lambda: answered.wait(30))
    answered.set()


async def test_a_step_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    copies(tmp_path, EMPTY, 1 << 20, ranks=4)
    began, given_up, ended = threading.Event(), threading.Event(), threading.Event()
    raised = list[Exception]()

    def step() -> None:
        began.set()
        given_up.wait(30)
        try:
            list(read_logs(tmp_path, 1, tail=10))
        except LogsHangError as error:
            raised.append(error)
        ended.set()

    waiting = asyncio.create_task(beside(step))
    assert await asyncio.to_thread(began.wait, 30)  # one that is given up before it has a thread never gets one
    waiting.cancel()
    await asyncio.wait([waiting])
    given_up.set()
    assert await asyncio.to_thread(ended.wait, 30)
    assert str(raised[0]) == "nobody waits for it any more"
