"""Exit records: code or signal, and the best explanation there is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nodeagent.model.world import WorkerExit
from nodeagent.shim.record import Farewell, exit_record


def a_record(status: int, file: Path, tail: str = "tail") -> WorkerExit:
    return WorkerExit.from_json(json.dumps(exit_record(3, 1, 99, status, False, 0, file, tail, Farewell())))


def test_code_and_signal(tmp_path: Path) -> None:
    seven = a_record(7 << 8, tmp_path / "none")
    assert (seven.code, seven.signal, seven.error) == (7, None, "tail")
    killed = a_record(9, tmp_path / "none")
    assert (killed.code, killed.signal) == (None, 9)
    assert a_record(0, tmp_path / "none").error == ""


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"message": {"message": "short", "extraInfo": {"py_callstack": "Traceback\nx"}}}, "Traceback\nx"),
        ({"message": {"message": "short"}}, "short"),
        ({"message": "plain"}, "plain"),
        ({"other": 1}, '{"other": 1}'),
    ],
)
def test_error_file(tmp_path: Path, content: object, error: str) -> None:
    file = tmp_path / "error.json"
    file.write_text(json.dumps(content))
    assert a_record(256, file).error == error


def test_error_file_that_is_no_json_or_a_link(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("it broke\n" + "x" * 5000)
    assert a_record(256, tmp_path / "text").error == "x" * 4000
    (tmp_path / "link").symlink_to("text")
    assert a_record(256, tmp_path / "link").error == "tail"


def test_an_error_file_that_is_a_folder_or_a_pipe_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert a_record(256, tmp_path / "folder").error == "tail"
    os.mkfifo(tmp_path / "pipe")
    held = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        assert a_record(256, tmp_path / "pipe").error == "tail"
    finally:
        os.close(held)


def test_an_error_file_that_cannot_be_read_is_passed_over() -> None:
    assert a_record(256, Path("/proc/self/mem")).error == "tail"  # EIO at its beginning


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, '{"message": ' + "[" * 900 + "]" * 900 + "}", '{"message": {"message": "a\\ud800b"}}', '"\\ud800"'],
)
def test_whatever_an_error_file_holds_the_record_can_be_read(tmp_path: Path, content: str) -> None:
    file = tmp_path / "error"
    file.write_text(content)
    assert a_record(1 << 8, file).error
