"""What becomes of output that cannot be written: the log's folder takes none, or not in time."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from nodeagent.shim.output import WAITING_MOST, LogWriter, QueuedFile, RotatingFile


@pytest.fixture
def writer() -> LogWriter:
    return LogWriter()


def until_written(writer: LogWriter) -> None:
    """Until the thread has done all that was put before."""
    over = threading.Event()
    writer.put(over.set, 0)
    assert over.wait(30)


def texts(file: Path) -> list[str]:
    return [line.split(" ", 3)[-1] for line in file.read_text().splitlines()]


def test_lines_that_a_folder_does_not_take_are_counted_and_the_next_one_says_so(
    writer: LogWriter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "g1"
    folder.touch()
    file = QueuedFile(writer, folder / "rank0.log", 1000, 1)
    for text in ("one", "two"):
        file.write(f"2026-01-01T00:00:00.000000Z stdout F {text}\n".encode())
    until_written(writer)
    assert writer.trouble == f"output is lost: {folder / 'rank0.log'}: Not a directory"
    assert capsys.readouterr().err.count("output is lost") == 1
    folder.unlink()
    file.write(b"2026-01-01T00:00:00.000000Z stdout F three\n")
    until_written(writer)
    assert not writer.trouble
    file.write(b"2026-01-01T00:00:00.000000Z stdout F four\n")
    file.close()
    lost = "nodeagent: 2 lines were lost: the log folder could not be written"
    until_written(writer)
    assert texts(folder / "rank0.log") == [lost, "three", "four"]


def test_one_file_that_cannot_be_written_stays_reported_beside_another_until_it_is_closed(
    writer: LogWriter, tmp_path: Path
) -> None:
    bad, good = (QueuedFile(writer, tmp_path / "g1" / name, 1000, 1) for name in ("rank0.log", "rank1.log"))
    (tmp_path / "g1" / "rank0.log").mkdir(parents=True)
    for file in (bad, good):
        file.write(b"2026-01-01T00:00:00.000000Z stdout F x\n")
    until_written(writer)
    assert writer.trouble == f"output is lost: {tmp_path / 'g1' / 'rank0.log'}: Is a directory"
    bad.close()
    until_written(writer)
    assert not writer.trouble


def test_lines_that_wait_too_long_are_dropped_and_the_next_one_says_so(writer: LogWriter, tmp_path: Path) -> None:
    hung = threading.Event()

    def hang() -> None:
        assert hung.wait(30)

    writer.put(hang, 0)
    file = QueuedFile(writer, tmp_path / "g1" / "rank0.log", 4 * WAITING_MOST, 1)
    line = b"2026-01-01T00:00:00.000000Z stdout F " + b"x" * (WAITING_MOST // 2 - 100) + b"\n"
    for _ in range(5):
        file.write(line)
    hung.set()
    file.write(b"2026-01-01T00:00:00.000000Z stdout F end\n")
    file.close()
    dropped = "nodeagent: 3 lines were dropped: the log folder did not take them in time"
    until_written(writer)
    shown = [text.strip("x") for text in texts(tmp_path / "g1" / "rank0.log")]
    assert shown == [dropped, "", "", "end"]


@pytest.fixture
def full_server(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Closing a log file gives its number up, and says that there was no room; which numbers."""
    real, refused = os.close, list[int]()

    def close(fd: int) -> None:
        name = str(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)
        if ".log" in name:
            refused.append(fd)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", close)
    return refused


def test_a_file_that_is_refused_when_it_is_closed_is_given_up(
    full_server: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its number is another file's by the next write."""
    file = RotatingFile(tmp_path / "rank0.log", 8, 1)
    for text in (b"first\n", b"second\n"):
        file.write(text)
    ends = os.pipe()
    file.write(b"third\n")
    assert len(full_server) == 2
    for end in ends:
        assert stat.S_ISFIFO(os.fstat(end).st_mode)
        os.close(end)
    assert [(tmp_path / name).read_text() for name in ("rank0.log", "rank0.log.1")] == ["third\n", "second\n"]
    assert "Disk quota exceeded" in capsys.readouterr().err


def test_the_thread_goes_on_after_a_file_that_was_refused(
    writer: LogWriter, full_server: list[int], tmp_path: Path
) -> None:
    first, second = (QueuedFile(writer, tmp_path / "g1" / name, 1000, 1) for name in ("rank0.log", "rank1.log"))
    first.write(b"x\n")
    first.close()
    second.write(b"y\n")
    until_written(writer)
    assert (len(full_server), (tmp_path / "g1" / "rank1.log").read_text()) == (1, "y\n")


def test_the_thread_goes_on_after_work_that_the_disk_refused(
    writer: LogWriter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer.put((tmp_path / "none" / "file").touch, 0)
    until_written(writer)
    assert "the log folder: " in capsys.readouterr().err
