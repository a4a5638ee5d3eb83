"""The promised generation on the disk: one after the other, never called promised before, with a disk that refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodeagent.osutil.linux import write_atomic
from nodeagent.shim.loop import Loop
from nodeagent.shim.promise import DamagedTokenError, PromisedToken, read_started


def token(number: int) -> dict[str, Any]:
    return {"number": number, "id": f"id{number}"}


class Disk:
    """What a shim does with its promise, and how long the disk takes."""

    def __init__(self, folder: Path) -> None:
        self.loop, self.path = Loop(), folder / "highest.json"
        self.promised = PromisedToken(self.loop, self.path, self._to_disk)
        self.over: list[tuple[int, str]] = []
        self.goes = threading.Semaphore(0)

    def _to_disk(self, path: Path, content: str, durable: bool) -> None:
        assert durable
        assert self.goes.acquire(timeout=30)
        write_atomic(path, content, durable)

    def write(self, number: int) -> None:
        self.promised.write(token(number), lambda trouble: self.over.append((number, trouble)))

    def until(self, so: Callable[[], bool]) -> None:
        """Run the loop."""

        def look() -> None:
            if so():
                self.loop.stop()
            else:
                self.loop.after(0.005, look)

        look()
        self.loop.run()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_it_is_promised_once_it_is_on_the_disk(disk: Disk) -> None:
    assert (disk.promised.token, disk.promised.newest) == (None, None)
    disk.write(3)
    assert (disk.promised.token, disk.promised.newest) == (None, token(3))
    disk.goes.release()
    disk.until(lambda: bool(disk.over))
    assert (disk.promised.token, disk.over, json.loads(disk.path.read_text())) == (token(3), [(3, "")], token(3))
    assert PromisedToken(Loop(), disk.path, write_atomic).token == token(3)


def test_of_those_that_wait_for_the_disk_the_last_one_is_written(disk: Disk) -> None:
    for number in (1, 2, 3):
        disk.write(number)
        assert disk.promised.newest == token(number)
    disk.goes.release(3)
    disk.until(lambda: bool(disk.over))
    assert (disk.over, disk.promised.token) == ([(3, "")], token(3))


def test_a_disk_that_refuses_promises_nothing(disk: Disk) -> None:
    disk.path.with_name("highest.json.new").mkdir()
    disk.write(1)
    disk.goes.release()
    disk.until(lambda: bool(disk.over))
    ((number, trouble),) = disk.over
    assert (number, "Is a directory" in trouble) == (1, True)
    assert (disk.promised.token, disk.promised.newest) == (None, None)


DAMAGED = [
    b"", b"\x00" * 40, b"\xff\xfe", b'{"number": 3, "i', b"[]", b"3", b'"x"', b"{}", b'{"number": "3", "id": "a"}',
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_promise_is_never_taken_for_none_and_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "highest.json"
    file.write_bytes(content)
    with pytest.raises(DamagedTokenError, match=rf"^{file} is damaged.* remove the file$"):
        PromisedToken(Loop(), file, write_atomic)
    assert file.read_bytes() == content


@pytest.mark.parametrize("content", DAMAGED)
def test_a_start_whose_record_is_damaged_counts_as_what_was_promised(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "started.json"
    file.write_bytes(content)
    assert read_started(file, token(3)) == token(3)
