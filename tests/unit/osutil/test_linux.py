"""What the kernel is asked for: files that are replaced whole or not at all; whether a process runs."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nodeagent.osutil.linux import (
    MARK,
    NotPlainError,
    ReplacedFile,
    can_refuse_descriptors,
    has_mark,
    is_running,
    keep_damaged,
    kill_marked,
    marked,
    open_plain,
    peer_credentials,
    proc_stat,
    refuse_descriptors,
    saves_itself,
    stat_fields,
    write_atomic,
)
from tests.descriptors import seen_with
from tests.processes import marked_sleep

LIMITED = """
import resource, sys
from pathlib import Path
from nodeagent.osutil.linux import write_atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (5, 5))
try:
    write_atomic(Path(sys.argv[1]), "0123456789", durable=True)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_for_its_owner_only(tmp_path: Path, durable: bool) -> None:
    file = tmp_path / "promise"
    for content in ("first", b"second"):
        write_atomic(file, content, durable)
        assert file.read_bytes() in (b"first", b"second")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("second", 0o600)
    assert list(tmp_path.iterdir()) == [file], "no draft is left"


def test_what_takes_only_a_part_is_an_error_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "promise"
    write_atomic(file, "before", durable=True)
    done = subprocess.run([sys.executable, "-c", LIMITED, str(file)], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("OSError", "")
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file], "no draft takes what room is left"


def test_who_reads_a_file_never_waits_for_one_who_writes(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("text")
    (link := tmp_path / "link").symlink_to(file)
    with open_plain(link) as opened:
        assert opened.read() == b"text"
    os.mkfifo(fifo := tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for path in (fifo, tmp_path):
        with pytest.raises(NotPlainError, match=f"it is no regular file: replace it: '{path}'"):
            open_plain(path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "none")


def test_the_newest_damaged_file_outlives_its_replacement(tmp_path: Path) -> None:
    file, kept = tmp_path / "jobs", tmp_path / "jobs.damaged"
    for content in ("first", "second"):
        write_atomic(file, content, durable=False)
        assert keep_damaged(file) == str(kept)
        assert file.read_text() == content, "what can be read of it stays until then"
        write_atomic(file, "good", durable=False)
        assert (kept.read_text(), kept.stat().st_mode & 0o777) == (content, 0o600)
    assert keep_damaged(tmp_path / "absent").startswith("nowhere (")


def test_each_version_of_a_file_that_is_replaced_is_parsed_once(tmp_path: Path) -> None:
    parsed: list[bytes] = []

    def parse(data: bytes) -> int:
        parsed.append(data)
        return int(data)

    reader = ReplacedFile(tmp_path / "f", parse, -1, 3)
    assert reader.read() == -1
    for number in (1, 2, 2, 3):
        write_atomic(tmp_path / "f", str(number), durable=False)
        assert [reader.read(), reader.check(), reader.read()] == [number] * 3
    assert parsed == [b"1", b"2", b"2", b"3"]
    write_atomic(tmp_path / "f", "x", durable=False)
    with pytest.raises(ValueError, match="invalid literal"):
        reader.check()
    assert (reader.read(), len(parsed)) == (-1, 5), "it is not tried again"
    write_atomic(tmp_path / "f", "1234", durable=False)
    with pytest.raises(ValueError, match="more than 3 bytes"):
        reader.check()
    (tmp_path / "f").unlink()
    assert reader.check() == -1


def test_a_reader_of_a_replaced_file_keeps_nothing_open_that_it_was_not_to_keep(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", "5", durable=False)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert ReplacedFile(tmp_path / "f", int, 0).once() == 5
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


THREADS_ONLY = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_main_thread_has_ended_runs_until_all_have() -> None:
    with subprocess.Popen([sys.executable, "-c", THREADS_ONLY], env={MARK: "mark"}) as process:
        try:
            end = time.monotonic() + 30
            while (stat_fields(process.pid) or [""])[0] != "Z":
                assert time.monotonic() < end
                time.sleep(0.01)
            assert (is_running(process.pid), has_mark(process.pid, "mark", os.geteuid())) == (True, True)
            pod = ("mark", os.geteuid())
            assert kill_marked({pod}) == {pod: [process.pid]}
            assert process.wait(30) == -signal.SIGKILL
        finally:
            process.kill()


def test_one_look_kills_what_several_pods_left_and_nothing_else() -> None:
    me = os.geteuid()
    left = [marked_sleep(mark) for mark in ("first", "second", "first", "other")]
    try:
        found = kill_marked({("first", me), ("second", me), ("other", me + 1), ("none", me)})
        assert {pod: set(killed) for pod, killed in found.items()} == {
            ("first", me): {left[0].pid, left[2].pid}, ("second", me): {left[1].pid}, ("other", me + 1): set(),
            ("none", me): set(),
        }  # fmt: skip
        assert [process.wait(30) for process in left[:3]] == [-signal.SIGKILL] * 3
        assert left[3].poll() is None, "it carries the mark of another user's pod"
    finally:
        for process in left:
            process.kill()
            process.wait()


SAVES = "import signal; signal.signal(15, lambda *_: None); print(flush=True); signal.pause()"


def test_without_a_descriptor_nobody_counts_as_one_that_cannot_save() -> None:
    with subprocess.Popen([sys.executable, "-c", SAVES], stdout=subprocess.PIPE) as process:

        def look() -> None:
            assert saves_itself(process.pid)

        try:
            assert process.stdout is not None and process.stdout.readline()
            seen = seen_with(look, 4)
            assert seen[0] is False and seen[-1] is True
        finally:
            process.kill()


def test_without_a_descriptor_nothing_is_taken_for_dead() -> None:
    pod = (f"starved-{os.getpid()}", os.geteuid())
    with marked_sleep(pod[0]) as process:

        def look() -> None:
            assert is_running(process.pid)
            assert proc_stat(f"/proc/{process.pid}/stat")
            assert marked({pod}) == {pod: [process.pid]}

        try:
            seen = seen_with(look, 8)
            assert seen[0] is False and seen[-1] is True
        finally:
            process.kill()


def test_the_kernel_says_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_credentials(ours) == (os.getpid(), os.getuid(), os.getgid())


@pytest.mark.skipif(not can_refuse_descriptors(), reason="a kernel older than Linux 6.16")
def test_who_passes_a_descriptor_is_refused_and_bytes_come(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        listener.bind(str(tmp_path / "s"))
        assert refuse_descriptors(ours) and refuse_descriptors(listener)
        listener.listen()
        caller.connect(str(tmp_path / "s"))
        for sender in (theirs, caller):
            with pytest.raises(PermissionError):
                socket.send_fds(sender, [b"x"], [0])
            sender.sendall(b"plain")
        accepted, _ = listener.accept()
        with accepted:
            assert (ours.recv(16), accepted.recv(16)) == (b"plain", b"plain")


def test_a_kernel_that_cannot_refuse_descriptors_is_no_error() -> None:
    class Old(socket.socket):
        def setsockopt(self, *_: object) -> None:
            raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    with Old(socket.AF_UNIX) as link:
        assert refuse_descriptors(link) is False
