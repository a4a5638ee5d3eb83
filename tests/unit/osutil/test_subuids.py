"""Uids that are counted together, since one user has them all."""

from __future__ import annotations

import time
from pathlib import Path

from nodeagent.osutil.subuids import BYTES_MAX, FRESH, SubordinateUids


class Moved:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_each_uid_of_a_range_counts_as_one(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    file.write_text("bob:300000:10\nann:100000:65536\n1004:200000:1\n")
    uids = SubordinateUids(file, time.monotonic)
    assert {uids.key(uid) for uid in (100_000, 100_001, 165_535)} == {"subordinate uids of ann"}
    assert [uids.key(uid) for uid in (0, 1000, 99_999, 165_536, 199_999, 200_001, 300_010, 1 << 31)] == [
        0, 1000, 99_999, 165_536, 199_999, 200_001, 300_010, 1 << 31,
    ]  # fmt: skip
    assert (uids.key(200_000), uids.key(300_009)) == ("subordinate uids of 1004", "subordinate uids of bob")


def test_lines_that_are_no_ranges_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    file.write_bytes(
        b"# a comment\n\n:1:2\nann\nann:\nann:1\nann:x:9\nann:-5:9\nann:9:\xd9\xa3\nann:99999999999:9\nann:5:1:7\n"
        b"\xff:100000:2\nann:5000:0\n"
    )
    uids = SubordinateUids(file, time.monotonic)
    assert [uids.key(uid) for uid in (1, 5, 9, 5000, 5001)] == [1, 5, 9, 5000, 5001]
    assert str(uids.key(100_001)).startswith("subordinate uids of ")


def test_the_file_is_read_anew_when_root_has_changed_it(tmp_path: Path) -> None:
    clock, file = Moved(), tmp_path / "subuid"
    uids = SubordinateUids(file, clock)
    assert uids.key(100_000) == 100_000, "there is no file"
    file.write_text("ann:100000:5\n")
    assert uids.key(100_000) == 100_000
    clock.now += FRESH
    assert uids.key(100_000) == "subordinate uids of ann"
    file.write_text("bobby:100000:5\n")
    clock.now += FRESH
    assert uids.key(100_000) == "subordinate uids of bobby"
    file.unlink()
    clock.now += FRESH
    assert uids.key(100_000) == 100_000


def test_of_an_endless_file_so_much_is_read(tmp_path: Path) -> None:
    file = tmp_path / "subuid"
    file.write_bytes(b"ann:100000:1\n" + b"x" * BYTES_MAX + b"\nbob:200000:1\n")
    uids = SubordinateUids(file, time.monotonic)
    assert (uids.key(100_000), uids.key(200_000)) == ("subordinate uids of ann", 200_000)
