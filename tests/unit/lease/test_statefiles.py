"""What an agent and its lease process write for each other: read back, and whatever else may lie there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nodeagent.lease.lending import Promises
from nodeagent.lease.statefiles import (
    MOST_BYTES,
    promises_file,
    promises_reader,
    table_file,
    table_reader,
    unannounced,
    write_promises,
    write_table,
)
from tests.unit.lease.build import UID, row, table

PROMISES = Promises("b", 1.5, True, {UID: 12.5})


def test_a_table_is_read_as_it_was_written_and_by_nobody_else(tmp_path: Path) -> None:
    reader = table_reader(tmp_path, "b")
    assert reader.read() is None
    for known in (table(), table({UID: row(refuses="why", pod="", places={})}, leaving=True), table({})):
        write_table(tmp_path, known)
        assert reader.read() == known
        assert reader.read() == known
    assert table_file(tmp_path).stat().st_mode & 0o777 == 0o600
    table_file(tmp_path).unlink()
    assert reader.read() is None


def test_a_table_is_read_anew_whenever_there_is_another(tmp_path: Path) -> None:
    """Even if all that a look from outside shows is the same: its number in the file system, its time, its size."""
    reader = table_reader(tmp_path, "b")
    write_table(tmp_path, table(life="l1"))
    assert reader.read() == table(life="l1")
    when = table_file(tmp_path).stat().st_mtime_ns
    for number in range(20):
        life = f"l{number % 10}"
        write_table(tmp_path, table(life=life))
        os.utime(table_file(tmp_path), ns=(when, when))
        assert reader.read() == table(life=life)


def test_a_table_from_before_the_boot_is_none(tmp_path: Path) -> None:
    write_table(tmp_path, table())
    assert table_reader(tmp_path, "another boot").read() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"x"', "1", " " * (MOST_BYTES + 1)])
def test_what_is_no_table_is_reported(tmp_path: Path, text: str) -> None:
    reader = table_reader(tmp_path, "b")
    write_table(tmp_path, table())
    assert reader.read() is not None
    table_file(tmp_path).write_text("")
    table_file(tmp_path).unlink()
    table_file(tmp_path).write_text(text)
    with pytest.raises((ValueError, KeyError, TypeError)):
        reader.check()


def test_a_table_of_another_version_is_reported(tmp_path: Path) -> None:
    write_table(tmp_path, table())
    data = json.loads(table_file(tmp_path).read_text())
    for wrong in (data | {"new": 1}, data | {"jobs": {UID: {"token": [1]}}}, data | {"jobs": {UID: None}}):
        table_file(tmp_path).write_text(json.dumps(wrong))
        with pytest.raises((ValueError, KeyError, TypeError)):
            table_reader(tmp_path, "b").check()


def test_promises_outlive_who_made_them_but_no_boot(tmp_path: Path) -> None:
    assert promises_reader(tmp_path, "b").once() is None
    write_promises(tmp_path, PROMISES)
    assert promises_reader(tmp_path, "b").once() == PROMISES
    assert promises_reader(tmp_path, "another boot").once() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"boot": "b", "began": 1, "whole": true, "until": [1]}'])
def test_promises_that_cannot_be_read_are_not_known(tmp_path: Path, text: str) -> None:
    promises_file(tmp_path).write_text(text)
    assert promises_reader(tmp_path, "b").once() is None


@pytest.mark.parametrize(
    ("clocks", "newest"), [("12 34", 34), ("12 0", 0), ("12", 0), ("12 x", 0), ("12 -1", 0), ("12 " + "9" * 5000, 0)]
)
def test_the_newest_that_woke_nobody_is_a_number_or_nothing(clocks: str, newest: int) -> None:
    """Whoever writes to the store may write any text."""
    assert unannounced(clocks) == newest
