"""Repairs that were begun are known after any restart, and a file that cannot be read is no empty one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeagent.agent.repair import MOST_KEPT, FileRepairLog
from nodeagent.model.health import Attempt


def attempt(at: float) -> Attempt:
    return Attempt(kind="reboot", rule="xid.79", whole=True, at=at, boot="b")


async def test_what_was_written_is_read(tmp_path: Path) -> None:
    log = FileRepairLog(tmp_path / "repairs.json")
    assert log.load() == ()
    await log.save([attempt(1.0)])
    assert FileRepairLog(log.file).load() == (attempt(1.0),)
    await log.save([attempt(float(i)) for i in range(MOST_KEPT + 3)])
    assert (len(log.load()), log.load()[-1].at) == (MOST_KEPT, MOST_KEPT + 2.0)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2, "repairs": []}', '{"version": 1, "repairs": [{}]}'])
def test_a_file_that_nobody_understands_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "repairs.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"repairs\.json cannot be read .*: see what was repaired, then remove it"):
        FileRepairLog(file).load()


def test_a_pipe_in_its_place_is_an_error_and_nobody_waits_for_who_writes_to_it(tmp_path: Path) -> None:
    os.mkfifo(file := tmp_path / "repairs.json")
    with pytest.raises(ValueError, match=r"repairs\.json cannot be read .*it is no regular file"):
        FileRepairLog(file).load()
