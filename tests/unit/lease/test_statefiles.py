"""What an agent and its lease process write for each other: read back, and whatever else may lie there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nodeagent.lease.core import Departure
from nodeagent.lease.lending import Promises
from nodeagent.lease.statefiles import (
    MOST_BYTES,
    NOBODY,
    LeaseStatus,
    promises_file,
    promises_reader,
    read_departure,
    read_status,
    read_withdrawn,
    table_file,
    table_reader,
    unannounced,
    write_departure,
    write_promises,
    write_status,
    write_table,
    write_withdrawn,
)
from nodeagent.lease.withdrawals import LONGEST_NUMBER, MOST, NOTHING_WITHDRAWN, Withdrawal, Withdrawals
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


NOW = 200.0
WITHDRAWN = Withdrawals("l1", {"u1": Withdrawal(4, 100.5), "u2": Withdrawal(9, 150.0, over=True)})


def test_what_was_taken_back_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_withdrawn(tmp_path, NOW) == NOTHING_WITHDRAWN
    write_withdrawn(tmp_path, WITHDRAWN)
    assert read_withdrawn(tmp_path, NOW) == WITHDRAWN


@pytest.mark.parametrize(
    "jobs",
    [
        None, [], "u1", 1, {"u1": None}, {"u1": []}, {"u1": [4]}, {"u1": [4, 100.5]}, {"u1": [4, 100.5, False, 1]},
        {"u1": ["4", 100.5, False]}, {"u1": [4.0, 100.5, False]}, {"u1": [True, 100.5, False]},
        {"u1": [0, 100.5, False]},
        {"u1": [-4, 100.5, False]}, {"u1": [10**LONGEST_NUMBER, 100.5, False]}, {"u1": [4, "100.5", False]},
        {"u1": [4, None, False]}, {"u1": [4, float("nan"), False]}, {"u1": [4, float("inf"), False]},
        {"u1": [4, -1.0, False]}, {"u1": [4, NOW + 1, False]}, {"u1": [4, 100.5, 0]}, {"u1": [4, 100.5, None]},
        {"u1": [4, 100.5, False], "u2": None}, {f"u{n}": [4, 100.5, True] for n in range(MOST + 1)},
    ],
)  # fmt: skip
def test_what_is_damaged_inside_is_nothing_that_was_taken_back(tmp_path: Path, jobs: object) -> None:
    """It ended each lease process that began, or one of them later; or a job was never let go."""
    (tmp_path / "withdrawn.json").write_text(json.dumps({"life": "l1", "jobs": jobs}))
    assert read_withdrawn(tmp_path, NOW) == NOTHING_WITHDRAWN
    (tmp_path / "withdrawn.json").write_text(json.dumps({"life": ["l1"], "jobs": {}}))
    assert read_withdrawn(tmp_path, NOW) == NOTHING_WITHDRAWN


DEPARTURE = Departure("l1", 3, "e1", 100.5, False, "its agent was silent for 30 s")


def test_a_departure_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_departure(tmp_path, NOW) is None
    write_departure(tmp_path, DEPARTURE)
    assert read_departure(tmp_path, NOW) == DEPARTURE
    for _ in range(2):
        write_departure(tmp_path, None)
        assert read_departure(tmp_path, NOW) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"life": 1}, {"start": "3"}, {"start": None}, {"start": True}, {"era": None}, {"stop_before": "100"},
        {"stop_before": NOW + 1}, {"stop_before": float("nan")}, {"stop_before": -1.0}, {"at_once": 1}, {"why": []},
    ],
)  # fmt: skip
def test_a_departure_that_is_damaged_inside_is_none(tmp_path: Path, wrong: dict[str, object]) -> None:
    (tmp_path / "departure.json").write_text(json.dumps(DEPARTURE._asdict() | wrong))
    assert read_departure(tmp_path, NOW) is None


def test_what_it_reported(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    for status in (LeaseStatus("left", "why", ("l1", 2, "e1")), LeaseStatus("idle", "", NOBODY)):
        write_status(tmp_path, status)
        assert read_status(tmp_path) == status


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "gone"},
        {"state": ["left"]},
        {"why": None},
        {"of": []},
        {"of": 5},
        {"of": ["l1", "2", "e1"]},
        {"new": 1},
    ],
)  # fmt: skip
def test_a_report_that_is_damaged_inside_is_none(tmp_path: Path, wrong: dict[str, object]) -> None:
    """It ended the agent that read it."""
    written = LeaseStatus("left", "why", ("l1", 2, "e1"))._asdict() | wrong
    (tmp_path / "status.json").write_text(json.dumps(written))
    assert read_status(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", "[" * 100_000, "\udcff", " " * MOST_BYTES + "{}"])
def test_what_nobody_can_read_is_nothing(tmp_path: Path, text: str) -> None:
    for name in ("departure.json", "withdrawn.json", "status.json"):
        (tmp_path / name).write_text(text, errors="surrogateescape")
    found = read_departure(tmp_path, NOW), read_withdrawn(tmp_path, NOW), read_status(tmp_path)
    assert found == (None, NOTHING_WITHDRAWN, None)
