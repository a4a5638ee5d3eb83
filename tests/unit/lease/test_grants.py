"""Grant records: who can read them, and what a record that is damaged, or is none, says."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent.lease.grants import (
    ANSWERS,
    NOTHING,
    Grant,
    GrantAnswer,
    GrantReader,
    answer_file,
    grant_keys,
    grants_folder,
    make_grant,
    read_grant_of,
    remove_grant,
    write_grant,
)
from nodeagent.lease.main import read_obeyed

KEY = "0123456789"


@pytest.fixture
def grants(tmp_path: Path) -> Path:
    (tmp_path / "pods" / ANSWERS).mkdir(parents=True)
    return grants_folder(tmp_path)


def make(folder: Path) -> Path:
    return make_grant(folder, KEY, os.geteuid(), os.getegid())


def test_a_shim_reads_what_is_granted_and_says_what_it_has_done(grants: Path) -> None:
    file = make(grants)
    assert (read_grant_of(grants, KEY), read_obeyed(grants, KEY)) == (NOTHING, 0.0)
    with GrantReader(file) as reader:
        write_grant(grants, KEY, Grant(20.0, 10.0))
        assert reader.read() == read_grant_of(grants, KEY) == Grant(20.0, 10.0)
        write_grant(grants, KEY, Grant(20.0, 10.0, 7.0))
        assert reader.read() == read_grant_of(grants, KEY) == Grant(20.0, 10.0, 7.0)
    GrantAnswer(answer_file(grants / KEY)).obeyed(10.0)
    assert read_obeyed(grants, KEY) == 10.0
    assert grant_keys(grants) == [KEY]
    remove_grant(grants, KEY)
    assert (read_grant_of(grants, KEY), read_obeyed(grants, KEY), list(grants.iterdir())) == (NOTHING, 0.0, [])
    write_grant(grants, KEY, Grant(30.0))
    assert grant_keys(grants) == [], "who writes late makes no record"


def test_every_user_can_read_a_grant_and_only_its_own_user_the_answer(grants: Path) -> None:
    old = os.umask(0o077)
    try:
        file = make(grants)
    finally:
        os.umask(old)
    modes = [path.stat().st_mode & 0o777 for path in (file.parent, file, answer_file(file))]
    assert modes == [0o755, 0o644, 0o600]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: os.truncate(file, 0),
    "short": lambda file: os.truncate(file, 31),
    "half written": lambda file: file.write_bytes(struct.pack("=dddd", 30.0, 0.0, 20.0, 0.0)),
    "no number": lambda file: file.write_bytes(struct.pack("=dd", float("nan"), 0.0) * 2),
    "never over": lambda file: file.write_bytes(struct.pack("=dd", float("inf"), 0.0) * 2),
    "negative": lambda file: file.write_bytes(struct.pack("=dd", -1.0, 0.0) * 2),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_grant_grants_no_more_than_what_was_read_before(
    grants: Path, damage: Callable[[Path], object]
) -> None:
    file = make(grants)
    write_grant(grants, KEY, Grant(20.0, 10.0, 7.0))
    with GrantReader(file) as before:
        before.read()
        damage(file)
        assert before.read() == Grant(20.0, 10.0, 7.0)
    assert read_grant_of(grants, KEY) == NOTHING


def put_pipe(file: Path) -> None:
    os.mkfifo(file)


def put_folder(file: Path) -> None:
    file.mkdir()


def put_link(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(struct.pack("=d", 20.0) * 2)
    file.symlink_to(other)


def put_much(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


@pytest.mark.parametrize("put", [put_pipe, put_folder, put_link, put_much])
def test_an_answer_that_is_no_record_says_nothing_and_holds_nobody_up(
    grants: Path, put: Callable[[Path], None]
) -> None:
    put(answer_file(grants / KEY))
    assert read_obeyed(grants, KEY) == 0.0


def test_a_pipe_in_the_place_of_the_answer_does_not_hold_up_the_shim(grants: Path) -> None:
    put_pipe(answer_file(grants / KEY))
    with pytest.raises(OSError, match="No such device"):
        GrantAnswer(answer_file(grants / KEY)).obeyed(10.0)
